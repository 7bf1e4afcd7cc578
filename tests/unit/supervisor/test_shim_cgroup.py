"""Evidence from cgroup files: what counts as an OOM kill, and what stays unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.shim import cgroup
from supervisor.shim.cgroup import group_path, oom_evidence, oom_kills


def test_count_is_read_from_memory_events(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 12\nmax 3\noom 1\noom_kill 2\n")

    assert oom_kills(str(tmp_path)) == 2


@pytest.mark.parametrize("text", [None, "", "oom_kill x\n", "low 0\n"], ids=repr)
def test_group_without_a_count_says_unknown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "memory.events").write_text(text)

    assert oom_kills(str(tmp_path)) is None
    assert oom_kills(None) is None


@pytest.mark.parametrize(
    ("before", "after", "code", "number", "evidence"),
    [
        pytest.param(0, 1, None, 9, True, id="killed and counted"),
        pytest.param(0, 1, 137, None, True, id="a wrapper reports 137"),
        pytest.param(1, 1, None, 9, False, id="killed by somebody else"),
        pytest.param(0, 1, 0, None, False, id="a helper was killed, the trainer finished"),
        pytest.param(None, 1, None, 9, None, id="no count before"),
        pytest.param(0, None, None, 9, None, id="no count after"),
    ],
)
def test_oom_needs_a_kill_and_a_rising_count(
    before: int | None, after: int | None, code: int | None, number: int | None, evidence: bool | None
) -> None:
    assert oom_evidence(before, after, code, number) is evidence


def test_the_same_attempt_under_two_roots_has_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "own_group", lambda: "/sys/fs/cgroup/ours")

    one, two = group_path("/srv/one", "a1"), group_path("/srv/two", "a1")

    assert one is not None
    assert one != two
    assert one == group_path("/srv/../srv/one", "a1"), "a crash must find it again"
    assert Path(one).parent == Path("/sys/fs/cgroup/ours")
    assert one.endswith("-a1")
