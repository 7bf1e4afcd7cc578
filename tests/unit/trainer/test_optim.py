"""AdamW on masters: global denominator, clipping, skipped steps, and the schedule."""

import math

import pytest
import torch
from torch import nn

from trainer.errors import CheckpointError
from trainer.optim.adamw import AdamWSettings, MasterAdamW
from trainer.optim.schedule import learning_rate, warmup_steps


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.LayerNorm(5, bias=False), nn.Linear(5, 2, bias=False)
    ).to(dtype)


def make_optimizer(model, **overrides):
    values = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1e9} | overrides
    return MasterAdamW(model.named_parameters(), AdamWSettings(**values))


def losses(model, rows, weights):
    return (model(rows).square().sum(dim=1) * weights).sum(), weights.sum()


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_golden_20_split_into_microbatches_gives_the_same_update():
    rows, weights = torch.randn(12, 4), torch.rand(12)
    results = []
    for sizes in ([12], [1, 4, 7], [3, 3, 3, 3]):
        model = make_model()
        optimizer = make_optimizer(model, grad_clip=0.3)
        for step in range(3):
            for part in torch.split(torch.arange(12), sizes):
                optimizer.accumulate(*losses(model, rows[part] + step, weights[part]))
            optimizer.step(0.01)
        results.append(parameters(model))

    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-6)


