"""Requests to the shim: started, refused with a cause, or not known; never sent twice blindly."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.domain.errors import (
    CommandFailedError,
    ConnectError,
    NotRunningError,
    OutcomeUnknownError,
    ShimError,
    SupervisorError,
)
from supervisor.reconciler.act import send_start, send_stop, send_tombstone
from supervisor.transport.base import CommandResult

STATE = {"phase": "running", "identity": {"pid": 7}}
REQUEST = {"v": 1, "attempt_id": "a1"}


class Node:
    """A connection that plays one answer for the agent and one for a command."""

    def __init__(self, agent: Any = None, command: Any = None, *, can_start: bool = True) -> None:
        self.address = SimpleNamespace(python="python3", root="/srv/d")
        self.shim_path = "/srv/d/shim/x/dflash-shim.pyz"
        self.hello = {"capabilities": ["start"] if can_start else ["stop"]}
        self.transport = self
        self.agent, self.command = agent, command
        self.calls: list[str] = []
        self.stdin = b""

    async def request(self, op: str, **_fields: Any) -> dict[str, Any]:
        self.calls.append(f"agent {op}")
        if isinstance(self.agent, Exception):
            raise self.agent
        return self.agent

    async def run(self, argv: Any, *, stdin: bytes = b"", **_options: Any) -> CommandResult:
        self.calls.append(f"command {argv[2]}")
        self.stdin = stdin
        if isinstance(self.command, Exception):
            raise self.command
        return CommandResult(
            argv=tuple(argv), exit_code=0, stdout=json.dumps(self.command).encode(), stderr=b""
        )


def reply(**fields: Any) -> dict[str, Any]:
    return {"v": 1, "ok": True, "existing": False, "state": STATE, **fields}


def refusal(reason: str) -> dict[str, Any]:
    return {"v": 1, "ok": False, "error": {"reason": reason, "message": "no", "errno": 2, "data": {}}}


async def test_the_open_agent_launches_without_a_further_command() -> None:
    node = Node(agent={"existing": False, "state": STATE})

    outcome = await send_start(node, REQUEST)  # type: ignore[arg-type]

    assert outcome.state == STATE
    assert node.calls == ["agent start"]


@pytest.mark.parametrize(
    ("node", "request_body"),
    [
        (Node(command=reply(), can_start=False), REQUEST),
        (Node(agent=ShimError("gone", reason="LauncherGone"), command=reply()), REQUEST),
        (Node(command=reply()), {**REQUEST, "spec": "x" * (2 << 20)}),
    ],
    ids=["older agent", "launcher gone", "huge request"],
)
async def test_a_command_launches_where_the_agent_cannot(node: Node, request_body: dict[str, Any]) -> None:
    outcome = await send_start(node, request_body)  # type: ignore[arg-type]

    assert outcome.state == STATE
    assert node.calls[-1] == "command start"
    assert json.loads(node.stdin) == request_body


@pytest.mark.parametrize(
    "node",
    [
        Node(agent=ShimError("a log is there", reason="LogExists", errno=17)),
        Node(command=refusal("LogExists"), can_start=False),
        Node(command=CommandFailedError("no such file", reason="NoPython"), can_start=False),
    ],
    ids=["agent", "command", "no interpreter"],
)
async def test_a_refusal_is_a_cause(node: Node) -> None:
    outcome = await send_start(node, REQUEST)  # type: ignore[arg-type]

    assert outcome.state is None
    assert outcome.error is not None
    assert outcome.error.reason in {"LogExists", "NoPython"}
    assert outcome.unknown == ""


@pytest.mark.parametrize(
    "error",
    [
        OutcomeUnknownError("link lost before the answer"),
        ConnectError("refused", reason="ConnectRefused"),
        NotRunningError("container stopped"),
        ShimError("not decided after 60 s", reason="LaunchPending"),
        ShimError("the shim ended before it answered", reason="ShimDied"),
    ],
    ids=lambda error: error.reason,
)
async def test_an_answer_that_is_missing_is_unknown_and_nothing_is_sent_again(error: SupervisorError) -> None:
    node = Node(agent=error, command=reply())

    outcome = await send_start(node, REQUEST)  # type: ignore[arg-type]

    assert (outcome.state, outcome.error) == (None, None)
    assert outcome.unknown
    assert node.calls == ["agent start"]


async def test_a_stop_without_an_answer_is_asked_again_later() -> None:
    fields = {"stop_id": "s", "reason": "r", "actor": "a", "save": True}

    lost = await send_stop(Node(agent=OutcomeUnknownError("lost")), "a1", **fields)  # type: ignore[arg-type]
    answered = await send_stop(Node(agent={"state": STATE}), "a1", **fields)  # type: ignore[arg-type]

    assert lost is None
    assert answered == STATE


async def test_a_tombstone_says_what_the_attempt_really_is() -> None:
    node = Node(command=reply(state={"phase": "abandoned"}))
    assert (await send_tombstone(node, "a1"))["phase"] == "abandoned"  # type: ignore[arg-type]
