"""A meeting point whose name nobody knows: told at once, asked for again, and given up after a while."""

from __future__ import annotations

import logging
import socket

import pytest

from trainer.errors import PipelineError
from trainer.flags import World
from trainer.pipeline import nodes
from trainer.pipeline.workers import Board

WORLD = World(rank=1, size=2, address="first.example", port=29500)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "ASK_EVERY_S", 0.001)


def answer_after(monkeypatch: pytest.MonkeyPatch, failures: int, asked: list[str]) -> None:
    def look_up(name: str, port: int, **_options: object) -> list[object]:
        asked.append(name)
        if len(asked) <= failures:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [port]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_a_name_that_stays_unknown_ends_the_wait_with_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(nodes, "MEET_S", 0.0)
    answer_after(monkeypatch, 1_000_000, [])

    with pytest.raises(PipelineError, match=r"at first\.example:29500: gaierror: .*same MASTER_ADDR"):
        nodes.Nodes(WORLD, Board(stall_s=60.0), uses_cuda=False, limit_s=60.0)


def test_a_name_that_cannot_be_one_is_not_asked_for_again(monkeypatch) -> None:
    with pytest.raises(PipelineError, match=r"could not meet the other 1 at .*: UnicodeError"):
        nodes.Nodes(
            World(rank=0, size=2, address="x" * 300, port=29500),
            Board(stall_s=60.0),
            uses_cuda=False,
            limit_s=60.0,
        )


def test_a_name_that_comes_later_is_waited_for_and_told_once(monkeypatch, caplog) -> None:
    asked: list[str] = []
    answer_after(monkeypatch, 5, asked)

    def meet(*_args: object, **_options: object) -> object:
        raise RuntimeError("met, as far as the name goes")

    monkeypatch.setattr(nodes, "rendezvous", meet)

    with caplog.at_level(logging.WARNING), pytest.raises(PipelineError, match="as far as the name goes"):
        nodes.Nodes(WORLD, Board(stall_s=60.0), uses_cuda=False, limit_s=60.0)

    assert asked == ["first.example"] * 6
    assert caplog.text.count("MASTER_ADDR is no name that this machine knows: first.example") == 1