def test_golden_20_microbatch_without_anchor_changes_nothing():
    rows, weights = torch.randn(6, 4), torch.rand(6)
    results = []
    for with_empty in (False, True):
        model = make_model()
        optimizer = make_optimizer(model)
        optimizer.accumulate(*losses(model, rows, weights))
        if with_empty:
            optimizer.accumulate(torch.zeros((), requires_grad=True), torch.zeros(()))
        optimizer.step(0.01)
        results.append(parameters(model))

    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_update_equals_plain_adamw_without_decay_on_norms():
    rows, weights = torch.randn(6, 4), torch.rand(6)
    model, reference = make_model(), make_model()
    optimizer = make_optimizer(model)
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for _ in range(4):
        optimizer.accumulate(*losses(model, rows, weights))
        optimizer.step(0.01)
        numerator, denominator = losses(reference, rows, weights)
        plain.zero_grad()
        (numerator / denominator).backward()
        plain.step()

    for (name, mine), theirs in zip(parameters(model).items(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_nonfinite_step_is_skipped_counted_and_forgotten(bad):
    rows, weights = torch.randn(6, 4), torch.rand(6)
    model = make_model()
    optimizer = make_optimizer(model)
    optimizer.accumulate(*losses(model, rows, weights))
    optimizer.step(0.01)
    before = parameters(model), optimizer.state_tensors()

    for _ in range(2):
        optimizer.accumulate(*losses(model, rows * bad, weights))
        optimizer.step(0.01)

    after = optimizer.state_tensors()
    assert all(torch.equal(parameters(model)[name], value) for name, value in before[0].items())
    assert all(torch.equal(after[name], value) for name, value in before[1].items() if "counter" not in name)
    assert (optimizer.skipped.item(), optimizer.in_a_row.item(), optimizer.longest_row.item()) == (2, 2, 2)

    optimizer.accumulate(*losses(model, rows, weights))
    optimizer.step(0.01)
    assert (optimizer.skipped.item(), optimizer.in_a_row.item(), optimizer.longest_row.item()) == (2, 0, 2)
    assert all(torch.isfinite(value).all() for value in parameters(model).values())


def test_step_without_any_supervised_block_changes_nothing_and_is_not_an_error():
    model = make_model()
    optimizer = make_optimizer(model)
    before = parameters(model)

    optimizer.accumulate(torch.zeros((), requires_grad=True), torch.zeros(()))
    optimizer.step(0.01)

    assert all(torch.equal(parameters(model)[name], value) for name, value in before.items())
    assert optimizer.skipped.item() == 0


def test_clipping_bounds_the_global_norm():
    rows, weights = torch.randn(6, 4) * 100, torch.ones(6)
    seen = []
    for factor in (1.0, 3.0):
        model = make_model()
        optimizer = make_optimizer(model, grad_clip=1e-3, eps=1.0, weight_decay=0.0)
        optimizer.accumulate(*(value * factor for value in losses(model, rows, weights)[:1]), weights.sum())
        optimizer.step(1.0)
        seen.append(parameters(model))

    for name, value in seen[0].items():
        torch.testing.assert_close(seen[1][name], value, rtol=1e-5, atol=1e-7)


def test_bf16_parameters_follow_fp32_masters():
    model = make_model(dtype=torch.bfloat16)
    optimizer = make_optimizer(model)
    rows, weights = torch.randn(6, 4, dtype=torch.bfloat16), torch.ones(6)
    for _ in range(5):
        numerator, denominator = losses(model, rows, weights.bfloat16())
        optimizer.accumulate(numerator.float(), denominator.float())
        optimizer.step(1e-4)

    state = optimizer.state_tensors()
    for name, parameter in model.named_parameters():
        master = state[f"master.{name}"]
        assert master.dtype == torch.float32
        assert torch.equal(parameter.detach(), master.bfloat16())
    assert any(not torch.equal(state[f"master.{n}"], p.detach().float()) for n, p in model.named_parameters())


def test_state_round_trip_continues_bit_for_bit():
    rows, weights = torch.randn(6, 4), torch.rand(6)
    model = make_model()
    optimizer = make_optimizer(model)

    def train(a_model, an_optimizer, steps):
        for _ in range(steps):
            an_optimizer.accumulate(*losses(a_model, rows, weights))
            an_optimizer.step(0.01)

    train(model, optimizer, 3)
    other = make_model(seed=9)
    resumed = make_optimizer(other)
    resumed.load_state_tensors(optimizer.state_tensors())
    train(model, optimizer, 3)
    train(other, resumed, 3)

    assert all(torch.equal(parameters(other)[name], value) for name, value in parameters(model).items())


def test_row_of_bad_steps_does_not_outlive_a_resume():
    rows, weights = torch.randn(6, 4), torch.rand(6)
    optimizer = make_optimizer(make_model())
    for _ in range(3):
        optimizer.accumulate(*losses(make_model(), rows * float("nan"), weights))
        optimizer.step(0.01)

    resumed = make_optimizer(make_model())
    resumed.load_state_tensors(optimizer.state_tensors())

    assert (resumed.skipped.item(), resumed.in_a_row.item(), resumed.longest_row.item()) == (3, 3, 0)


def test_state_of_another_shape_is_refused():
    optimizer = make_optimizer(make_model())
    tensors = optimizer.state_tensors()

    with pytest.raises(CheckpointError, match=r"holds no tensor master\.0\.weight"):
        optimizer.load_state_tensors({k: v for k, v in tensors.items() if k != "master.0.weight"})
    with pytest.raises(CheckpointError, match=r"has shape \(1,\)"):
        optimizer.load_state_tensors(tensors | {"master.0.weight": torch.zeros(1)})


def test_schedule_warms_up_and_ends_at_zero():
    def rate(step, shape="cosine"):
        return learning_rate(step, total_steps=100, peak=1.0, warmup_ratio=0.04, shape=shape)

    assert warmup_steps(100, 0.04) == 4
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    assert rate(52) == pytest.approx(0.5)
    assert 0 < rate(99) < 1e-3
    assert rate(100) == pytest.approx(0.0)
    assert rate(99, "constant") == 1.0


def test_wsd_schedule_stays_at_the_peak_and_falls_in_a_straight_line_at_the_end():
    def rate(step, decay_ratio=0.2):
        return learning_rate(
            step, total_steps=100, peak=3.0, warmup_ratio=0.1, shape="wsd", decay_ratio=decay_ratio
        )

    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([0.3, 1.5, 3.0])
    assert {rate(step) for step in range(10, 81)} == {3.0}
    assert [rate(step) for step in (81, 90, 99)] == pytest.approx([3 * 19 / 20, 1.5, 3 / 20])
    assert rate(100) == rate(150) == 0.0
    assert rate(99, decay_ratio=0.0) == 3.0


def test_schedule_without_warmup_starts_at_the_peak():
    assert learning_rate(0, total_steps=3, peak=2.0, warmup_ratio=0.0, shape="cosine") == 2.0
    assert math.isfinite(learning_rate(1, total_steps=1, peak=2.0, warmup_ratio=1.0, shape="cosine"))
