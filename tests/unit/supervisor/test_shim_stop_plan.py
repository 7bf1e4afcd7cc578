"""The steps of a stop as pure arithmetic on a clock that the test moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisor.shim.stop import STEPS, StopPlan

POLICY = {"grace_s": 120.0, "extend_max_s": 900.0, "term_s": 30.0, "kill_s": 10.0, "verify_s": 60.0}


def test_steps_follow_in_order_at_their_deadlines() -> None:
    plan = StopPlan(POLICY, 0.0)

    seen = [(now, plan.tick(float(now)), plan.step) for now in (0, 1, 119, 120, 149, 150, 159, 160, 219, 220)]

    assert seen == [
        (0, "ask", "asked"),
        (1, None, "asked"),
        (119, None, "asked"),
        (120, "term", "term"),
        (149, None, "term"),
        (150, "kill", "kill"),
        (159, "kill", "kill"),
        (160, "kill", "verify"),
        (219, "kill", "verify"),
        (220, None, "done"),
    ]


def test_extension_moves_the_end_of_the_grace_and_is_capped() -> None:
    plan = StopPlan(POLICY, 0.0)
    plan.tick(0.0)

    assert plan.tick(130.0, extend_s=60.0) is None
    assert plan.step == "asked"
    assert plan.grace_s(60.0) == 180.0
    assert plan.grace_s(1e9) == 900.0
    assert plan.tick(900.0, extend_s=1e9) == "term"


def test_extension_never_shortens_the_grace() -> None:
    plan = StopPlan({**POLICY, "extend_max_s": 10.0}, 0.0)

    assert plan.grace_s(5.0) == 120.0
    assert plan.grace_s(-50.0) == 120.0


def test_second_request_may_end_the_grace_earlier_never_later() -> None:
    plan = StopPlan(POLICY, 0.0)
    plan.tick(0.0)

    plan.shorten({**POLICY, "grace_s": 5.0}, 10.0)
    plan.shorten({**POLICY, "grace_s": 500.0}, 11.0)

    assert plan.tick(14.9, extend_s=600.0) is None
    assert plan.tick(15.0, extend_s=600.0) == "term"


def test_clearing_leftovers_starts_at_term() -> None:
    plan = StopPlan(POLICY, 50.0, first="term")

    assert plan.tick(50.0) == "term"
    assert plan.tick(80.0) == "kill"


def test_a_late_tick_still_gives_every_step_its_time() -> None:
    plan = StopPlan(POLICY, 0.0)
    plan.tick(0.0)

    assert plan.tick(10_000.0) == "term", "a suspended shim must not jump from asking to SIGKILL"


@given(st.lists(st.floats(0.0, 400.0), max_size=40), st.floats(0.0, 2000.0))
def test_steps_never_go_back_and_every_stop_ends(moves: list[float], extend_s: float) -> None:
    plan = StopPlan(POLICY, 0.0)
    now = 0.0
    order = [STEPS.index(plan.step)]
    for move in [*moves, *[1000.0] * 8]:
        now += move
        plan.tick(now, extend_s)
        order.append(STEPS.index(plan.step))

    assert order == sorted(order)
    assert plan.step == "done"
