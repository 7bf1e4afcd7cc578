"""How many steps a run has left, and where its schedule stands, after any change of drafters and machines."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.assembly import plan_steps
from trainer.drafter.worker import StepPlan


@dataclass
class Config:
    """What `plan_steps` reads of a configuration."""

    drafters: int
    accumulation: int
    max_steps: int = 0
    devices: SimpleNamespace = field(init=False)
    optim: SimpleNamespace = field(init=False)

    def __post_init__(self):
        self.devices = SimpleNamespace(drafters=lambda: ("cpu",) * self.drafters)
        self.optim = SimpleNamespace(grad_accum=self.accumulation, max_steps=self.max_steps)


def fresh(total_packs):
    return StepPlan(
        first_step=0, total_steps=0, total_packs=total_packs, packs_per_epoch=total_packs, tokens=0
    )


@given(
    packs=st.integers(1, 500),
    before=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    share=st.floats(0, 1),
)
def test_plan_goes_on_where_the_packs_stand(packs, before, after, share):
    drafters, accumulation, ranks = before
    first = plan_steps(
        Config(drafters, accumulation), fresh(packs), ranks=ranks, step=0, packs_done=0, tokens=0
    )
    per_step = drafters * accumulation * ranks
    assert first.total_steps == -(-packs // per_step)
    assert first.schedule_shift == 0
    step = int(share * first.total_steps)
    done = min(packs, step * per_step)

    drafters, accumulation, ranks = after
    second = plan_steps(
        Config(drafters, accumulation), first, ranks=ranks, step=step, packs_done=done, tokens=7
    )

    per_step = drafters * accumulation * ranks
    assert second.total_steps - step == -(-(packs - done) // per_step)
    assert (second.first_step, second.first_packs, second.tokens) == (step, done, 7)
    # rate and noise see the step that a run of the new kind would be at, to within one
    assert step + second.schedule_shift == done // per_step
    whole = -(-packs // per_step)
    if done < packs:
        assert abs(second.total_steps + second.schedule_shift - whole) <= 1
    if before == after and done < packs:
        assert second.schedule_shift == 0
        assert second.total_steps == first.total_steps


@pytest.mark.parametrize(("limit", "expected"), [(5, 5), (0, 10), (50, 10)])
def test_limit_of_steps_holds(limit, expected):
    plan = plan_steps(Config(2, 1, limit), fresh(20), ranks=1, step=0, packs_done=0, tokens=0)

    assert plan.total_steps == expected
