"""Evidence: what an answer proves, and that silence proves nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.domain.facts import GpuMemory, ShimAnswer
from supervisor.domain.policy import HealthPolicy
from supervisor.domain.run import Reason
from supervisor.reconciler.logscan import LogScan
from supervisor.reconciler.observe import Look, checkpoint_time, exit_facts, find_gone, judge_gpu_memory
from supervisor.reconciler.reachability import Reachability
from supervisor.reconciler.sampler import GpuView
from supervisor.store.tables import Attempt

NOW = datetime(2026, 1, 1, tzinfo=UTC)
IDENTITY = {"boot_id": "boot-1", "init_ticks": 10, "pid": 7, "start_ticks": 99}


def make_attempt(**fields: Any) -> Attempt:
    values = {"state": "ready", "identity": IDENTITY, **fields}
    return Attempt(
        id="a", run_id="r", node_id="n", number=1, generation=1, created_at=NOW, updated_at=NOW, **values
    )


def connection(hello: dict[str, Any] | None, container: str | None = None) -> Any:
    return SimpleNamespace(hello=hello, reach=Reachability(container_status=container))


KNOWN = Look(answer=ShimAnswer.KNOWN, reply={"state": {"phase": "running"}})


@pytest.mark.parametrize(
    ("hello", "container", "look", "expected"),
    [
        ({"boot_id": "boot-1", "init_ticks": 10}, None, KNOWN, None),
        ({"boot_id": "boot-2", "init_ticks": 10}, None, KNOWN, Reason.HOST_REBOOTED),
        ({"boot_id": "boot-1", "init_ticks": 11}, None, KNOWN, Reason.CONTAINER_RESTARTED),
        (None, "stopped", Look(), Reason.CONTAINER_STOPPED),
        (None, None, Look(error="link down"), None),
        ({"boot_id": "boot-2", "init_ticks": 10}, None, Look(), None),
    ],
    ids=["same", "rebooted", "restarted", "stopped", "silent", "other boot without an answer"],
)
def test_an_attempt_is_gone_only_on_evidence(
    hello: dict[str, Any] | None, container: str | None, look: Look, expected: Reason | None
) -> None:
    assert find_gone(connection(hello, container), make_attempt(), look) is expected


def test_an_exit_record_is_better_evidence_than_another_boot() -> None:
    look = Look(answer=ShimAnswer.KNOWN, reply={"state": {}, "exit": {"code": 0}})
    assert find_gone(connection({"boot_id": "boot-2", "init_ticks": 1}), make_attempt(), look) is None


def test_without_an_identity_nothing_can_be_said_to_be_gone() -> None:
    assert find_gone(connection(None, "stopped"), make_attempt(identity=None), Look()) is None


def test_an_exit_record_becomes_facts() -> None:
    facts = exit_facts({"code": None, "signal": 9, "oom": True, "quarantined": True, "last_lines": ["a", 2]})

    assert facts is not None
    assert (facts.code, facts.signal, facts.oom, facts.is_quarantined) == (None, 9, True, True)
    assert facts.last_lines == ("a", "2")
    assert exit_facts(None) is None


def view(
    used: int | None, *, t: float = NOW.timestamp() + 5, reason: str | None = None, age_s: float = 1.0
) -> GpuView:
    gpus = [{"index": 0, "uuid": "GPU-0", "mem_used_bytes": used}]
    return GpuView({"gpus": gpus, "reason": reason}, 100.0 - age_s)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (view(100), GpuMemory.FREE),
        (view(2000), GpuMemory.IN_USE),
        (view(None), GpuMemory.UNKNOWN),
        (view(100, reason="Timeout"), GpuMemory.UNKNOWN),
        (view(100, age_s=60.0), GpuMemory.UNKNOWN),
        (view(100, age_s=11.0), GpuMemory.AWAITED),
        (view(2000, age_s=11.0), GpuMemory.AWAITED),
        (None, GpuMemory.UNKNOWN),
    ],
    ids=[
        "free",
        "in use",
        "no value",
        "no nvml",
        "stale",
        "free before the end",
        "in use before the end",
        "never sampled",
    ],
)
def test_gpu_memory_is_released_only_when_measured_after_the_end(
    sample: GpuView | None, expected: GpuMemory
) -> None:
    attempt = make_attempt(gpus=[{"index": 0, "uuid": "GPU-0"}], ended_at=NOW, state="stopped")
    assert judge_gpu_memory(attempt, sample, 1000, since_s=90.0, now_s=100.0) is expected


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (1767225600.0, NOW),
        ("2026-01-01T00:00:00+00:00", NOW),
        ("2026-01-01T00:00:00", NOW),
        ("yesterday", None),
        (None, None),
    ],
)
def test_the_time_of_a_checkpoint_is_read_in_either_spelling(saved: Any, expected: datetime | None) -> None:
    assert checkpoint_time({"last_checkpoint": {"saved_at": saved}}) == expected


def test_a_status_without_a_checkpoint_has_no_time() -> None:
    assert checkpoint_time({"last_checkpoint": None}) is None


def test_patterns_are_found_across_pieces_and_progress_bars() -> None:
    policy = HealthPolicy(ready_regex=r"^training began", progress_regex=r"step (\d+)")
    scan = LogScan()

    scan.take(b"loading\ntraini", policy, 1.0)
    assert not scan.is_ready
    scan.take(b"ng began\nstep 1\rstep 2\rstep 2\n", policy, 2.0)
    scan.take(b"step 2\n", policy, 9.0)

    assert scan.is_ready
    assert (scan.step, scan.progress_s) == (2, 2.0)


def test_a_line_without_end_does_not_grow_without_bound() -> None:
    scan = LogScan()
    for _ in range(10):
        scan.take(b"x" * 100_000, HealthPolicy(ready_regex="y"), 1.0)
    assert len(scan.partial) <= 8192
