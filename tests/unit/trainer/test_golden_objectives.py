"""Golden properties 19 to 25 for every objective: soft labels, mixed loss, D-PACE weights.

The reference is `tests.support.plain_loss`: full logits, autograd, and a loop over blocks and offsets.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import kl_div
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.families import save_family
from tests.support.plain_loss import GAMMA, OBJECTIVES, PlainSums, plain_sums
from tests.support.tiny_drafter import (
    MASK_ID,
    anchors_at,
    drafter_config,
    make_drafter,
    make_ends,
    make_last_hidden,
    make_pack,
    make_tokens,
    talkative_target,
)
from trainer.data.collate import collate
from trainer.data.corpus import Sample
from trainer.drafter.acceptance import summarize
from trainer.drafter.anchors import anchor_candidates, block_labels, pad_anchors, select_anchors
from trainer.drafter.head import SoftLabels, head_losses
from trainer.drafter.loss import microbatch_sums, target_rows
from trainer.drafter.model import build_drafter
from trainer.drafter.objective import DPACE, Objective, dpace_weights
from trainer.errors import PipelineError
from trainer.eval.speculative import frozen_ends, speculative_generate
from trainer.pipeline.messages import HiddenStates
from trainer.pipeline.transfer import pick_rows
from trainer.target.loader import load_target

every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@every_objective
def test_golden_19_uniform_logits_have_the_loss_of_a_uniform_guess(objective: Objective) -> None:
    """Where the head knows nothing, target and drafter are both uniform: no KL, and ln V of the rest."""
    ends = make_ends()
    ends = dataclasses.replace(ends, head_weight_VD=torch.zeros_like(ends.head_weight_VD))
    tokens = make_tokens((15, 25), supervised=0.9)
    anchors = select_anchors(tokens, 20, block_size=4, rng=np.random.default_rng(0))

    sums = _sums(make_drafter(), ends, _pack(tokens), anchors, objective)
    weighed = plain_sums(make_drafter(), ends, _pack(tokens), anchors, objective)

    loss = math.log(97) * (1 - objective.soft_label_share)
    assert sums.numerator.item() == pytest.approx(loss * weighed.total_weight, rel=1e-5, abs=1e-6)
    if objective.weighting != DPACE:
        assert sums.denominator.item() == pytest.approx(weighed.total_weight, rel=1e-5)


def test_golden_19_the_loss_against_a_sure_target_is_ln_v_too() -> None:
    rows = head_losses(
        torch.zeros(5, 97),
        torch.eye(97),
        torch.arange(5),
        chunk_rows=2,
        soft=SoftLabels(last_hidden_TD=1e3 * torch.eye(97), row_R=torch.arange(5), share=0.4),
    )

    torch.testing.assert_close(rows.loss_R, torch.full((5,), math.log(97)), atol=1e-5, rtol=0)


@every_objective
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_golden_20_replicas_add_up_to_the_undivided_gradient(objective: Objective, replicas: int) -> None:
    """Documents of unequal length, dealt to replicas of the same drafter; sums are added, then divided."""
    lengths, ends = (15, 25, 9, 4), make_ends()
    whole = make_tokens(lengths, supervised=0.9)
    pack = _pack(whole)
    anchors = select_anchors(whole, 100, block_size=4, rng=np.random.default_rng(0))
    undivided = make_drafter()
    reference = _sums(undivided, ends, pack, anchors, objective)
    reference.numerator.backward()

    drafters = [make_drafter() for _ in range(replicas)]
    numerator, denominator, start = torch.zeros(()), torch.zeros(()), 0
    for index, length in enumerate(lengths):
        sums = _sums(drafters[index % replicas], ends, *_cut(pack, anchors, start, start + length), objective)
        sums.numerator.backward()
        numerator += sums.numerator.detach()
        denominator += sums.denominator
        start += length

    assert denominator.item() == pytest.approx(reference.denominator.item(), rel=1e-6)
    assert (numerator / denominator).item() == pytest.approx(
        (reference.numerator / reference.denominator).item(), rel=1e-5
    )
    for name, parameter in undivided.named_parameters():
        total = sum(d.get_parameter(name).grad for d in drafters if d.get_parameter(name).grad is not None)
        torch.testing.assert_close(
            total / denominator, parameter.grad / reference.denominator, atol=1e-6, rtol=1e-5
        )


@every_objective
def test_golden_21_pack_without_any_block_contributes_nothing(objective: Objective) -> None:
    drafter, tokens = make_drafter(), make_tokens((15,), supervised=0.0)
    anchors = select_anchors(tokens, 8, block_size=4, rng=np.random.default_rng(0))

    sums = _sums(drafter, make_ends(), _pack(tokens), anchors, objective)
    sums.numerator.backward()

    assert sums.numerator.item() == 0.0
    assert sums.denominator.item() == 0.0
    assert all(parameter.grad is None for parameter in drafter.parameters())


@every_objective
@pytest.mark.parametrize("scale", [{}, {"logit_softcap": 3.0, "embed_scale": 1.7}], ids=["plain", "capped"])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_golden_22_every_objective_equals_its_plain_reference(
    objective: Objective, scale: dict[str, float], chunk: int
) -> None:
    ends, tokens = make_ends(**scale), make_tokens((15, 25, 5), supervised=0.9)
    anchors = select_anchors(tokens, 30, block_size=4, rng=np.random.default_rng(0))
    drafters = make_drafter(), make_drafter()

    plain = plain_sums(drafters[0], ends, _pack(tokens), anchors, objective)
    plain.numerator.backward()
    sums = _sums(drafters[1], ends, _pack(tokens), anchors, objective, chunk=chunk)
    sums.numerator.backward()

    _assert_equal(sums, plain, *drafters)


def test_golden_22_no_soft_labels_is_cross_entropy_bit_for_bit() -> None:
    """A share of 0 needs no last hidden state, and one that is there changes nothing."""
    ends, tokens = make_ends(), make_tokens((15, 25), supervised=0.9)
    anchors = select_anchors(tokens, 20, block_size=4, rng=np.random.default_rng(0))
    drafters = make_drafter(), make_drafter()
    packs = make_pack(tokens), _pack(tokens)

    one, other = (
        _sums(drafter, ends, pack, anchors, Objective(soft_label_share=0.0))
        for drafter, pack in zip(drafters, packs, strict=True)
    )
    one.numerator.backward()
    other.numerator.backward()

    assert packs[0].last_hidden_TD is None
    assert torch.equal(one.numerator, other.numerator)
    for mine, theirs in zip(drafters[0].parameters(), drafters[1].parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_objective_says_in_the_log_what_it_minimises() -> None:
    texts = [OBJECTIVES[name].describe(decay_gamma=7.0) for name in ("ce", "mixed", "kl-dpace")]

    assert texts == [
        "cross-entropy, decay 7",
        "0.3 KL against the target + 0.7 cross-entropy, decay 7",
        "KL against the target, D-PACE with alpha 0.2",
    ]


def test_golden_22_soft_labels_without_last_hidden_states_are_refused() -> None:
    tokens = make_tokens((15,))

    with pytest.raises(PipelineError, match="without the last hidden state"):
        _sums(make_drafter(), make_ends(), make_pack(tokens), anchors_at(4), OBJECTIVES["kl"])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_23_equal_target_gives_no_loss_and_no_gradient(
    softcap: float | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 64, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(97, 64, generator=generator).to(dtype)
    soft = SoftLabels(last_hidden_TD=hidden.detach().flip(0), row_R=torch.arange(9).flip(0), share=1.0)

    rows = head_losses(hidden, head, torch.arange(9), chunk_rows=4, softcap=softcap, soft=soft)
    rows.loss_R.sum().backward()

    assert rows.loss_R.tolist() == [0.0] * 9
    assert not hidden.grad.any()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_golden_23_one_hot_target_is_cross_entropy(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    head, labels = 4.0 * torch.eye(97), torch.randint(0, 97, (9,), generator=generator)
    hidden = torch.randn(9, 97, generator=generator, requires_grad=True)
    soft = SoftLabels(
        last_hidden_TD=1e3 * torch.eye(97), row_R=labels, share=share
    )  # token y's state says y and nothing else

    hard = head_losses(hidden, head, labels, chunk_rows=4)
    (wanted,) = torch.autograd.grad(hard.loss_R.sum(), hidden)
    rows = head_losses(hidden, head, labels, chunk_rows=4, soft=soft)
    (grad,) = torch.autograd.grad(rows.loss_R.sum(), hidden)

    torch.testing.assert_close(rows.loss_R, hard.loss_R, atol=1e-5, rtol=0)
    torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=0)
    assert torch.equal(rows.correct_R, hard.correct_R)


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """A tiny target, and a padded batch of its own greedy continuations of two prompts, run through it."""
    folder = tmp_path_factory.mktemp("target")
    target = load_target(talkative_target(folder), device="cpu", dtype=torch.float32, mask_token_id=MASK_ID)
    samples = []
    for prompt, length in (([5, 17, 29, 41, 8], 30), ([20, 33, 45, 11, 52, 9, 30], 17)):
        answer = speculative_generate(target, None, prompt, max_new_tokens=length, eos_ids=()).token_ids
        samples.append(
            Sample(
                input_ids_T=np.array([*prompt, *answer], dtype=np.int32),
                loss_mask_T=np.array([False] * len(prompt) + [True] * len(answer)),
                domain=None,
            )
        )
    batch = collate(samples, pad_id=0)
    features, last = target.hidden_states(
        batch.input_ids_BS, batch.attention_mask_BS, (1, 5), with_last_hidden=True
    )
    states = pick_rows(HiddenStates(features=features, last_hidden=last), batch.valid_rows_T)
    return target, make_pack(batch.tokens, features=states.features, last_hidden=states.last_hidden)


def test_golden_24_the_targets_best_token_is_the_label_everywhere(greedy) -> None:
    target, pack = greedy
    ends = frozen_ends(target, make_drafter().config)
    count = len(anchor_candidates(pack.tokens))
    anchors = select_anchors(pack.tokens, count, block_size=4, rng=np.random.default_rng(0))
    labels = block_labels(pack.tokens, anchors, block_size=4, gamma=GAMMA)

    mask = labels.mask_AK
    best_R = ends.logits(pack.last_hidden_TD).argmax(dim=-1)[target_rows(anchors, 4)[mask]]

    assert len(pack.tokens.input_ids_T.unique()) > 20
    assert mask.sum() > 3 * count * 0.9
    assert torch.equal(best_R, labels.labels_AK[mask])


def test_golden_24_the_loss_uses_the_targets_own_distribution(greedy) -> None:
    """The same KL from the model's own logits, whole documents run one by one."""
    target, pack = greedy
    tokens, drafter = pack.tokens, make_drafter()
    ends = frozen_ends(target, drafter.config)
    anchors = pad_anchors(anchors_at(5, 12, 31, 42, 50), 7)
    logits = []
    for document in (0, 1):
        ids = tokens.input_ids_T[tokens.doc_id_T == document]
        logits.append(target.step(ids[None], target.new_cache(), ())[0])

    sums = _sums(drafter, ends, pack, anchors, OBJECTIVES["kl"])
    plain = plain_sums(
        make_drafter(), ends, pack, anchors, OBJECTIVES["kl"], target=torch.cat(logits).log_softmax(dim=-1)
    )

    assert sums.numerator.item() == pytest.approx(plain.numerator.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_golden_24_every_familys_target_is_the_model_itself(family: str, tmp_path) -> None:
    """Final norm, soft-cap and head as the model applies them, for families that do something special."""
    target = load_target(
        save_family(family, tmp_path), device="cpu", dtype=torch.float32, mask_token_id=MASK_ID
    )
    ids = make_tokens((20,)).input_ids_T
    with torch.no_grad():
        own = target._model(input_ids=ids[None], use_cache=False).logits[0]

    _, last = target.hidden_states(ids[None], None, (1, 5), with_last_hidden=True)
    soft = SoftLabels(last_hidden_TD=last[0], row_R=torch.arange(20), share=1.0)
    rows = head_losses(
        last[0].flip(0),
        target.head_weight_VD,
        ids,
        chunk_rows=6,
        softcap=target.info.logit_softcap,
        soft=soft,
    )

    mine, theirs = own.flip(0).log_softmax(dim=-1), own.log_softmax(dim=-1)
    wanted = kl_div(mine, theirs, reduction="none", log_target=True).sum(dim=-1)
    torch.testing.assert_close(rows.loss_R, wanted, atol=1e-5, rtol=1e-4)


def test_golden_25_dpace_weights() -> None:
    sure = dpace_weights(torch.zeros(1, 8), _from_first(1, 8), alpha=0.5)
    q = torch.tensor([[0.5, 0.8, 0.6, 0.4]])
    weights = dpace_weights(-q.log(), _from_first(1, 4), alpha=0.5)

    assert sure.tolist() == [[0, 7, 6, 5, 4, 3, 2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0, 2.124, 1.224, 0.504]]), atol=1e-6, rtol=0)


