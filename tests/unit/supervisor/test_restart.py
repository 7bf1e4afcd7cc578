"""Rules, defaults, backoff and the ledgers that bound every path."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain.policy import RestartPolicy
from supervisor.domain.restart import (
    EndedAttempt,
    Ledger,
    backoff_s,
    failure_fingerprint,
    forget_failures,
    judge_end,
)
from supervisor.domain.run import AttemptState, Reason
from tests.support.domain_builders import T0

POLICY = RestartPolicy()


def end(number: int = 1, *, at_s: float = 0, **changes: Any) -> EndedAttempt:
    fields: dict[str, Any] = {
        "id": f"a{number}",
        "state": AttemptState.FAILED,
        "reason": Reason.EXITED_NON_ZERO,
        "ended_at": T0 + timedelta(seconds=at_s),
        "exit_code": 1,
        **changes,
    }
    return EndedAttempt(**fields)


def play(policy: RestartPolicy, ends: list[EndedAttempt]) -> list[Any]:
    """Judge ends in order; stops at the first that is no restart."""
    ledger, judgements = Ledger(), []
    for item in ends:
        judged = judge_end(item, policy, ledger, now=item.ended_at, seed=1)
        judgements.append(judged)
        ledger = judged.ledger
        if judged.verdict != "restart":
            break
    return judgements


def test_delays_grow_by_the_factor_up_to_the_cap() -> None:
    policy = RestartPolicy(burst=50, interval_s=360_000, no_progress=50, max_restarts=50)
    delays = [policy.nominal_delay_s(n) for n in range(8)]
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]


@given(failures=st.integers(1, 40), seed=st.integers(0, 2**40))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_jitter_stays_within_a_fifth_and_depends_on_the_seed_alone(failures: int, seed: int) -> None:
    nominal = POLICY.nominal_delay_s(failures)
    delay = backoff_s(POLICY, failures, seed=seed)
    assert 0.8 * nominal <= delay <= 1.2 * nominal
    assert delay == backoff_s(POLICY, failures, seed=seed)


def test_jitter_differs_between_runs() -> None:
    assert len({backoff_s(POLICY, 1, seed=seed) for seed in range(50)}) == 50


def test_six_failures_within_the_interval_are_a_crash_loop() -> None:
    ends = [end(n, at_s=60 * n, has_new_checkpoint=True) for n in range(1, 8)]
    judged = play(POLICY, ends)
    assert [item.verdict for item in judged] == ["restart"] * 5 + ["hold"]
    assert judged[-1].reason is Reason.CRASH_LOOP


def test_failures_outside_of_the_interval_do_not_count_for_the_loop() -> None:
    ends = [end(n, at_s=1000 * n, has_new_checkpoint=True) for n in range(1, 10)]
    assert {item.verdict for item in play(POLICY, ends)} == {"restart"}


def test_the_lifetime_budget_ends_even_slow_failures() -> None:
    ends = [end(n, at_s=10_000 * n, has_new_checkpoint=True) for n in range(1, 30)]
    judged = play(POLICY, ends)
    assert len(judged) == 21
    assert judged[-1].reason is Reason.BUDGET_EXHAUSTED


def test_three_ends_without_a_newer_checkpoint_hold() -> None:
    judged = play(POLICY, [end(n, has_new_checkpoint=False) for n in range(1, 9)])
    assert len(judged) == 3
    assert judged[-1].reason is Reason.NO_PROGRESS


def test_a_newer_checkpoint_starts_the_count_over_and_unknown_consumes_nothing() -> None:
    pattern = [False, False, True, False, None, False, False]
    ends = [end(n, at_s=2000 * n, has_new_checkpoint=seen) for n, seen in enumerate(pattern, 1)]
    judged = play(POLICY, ends)
    assert len(judged) == 7
    assert [item.ledger.no_progress for item in judged] == [1, 2, 0, 1, 1, 2, 3]


def test_the_same_cause_three_times_in_a_row_holds() -> None:
    same = {"cause_fingerprint": "ValueError in data.py:load while loading", "has_new_checkpoint": None}
    judged = play(POLICY, [end(n, **same) for n in range(1, 6)])
    assert (len(judged), judged[-1].reason) == (3, Reason.REPEATED_CAUSE)
    mixed = [end(n, cause_fingerprint=f"E{n % 2}", has_new_checkpoint=None) for n in range(1, 5)]
    assert {item.verdict for item in play(POLICY, mixed)} == {"restart"}


def test_uncounted_restarts_have_a_ceiling_of_their_own() -> None:
    lost = {"state": AttemptState.LOST, "reason": Reason.CONTAINER_RESTARTED, "exit_code": None}
    judged = play(POLICY, [end(n, at_s=60 * n, **lost) for n in range(1, 20)])
    assert len(judged) == 11
    assert judged[-1].reason is Reason.UNCOUNTED_CEILING
    assert all(not item.is_counted and item.ledger.streak == 0 for item in judged)
    slow = play(POLICY, [end(n, at_s=10_000 * n, **lost) for n in range(1, 30)])
    assert {item.verdict for item in slow} == {"restart"}


def test_a_healthy_reset_starts_the_backoff_over_but_keeps_the_budget() -> None:
    ledger = play(POLICY, [end(n, at_s=n, has_new_checkpoint=False) for n in (1, 2)])[-1].ledger
    fresh = forget_failures(ledger)
    assert (fresh.streak, fresh.no_progress, fresh.restarts, len(fresh.counted)) == (0, 0, 2, 2)


def test_a_late_decision_does_not_wait_again() -> None:
    late = T0 + timedelta(hours=5)
    judged = judge_end(end(), POLICY, Ledger(), now=late, seed=1)
    assert judged.start_at == late


@pytest.mark.parametrize(
    ("rule", "changes", "matches"),
    [
        ({"exit_codes": [7, 8]}, {"exit_code": 7}, True),
        ({"exit_codes": [7, 8]}, {"exit_code": 1}, False),
        ({"signal": 9}, {"exit_signal": 9, "exit_code": None}, True),
        ({"signal": 9}, {"exit_signal": None}, False),
        ({"reason": "ReadyTimeout"}, {"reason": Reason.READY_TIMEOUT}, True),
        ({"phase": "loading"}, {"phase": "loading"}, True),
        ({"phase": "loading"}, {"phase": None}, False),
        ({"log_pattern": "NCCL .*timeout"}, {"last_lines": ("x", "NCCL watchdog timeout")}, True),
        ({"log_pattern": "NCCL"}, {"last_lines": ("fine",)}, False),
        ({"phase": "loading", "exit_codes": [1]}, {"phase": "training"}, False),
    ],
)
def test_a_rule_matches_when_all_its_matchers_do(rule: Any, changes: Any, matches: bool) -> None:
    policy = RestartPolicy.model_validate({"rules": [{**rule, "action": "hold"}]})
    judged = judge_end(end(**changes), policy, Ledger(), now=T0, seed=1)
    assert (judged.verdict == "hold") is matches


def test_the_first_matching_rule_wins_over_later_ones_and_the_defaults() -> None:
    rules = [{"exit_codes": [2], "action": "restart"}, {"exit_codes": [2], "action": "hold"}]
    policy = RestartPolicy.model_validate({"rules": rules})
    judged = judge_end(end(exit_code=2, reason=Reason.CANNOT_BOOT), policy, Ledger(), now=T0, seed=1)
    assert (judged.verdict, judged.is_counted) == ("restart", True)
    assert "rule 1" in judged.message


@pytest.mark.parametrize(
    ("name", "state", "verdict"),
    [
        ("never", AttemptState.FAILED, "fail"),
        ("on-failure", AttemptState.FAILED, "restart"),
        ("on-failure", AttemptState.SUCCEEDED, "succeeded"),
        ("always", AttemptState.SUCCEEDED, "restart"),
    ],
)
def test_the_policy_word(name: str, state: AttemptState, verdict: str) -> None:
    policy = RestartPolicy.model_validate({"policy": name})
    reason = Reason.COMPLETED if state is AttemptState.SUCCEEDED else Reason.EXITED_NON_ZERO
    assert judge_end(end(state=state, reason=reason), policy, Ledger(), now=T0, seed=1).verdict == verdict


def test_the_ledger_survives_json() -> None:
    ledger = play(POLICY, [end(n, at_s=n, cause_fingerprint="E") for n in (1, 2)])[-1].ledger
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert Ledger.from_json({}) == Ledger()


def test_the_remaining_budget_is_shown() -> None:
    ledger = play(POLICY, [end(n, has_new_checkpoint=False) for n in (1, 2)])[-1].ledger
    assert ledger.remaining(POLICY, T0) == {"restarts": 18, "burst": 3, "no_progress": 1, "uncounted": 10}
    assert ledger.remaining(POLICY, T0 + timedelta(hours=2))["burst"] == 5


ENDS = st.lists(
    st.tuples(
        st.sampled_from([Reason.EXITED_NON_ZERO, Reason.CONTAINER_RESTARTED, Reason.STOPPED_EXTERNALLY]),
        st.integers(0, 400),
        st.sampled_from([None, True, False]),
    ),
    min_size=60,
    max_size=60,
)


@given(ENDS)
@settings(derandomize=True, max_examples=40, deadline=None)
def test_no_path_restarts_without_bound(pattern: list[Any]) -> None:
    at, ends = 0, []
    for number, (reason, gap, seen) in enumerate(pattern, 1):
        at += gap
        ends.append(end(number, at_s=at, reason=reason, has_new_checkpoint=seen))
    judged = play(POLICY, ends)
    assert len(judged) <= POLICY.max_restarts + POLICY.uncounted_per_day + 1
    assert judged[-1].verdict == "hold"


def test_a_traceback_gives_type_frame_and_phase() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/srv/dflash/releases/ab/trainer/train.py", line 3, in train_step',
        '  File "/srv/dflash/envs/cd/lib/python3.12/site-packages/torch/nn.py", line 9, in forward',
        "torch.OutOfMemoryError: CUDA out of memory",
    ]
    assert (
        failure_fingerprint(lines, "training")
        == "torch.OutOfMemoryError in train.py:train_step while training"
    )
    assert failure_fingerprint(["Killed"], "training") is None
    other = [*lines[:1], lines[1].replace("line 3", "line 30"), *lines[2:]]
    assert failure_fingerprint(other, "training") == failure_fingerprint(lines, "training")


def test_judging_changes_nothing_it_was_given() -> None:
    ledger = Ledger(streak=1)
    judge_end(end(), POLICY, ledger, now=T0, seed=1)
    assert ledger == replace(ledger)
    assert ledger.streak == 1
