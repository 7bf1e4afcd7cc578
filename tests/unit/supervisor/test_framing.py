"""What is concluded from a framed command's bytes, however they are cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.domain.errors import CommandFailedError, DeadlineError, OutcomeUnknownError, TransportError
from supervisor.transport.argv import Frame
from supervisor.transport.framing import FramedOutcome, StreamCollector, conclude

FRAME = Frame("0123456789abcdef01234567")


def collect(stream: bytes, cuts: list[int], limit: int = 1 << 20) -> StreamCollector:
    collector = StreamCollector(FRAME, limit)
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in pairwise(edges):
        collector.feed(stream[start:end])
    collector.finish()
    return collector


@given(st.binary(max_size=80), st.binary(max_size=200), st.integers(0, 255), st.lists(st.integers(0, 999)))
def test_any_pieces_give_the_same(noise: bytes, data: bytes, status: int, cuts: list[int]) -> None:
    stream = noise + FRAME.begin + data + FRAME.end + b"%d>>" % status + b"a late child"
    seen = collect(stream, cuts)
    assert (bytes(seen.noise), bytes(seen.data), seen.exit_code) == (noise, data, status)
    assert not seen.is_truncated


@given(st.binary(max_size=200), st.lists(st.integers(0, 999)), st.integers(0, 300))
def test_without_an_end_everything_is_data(data: bytes, cuts: list[int], limit: int) -> None:
    seen = collect(FRAME.begin + data, cuts, limit)
    assert (bytes(seen.data), seen.exit_code, seen.is_truncated) == (data[:limit], None, len(data) > limit)


def test_a_half_end_marker_is_data() -> None:
    half = FRAME.end + b"25"
    assert bytes(collect(FRAME.begin + half, []).data) == half


def test_noise_is_bounded_and_keeps_its_end() -> None:
    seen = collect(b"x" * 500_000 + b"END", list(range(0, 500_000, 1000)))
    assert not seen.has_begun
    assert len(seen.noise) <= 65536
    assert seen.noise.endswith(b"END")


def outcome(
    stdout: bytes = b"", stderr: bytes = b"", status: int | None = None, expired: bool = False
) -> FramedOutcome:
    return FramedOutcome(
        argv=("prog", "TOKEN=abc"),
        stdout=collect(stdout, []),
        stderr=collect(stderr, []),
        channel_status=status,
        is_expired=expired,
        deadline_s=5,
    )


@pytest.mark.parametrize("status", [None, 0, 255, 137])
def test_the_marker_s_status_wins_over_the_channel_s(status: int | None) -> None:
    result = conclude(outcome(FRAME.begin + b"o" + FRAME.end + b"3>>", status=status), is_read_only=False)
    assert (result.exit_code, result.stdout) == (3, b"o")


def test_a_status_before_the_begin_is_the_shell_s_failure() -> None:
    with pytest.raises(CommandFailedError, match="Argument list too long") as caught:
        conclude(outcome(stderr=b"bash: Argument list too long\n", status=1), is_read_only=False)
    assert caught.value.reason == "ShellFailed"


@pytest.mark.parametrize(
    ("seen", "act", "question"),
    [
        (outcome(FRAME.begin), OutcomeUnknownError, TransportError),
        (outcome(), OutcomeUnknownError, TransportError),
        (outcome(FRAME.begin, status=137), OutcomeUnknownError, OutcomeUnknownError),
        (outcome(FRAME.begin, expired=True), OutcomeUnknownError, DeadlineError),
        (outcome(expired=True), OutcomeUnknownError, DeadlineError),
    ],
    ids=["cut", "cut before begin", "shell died", "deadline", "deadline before begin"],
)
def test_what_nobody_knows_is_unknown(
    seen: FramedOutcome, act: type[Exception], question: type[Exception]
) -> None:
    for is_read_only, kind in ((False, act), (True, question)):
        with pytest.raises(TransportError) as caught:
            conclude(seen, is_read_only=is_read_only)
        assert type(caught.value) is kind
        assert "abc" not in caught.value.message