@settings(deadline=None, max_examples=50)
@given(
    blocks=st.integers(1, 5),
    size=st.integers(1, 9),
    alpha=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_golden_25_weights_never_increase_and_carry_no_graph(
    blocks: int, size: int, alpha: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = (torch.rand(blocks, size, generator=generator) * 8).requires_grad_()
    length = torch.randint(0, size, (blocks,), generator=generator)
    mask = _from_first(blocks, size) & (torch.arange(size) <= length[:, None])

    weights = dpace_weights(loss, mask, alpha=alpha)

    assert not weights.requires_grad
    assert torch.equal(weights > 0, mask) or alpha < 1e-3
    assert not weights[~mask].any()
    assert (weights[:, 2:] <= weights[:, 1:-1] + 1e-6).all()
    for block in range(blocks):  # a short block weighs as a whole block of that length
        end = int(length[block]) + 1
        short = dpace_weights(loss[block : block + 1, :end], mask[block : block + 1, :end], alpha=alpha)
        torch.testing.assert_close(weights[block, :end], short[0], atol=1e-6, rtol=1e-6)


def test_golden_25_the_divisor_is_the_number_of_blocks_with_weight() -> None:
    tokens, drafter = make_tokens((15, 9)), make_drafter()
    anchors = anchors_at(4, 13, 20, padding=3)

    sums = _sums(drafter, make_ends(), _pack(tokens), anchors, OBJECTIVES["dpace"])

    assert sums.denominator.item() == 3.0
    assert sums.blocks == 3
    assert not sums.denominator.requires_grad


@pytest.mark.parametrize(("share", "products"), [(None, 2), (1.0, 3), (0.3, 3)], ids=["ce", "kl", "mixed"])
def test_full_logits_never_exist_and_no_product_is_formed_twice(share: float | None, products: int) -> None:
    rows, vocabulary, chunk = 40, 97, 8
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 64, generator=generator, requires_grad=True)
    soft = None
    if share is not None:
        soft = SoftLabels(last_hidden_TD=torch.randn(9, 64), row_R=torch.arange(rows) % 9, share=share)

    with _Watched() as watched:
        result = head_losses(
            hidden, torch.randn(vocabulary, 64), torch.arange(rows), chunk_rows=chunk, soft=soft
        )
        (result.loss_R * torch.rand(rows)).sum().backward()

    logit_rows = chunk if soft is None else chunk // 2
    assert watched.products == products * rows // logit_rows
    assert watched.largest == max(logit_rows * vocabulary, vocabulary * 64, rows * 64)


class _Watched(TorchDispatchMode):
    """Counts matrix products and remembers the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("name", ["mixed", "dpace"])
def test_golden_37_other_objectives_overfit_a_greedy_continuation_too(greedy, name: str) -> None:
    """On the target's own greedy tokens every objective leads to the same drafts: whole blocks accepted."""
    target, pack = greedy
    drafter = build_drafter(drafter_config(), seed=0, dtype=torch.float32)
    ends, prompt = frozen_ends(target, drafter.config), pack.tokens.input_ids_T[:5].tolist()
    anchors = select_anchors(
        pack.tokens, len(anchor_candidates(pack.tokens)), block_size=4, rng=np.random.default_rng(0)
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)

    for _ in range(100):
        sums = _sums(drafter, ends, pack, anchors, OBJECTIVES[name])
        optimizer.zero_grad()
        (sums.numerator / sums.denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()

    decoded = speculative_generate(target, drafter, prompt, max_new_tokens=25, eos_ids=())
    assert summarize(sums.counts).expected_acceptance_length == 4.0
    assert decoded.acceptance_length == 4.0
    assert decoded.token_ids == pack.tokens.input_ids_T[5:30].tolist()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    supervised=st.sampled_from([0.0, 0.4, 0.8, 1.0]),
    size=st.integers(1, 5),
    slots=st.integers(1, 12),
    chunk=st.integers(1, 40),
    softcap=st.sampled_from([None, 2.0]),
    objective=st.sampled_from(sorted(OBJECTIVES)),
    seed=st.integers(0, 99),
)
def test_objectives_equal_their_reference_on_any_pack(
    lengths, supervised, size, slots, chunk, softcap, objective, seed
) -> None:
    tokens = make_tokens(lengths, seed=seed, supervised=supervised)
    anchors = select_anchors(tokens, slots, block_size=size, rng=np.random.default_rng(seed))
    ends, choice = make_ends(logit_softcap=softcap), OBJECTIVES[objective]
    drafters = [make_drafter(num_hidden_layers=1, block_size=size) for _ in range(2)]

    plain = plain_sums(drafters[0], ends, _pack(tokens), anchors, choice)
    plain.numerator.backward()
    sums = _sums(drafters[1], ends, _pack(tokens), anchors, choice, chunk=chunk)
    sums.numerator.backward()

    _assert_equal(sums, plain, *drafters)


def _assert_equal(sums, plain: PlainSums, wanted, got) -> None:
    assert sums.numerator.item() == pytest.approx(plain.numerator.item(), rel=2e-5, abs=1e-5)
    assert sums.denominator.item() == pytest.approx(plain.denominator, rel=1e-5)
    for (name, theirs), mine in zip(wanted.named_parameters(), got.parameters(), strict=True):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        found = torch.zeros_like(mine) if mine.grad is None else mine.grad
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, msg=name)


