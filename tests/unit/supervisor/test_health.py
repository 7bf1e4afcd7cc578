"""Four layers of health: unknown never acts, limits are learnt, a NaN counts at once."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.domain.health import (
    ProbeMemory,
    ProgressMemory,
    QualityMemory,
    Verdict,
    find_non_finite,
    judge_liveness,
    judge_progress,
    judge_quality,
    judge_readiness,
    progress_limit_s,
    remember_step,
    remember_throughput,
    settle,
    settle_readiness,
)
from supervisor.domain.policy import HealthPolicy, Probe, ProgressProbe, QualityProbe

PROBE = ProgressProbe()


@pytest.mark.parametrize(
    ("alive", "ok"), [(None, None), (True, True), (False, False)], ids=["unknown", "alive", "gone"]
)
def test_liveness_keeps_unknown(alive: Any, ok: Any) -> None:
    assert judge_liveness(alive=alive, shim_alive=True).ok is ok


READY: dict[str, Any] = {
    "phase": None,
    "step": None,
    "has_ready_line": None,
    "has_output": False,
    "is_program": False,
    "running_s": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "policy", "ok", "reason"),
    [
        ({"phase": "training"}, {}, True, "PhaseReached"),
        ({"phase": "loading"}, {}, False, "NotYet"),
        ({"phase": "loading", "step": 1}, {}, True, "FirstStep"),
        ({"phase": "loading", "step": 0}, {}, False, "NotYet"),
        ({"has_ready_line": True, "is_program": True}, {"ready_regex": "go"}, True, "ReadyLine"),
        ({"has_output": True, "is_program": True}, {"ready_regex": "go"}, False, "NotYet"),
        ({"has_output": True, "is_program": True}, {}, True, "FirstOutput"),
        ({"has_output": True}, {}, False, "NotYet"),
        ({"running_s": 2000.0}, {}, False, "ReadyTimeout"),
        ({"running_s": 2000.0, "phase": "loading"}, {"ready_timeout_s": 3000}, False, "NotYet"),
        ({"has_output": None}, {}, None, "NotAsked"),
        ({"has_output": None, "running_s": 9000.0}, {}, None, "NotAsked"),
    ],
)
def test_readiness(changes: Any, policy: Any, ok: Any, reason: str) -> None:
    verdict = judge_readiness(HealthPolicy.model_validate(policy), **{**READY, **changes})
    assert (verdict.ok, verdict.reason) == (ok, reason)


def walk(times: list[tuple[float, int, str]]) -> ProgressMemory:
    memory = ProgressMemory()
    for now_s, step, phase in times:
        memory = remember_step(memory, step=step, phase=phase, now_s=now_s)
    return memory


def test_the_limit_is_five_times_the_longest_normal_interval_and_never_below_the_floor() -> None:
    quick = walk([(n, n, "training") for n in range(12)])
    assert progress_limit_s(quick, PROBE, phase="training") == 60
    slow = walk([(30 * n, n, "training") for n in range(12)])
    assert progress_limit_s(slow, PROBE, phase="training") == 150


def test_warm_up_steps_teach_nothing() -> None:
    times = [0, 100, 300, 400, 500, 600, 602, 604, 606]
    memory = walk([(at, step, "training") for step, at in enumerate(times)])
    assert memory.longest_s == 2


def test_a_checkpoint_between_two_steps_teaches_nothing_and_cannot_trip_the_training_limit() -> None:
    memory = walk([(n, n, "training") for n in range(8)])
    memory = remember_step(memory, step=7, phase="checkpointing", now_s=8)
    during = judge_progress(memory, PROBE, phase="checkpointing", phase_age_s=300, now_s=308)
    assert during.ok
    memory = remember_step(memory, step=8, phase="training", now_s=400)
    assert memory.longest_s == 1
    late = judge_progress(memory, PROBE, phase="training", phase_age_s=None, now_s=461)
    assert (late.ok, late.reason) == (False, "Stalled")


def test_a_phase_that_has_just_begun_is_judged_by_its_own_age() -> None:
    memory = walk([(n, n, "training") for n in range(8)])
    assert judge_progress(memory, PROBE, phase="training", phase_age_s=5, now_s=900).ok
    assert judge_progress(memory, PROBE, phase="training", phase_age_s=500, now_s=900).ok is False


@pytest.mark.parametrize("phase", ["init", "loading", "compiling", "filling"])
def test_before_training_progress_is_unknown(phase: str) -> None:
    memory = walk([(n, n, "training") for n in range(8)])
    assert judge_progress(memory, PROBE, phase=phase, phase_age_s=9999, now_s=9999).ok is None


def test_no_step_and_warm_up_are_unknown() -> None:
    assert judge_progress(ProgressMemory(), PROBE, phase="training", phase_age_s=99, now_s=9999).ok is None
    young = walk([(0, 0, "training"), (1, 1, "training")])
    assert judge_progress(young, PROBE, phase="training", phase_age_s=9999, now_s=9999).reason == "WarmingUp"


def test_memories_survive_json() -> None:
    memory = walk([(n, n, "training") for n in range(8)])
    assert ProgressMemory.from_json(memory.to_json()) == memory
    assert ProgressMemory.from_json({}) == ProgressMemory()
    quality = remember_throughput(QualityMemory(), QualityProbe(), 5.0)
    assert QualityMemory.from_json(quality.to_json()) == quality


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"train": {"loss": float("nan"), "lr": 1.0}}, ["train.loss"]),
        ({"train": {"loss": None}, "nonfinite": ["train.loss"]}, ["train.loss"]),
        ({"train": {"loss": None, "eal": "NaN"}}, ["train.eal"]),
        ({"train": {"lr": float("inf"), "loss": float("inf")}}, ["train.loss", "train.lr"]),
        ({"gpu": [{"power_w": float("nan")}]}, []),
        ({"train": {"loss": 2.0}}, []),
        ({"train": {"loss": None}}, []),
    ],
)
def test_only_training_values_count_as_non_finite(record: Any, names: list[str]) -> None:
    assert find_non_finite(record) == names


def test_a_nan_counts_at_once_and_a_drop_after_several_samples() -> None:
    probe, memory = QualityProbe(), QualityMemory()
    assert judge_quality(memory, probe, non_finite=[]).ok is None
    for _ in range(10):
        memory = remember_throughput(memory, probe, 1000.0)
    assert judge_quality(memory, probe, non_finite=[]).ok
    assert judge_quality(memory, probe, non_finite=["train.loss"]).reason == "NonFinite"
    for count in range(1, 4):
        memory = remember_throughput(memory, probe, 500.0)
        assert judge_quality(memory, probe, non_finite=[]).ok is (count < 3)
    memory = remember_throughput(memory, probe, 990.0)
    assert judge_quality(memory, probe, non_finite=[]).ok
    assert remember_throughput(memory, probe, None) == memory


def test_worst_case_detection_time_is_shown() -> None:
    assert HealthPolicy().liveness.worst_case_s == 15


def looks(probe: Probe, answers: list[tuple[float, bool | None]], ready: bool = False) -> list[bool | None]:
    turn, memory, shown = settle_readiness if ready else settle, ProbeMemory(), []
    for now_s, ok in answers:
        memory, verdict = turn(memory, probe, Verdict(ok=ok, reason="R"), now_s=now_s)
        shown.append(verdict.ok)
    return shown


@pytest.mark.parametrize(
    ("answers", "shown"),
    [
        ([(0, True), (5, False), (10, False), (15, False)], [True, True, True, False]),
        ([(0, True), (5, False), (10, True), (15, False), (20, False)], [True, True, True, True, True]),
        ([(0, True), (5, False), (6, False), (7, False), (8, False)], [True, True, True, True, True]),
        ([(0, True), (5, False), (10, None), (15, False), (20, False)], [True, True, None, True, False]),
        ([(0, False), (5, True), (10, False), (15, False)], [None, True, True, True]),
    ],
    ids=["three in a row", "a good look breaks the row", "one period", "unknown counts nothing", "at first"],
)
def test_an_answer_turns_after_so_many_looks_in_a_row(answers: Any, shown: Any) -> None:
    assert looks(Probe(), answers) == shown


def test_success_may_need_a_row_of_looks_too() -> None:
    assert looks(Probe(success_threshold=2, failure_threshold=1), [(0, False), (5, True), (10, True)]) == [
        False,
        False,
        True,
    ]


def test_not_being_ready_yet_is_shown_and_breaks_a_row_of_good_looks() -> None:
    probe = Probe(success_threshold=2)
    answers: list[tuple[float, bool | None]] = [(0, False), (5, True), (10, False), (15, True), (20, True)]

    assert looks(probe, answers, ready=True) == [False, None, False, None, True]


def test_the_longest_time_until_a_failure_shows_is_known() -> None:
    found = HealthPolicy.model_validate({"ready_timeout_s": 100, "progress": {"floor_s": 30}})

    assert found.detects_within_s() == {"liveness": 15, "readiness": 115, "progress": 40, "quality": 20}


def test_the_shortest_period_decides_how_often_is_looked() -> None:
    assert HealthPolicy.model_validate({"quality": {"period_s": 1}}).period_s == 1
