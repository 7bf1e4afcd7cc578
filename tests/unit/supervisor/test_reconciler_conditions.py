"""Conditions: unknown is shown as unknown, and each false says why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from supervisor.domain.facts import GpuMemory, Observed, ShimAnswer
from supervisor.domain.health import Verdict
from supervisor.domain.run import ConditionType
from supervisor.domain.spec import parse_run_dict
from supervisor.reconciler.conditions import ConditionView, run_conditions
from supervisor.reconciler.observe import NOT_KNOWN, HealthView, Look
from supervisor.reconciler.reachability import Reachability
from supervisor.reconciler.sampler import GpuView
from supervisor.store.tables import Attempt, Run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = parse_run_dict({"name": "r", "node": "n", "command": {"args": []}})
NO_HEALTH = HealthView(alive=NOT_KNOWN, ready=NOT_KNOWN, progress=NOT_KNOWN, quality=NOT_KNOWN)


def make_attempt(state: str, **fields: Any) -> Attempt:
    return Attempt(
        id="a1",
        run_id="r1",
        node_id="n1",
        number=1,
        state=state,
        generation=1,
        created_at=NOW,
        updated_at=NOW,
        **fields,
    )


def conditions(**changes: Any) -> dict[ConditionType, tuple[bool | None, str]]:
    reach = Reachability()
    reach.note_success(NOW)
    fields: dict[str, Any] = {
        "run": Run(
            id="r1", name="r", node_id="n1", spec_digest="d", desired_at=NOW, created_at=NOW, updated_at=NOW
        ),
        "attempt": make_attempt("ready"),
        "observed": Observed(at=NOW, alive=True, shim_alive=True),
        "look": Look(answer=ShimAnswer.KNOWN, reply={"state": {}}),
        "health": NO_HEALTH,
        "reach": reach,
        "gpu_view": None,
        "spec": SPEC,
        "monotonic_s": 100.0,
    }
    return {
        kind: (status, reason)
        for kind, status, reason, _ in run_conditions(ConditionView(**{**fields, **changes}))
    }


def test_a_run_without_an_attempt_says_only_whether_its_node_can_be_reached() -> None:
    assert set(conditions(attempt=None)) == {ConditionType.REACHABLE}


def test_a_node_that_does_not_answer_makes_conditions_unknown_and_not_false() -> None:
    found = conditions(observed=Observed(at=NOW), look=Look(error="link down"))

    assert found[ConditionType.ALIVE] == (None, "NotAnswered")
    assert found[ConditionType.SHIM_PRESENT] == (None, "NotAnswered")


def test_a_lost_shim_beside_a_living_trainer_is_told() -> None:
    found = conditions(observed=Observed(at=NOW, alive=True, shim_alive=False))

    assert found[ConditionType.ALIVE] == (True, "IdentityVerified")
    assert found[ConditionType.SHIM_PRESENT] == (False, "ShimGone")


@pytest.mark.parametrize(
    ("sample", "received_s", "expected"),
    [
        ({"reason": None, "gpus": []}, 99.0, (True, "Sampling")),
        ({"reason": "MissingDependency", "message": "no pynvml"}, 99.0, (False, "MissingDependency")),
        ({"reason": None, "gpus": []}, 10.0, (None, "Stale")),
    ],
    ids=["sampling", "missing", "stale"],
)
def test_gpu_telemetry_is_on_off_with_a_reason_or_not_known(
    sample: dict[str, Any], received_s: float, expected: tuple[bool | None, str]
) -> None:
    assert conditions(gpu_view=GpuView(sample, received_s))[ConditionType.TELEMETRY_OK] == expected


def test_telemetry_that_the_run_turned_off_is_no_alarm() -> None:
    spec = parse_run_dict(
        {"name": "r", "node": "n", "command": {"args": []}, "capabilities": {"nvml": "off"}}
    )
    missing = GpuView({"reason": "MissingDependency", "message": "no pynvml"}, 99.0)

    assert conditions(spec=spec, gpu_view=missing)[ConditionType.TELEMETRY_OK] == (None, "Off")


def test_an_ended_attempt_neither_progresses_nor_is_watched() -> None:
    found = conditions(attempt=make_attempt("failed", ended_at=NOW))

    for kind in ("PROGRESSING", "QUALITY_OK", "SHIM_PRESENT", "TELEMETRY_OK", "DISK_OK"):
        assert found[ConditionType[kind]] == (None, "Ended")


def test_no_sample_at_all_is_not_known() -> None:
    assert conditions()[ConditionType.TELEMETRY_OK] == (None, "NoSampleYet")


def test_judgements_of_health_are_shown_as_they_are() -> None:
    health = HealthView(
        alive=NOT_KNOWN,
        ready=NOT_KNOWN,
        progress=Verdict(ok=False, reason="Stalled", message="step 4 for 99 s"),
        quality=Verdict(ok=False, reason="NonFinite", message="train.loss is not finite"),
    )

    found = conditions(health=health)

    assert found[ConditionType.PROGRESSING] == (False, "Stalled")
    assert found[ConditionType.QUALITY_OK] == (False, "NonFinite")


@pytest.mark.parametrize(
    ("memory", "at", "expected"),
    [
        (GpuMemory.UNKNOWN, None, (None, "NotMeasured")),
        (GpuMemory.AWAITED, None, (None, "NotMeasuredYet")),
        (GpuMemory.IN_USE, None, (False, "StillInUse")),
        (GpuMemory.FREE, None, (True, "Released")),
        (GpuMemory.IN_USE, NOW, (True, "Released")),
    ],
    ids=["unmeasured", "no sample yet", "in use", "released", "released before"],
)
def test_the_gpu_gate_says_what_was_measured(
    memory: GpuMemory, at: datetime | None, expected: tuple[bool | None, str]
) -> None:
    attempt = make_attempt("stopped", gpus=[{"index": 0, "uuid": "GPU-0"}], ended_at=NOW, gpu_clean_at=at)

    found = conditions(attempt=attempt, observed=Observed(at=NOW, gpu_memory=memory))

    assert found[ConditionType.GPU_CLEAN] == expected
    assert found[ConditionType.ALIVE] == (False, "Ended")


@pytest.mark.parametrize(("low", "expected"), [(True, False), (False, True), (None, None)])
def test_disk_is_low_enough_or_not_known(low: bool | None, expected: bool | None) -> None:
    found = conditions(observed=Observed(at=NOW, alive=True, is_disk_low=low))
    assert found[ConditionType.DISK_OK][0] is expected