def _sums(drafter, ends, pack, anchors, objective, *, chunk: int = 16):
    size = drafter.config.block_size
    return microbatch_sums(
        drafter,
        ends,
        pack,
        anchors,
        block_labels(pack.tokens, anchors, block_size=size, gamma=GAMMA),
        noise_sigma=0.0,
        noise_seed=0,
        head_chunk_rows=chunk,
        attention="sdpa",
        objective=objective,
    )


def _pack(tokens):
    return make_pack(tokens, last_hidden=make_last_hidden(tokens))


def _cut(pack, anchors, start: int, end: int):
    """One document of a pack, with the blocks that start in it."""
    rows = slice(start, end)
    fields = {field.name: getattr(pack.tokens, field.name)[rows] for field in dataclasses.fields(pack.tokens)}
    chosen = anchors.position_A[anchors.valid_A]
    chosen = chosen[(chosen >= start) & (chosen < end)] - start
    part = make_pack(
        type(pack.tokens)(**fields),
        features=pack.features_TLD[rows],
        last_hidden=pack.last_hidden_TD[rows],
    )
    return part, anchors_at(*chosen.tolist(), padding=1)


def _from_first(blocks: int, size: int) -> torch.Tensor:
    mask = torch.ones(blocks, size, dtype=torch.bool)
    mask[:, 0] = False
    return mask
