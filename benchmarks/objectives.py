"""Which objective teaches a drafter most, on your own target and data: `python -m benchmarks.objectives`.

Trains one drafter for each objective on the same samples, packs, anchors, initial weights and number of
steps, and prints the expected acceptance length on samples kept apart (every tenth; other prompts, but of the
same kind). The target runs once over all samples; its states stay in host memory. One seed each: small
differences prove nothing. No part of `make bench`, which is about the supervisor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.config import DrafterSection, OptimConfig
from trainer.data.collate import collate, pack_tokens
from trainer.data.corpus import Corpus
from trainer.drafter.acceptance import AcceptanceReading, BlockCounts, DeferredCounts
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.loss import FrozenEnds, StepSums, microbatch_sums
from trainer.drafter.model import Drafter, build_drafter
from trainer.drafter.objective import DPACE, Objective
from trainer.drafter.shape import drafter_config
from trainer.optim.adamw import AdamWSettings, MasterAdamW
from trainer.optim.schedule import learning_rate
from trainer.pipeline.devices import pick_attention
from trainer.pipeline.messages import FeaturePack, HiddenStates
from trainer.pipeline.transfer import pick_rows
from trainer.target.cache import SampleCache
from trainer.target.capture import Target
from trainer.target.loader import load_target

OBJECTIVES = {
    "cross-entropy": Objective(),
    "soft labels": Objective(soft_label_share=1.0),
    "mixed 0.5": Objective(soft_label_share=0.5),
    "cross-entropy, D-PACE": Objective(weighting=DPACE),
    "soft labels, D-PACE": Objective(soft_label_share=1.0, weighting=DPACE),
    "mixed 0.5, D-PACE": Objective(soft_label_share=0.5, weighting=DPACE),
}
KEEP_APART = 10
TARGET_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """What all trainings share."""

    args: argparse.Namespace
    corpus: Corpus
    states: SampleCache
    target: Target
    layer_ids: tuple[int, ...]
    ends: FrozenEnds
    attention: str

    @property
    def held_out(self) -> list[int]:
        """Samples that no training sees."""
        return list(range(0, len(self.corpus), KEEP_APART))

    @property
    def training(self) -> list[int]:
        """All others."""
        return [sample for sample in range(len(self.corpus)) if sample % KEEP_APART]


def main() -> int:
    """Run every objective and print one line for each."""
    bed = _prepare(_arguments())
    args = bed.args
    print(
        f"{args.steps} steps of {args.samples} samples, block {args.block_size}, {args.layers} layers, "
        f"{len(bed.training)} samples, {len(bed.held_out)} kept apart, {args.device}, seed {args.seed}"
    )
    print(f"{'objective':24}{'EAL':>7}{'apart':>8}   {'acceptance at offset 1, 2, ...':34}{'s/step':>7}")
    for name, objective in OBJECTIVES.items():
        started_s = time.monotonic()
        drafter, seen = _train(bed, objective)
        seconds = (time.monotonic() - started_s) / args.steps
        apart = _measure(bed, drafter)
        shares = " ".join(f"{share or 0.0:.3f}" for share in apart.prefix_acceptance[:6])
        lengths = [reading.expected_acceptance_length or float("nan") for reading in (seen, apart)]
        print(f"{name:24}{lengths[0]:7.3f}{lengths[1]:8.3f}   {shares:34}{seconds:7.3f}", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objectives", description=__doc__)
    add = parser.add_argument
    add("--target-model", required=True)
    add("--data-dir", required=True)
    add("--device", default="cpu")
    add("--steps", type=int, default=300)
    add("--samples", type=int, default=4, help="samples in one step")
    add("--block-size", type=int, default=8)
    add("--layers", type=int, default=2)
    add("--gamma", type=float, default=4.0)
    add("--anchors", type=int, default=64, help="blocks in one step")
    add("--lr", type=float, default=1e-3)
    add("--max-seq-len", type=int, default=1024)
    add("--seed", type=int, default=0)
    return parser.parse_args()


def _prepare(args: argparse.Namespace) -> Bed:
    """Load target and samples, and run the one over the others."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    target = load_target(args.target_model, device=args.device, dtype=dtype)
    corpus = Corpus.open(args.data_dir, max_seq_len=args.max_seq_len, vocab_size=target.info.vocab_size)
    section = DrafterSection(num_layers=args.layers, block_size=args.block_size)
    bed = Bed(
        args=args,
        corpus=corpus,
        states=SampleCache(1 << 40),
        target=target,
        layer_ids=drafter_config(target.info, section, target_layer_ids=()).target_layer_ids,
        ends=FrozenEnds(
            embed_weight_VD=target.embed_weight_VD.detach(),
            head_weight_VD=target.head_weight_VD.detach(),
            embed_scale=target.info.embed_scale,
            logit_softcap=target.info.logit_softcap,
        ),
        attention=pick_attention("auto", args.device, may_compile=True),
    )
    for start in range(0, len(corpus), TARGET_BATCH):
        _run_target(bed, list(range(start, min(start + TARGET_BATCH, len(corpus)))))
    return bed


def _run_target(bed: Bed, ids: list[int]) -> None:
    samples = [bed.corpus[sample] for sample in ids]
    batch = collate(samples, pad_id=bed.target.info.pad_token_id or 0)
    features, last = bed.target.hidden_states(
        batch.input_ids_BS, batch.attention_mask_BS, bed.layer_ids, with_last_hidden=True
    )
    packed = pick_rows(
        HiddenStates(features=features, last_hidden=last), batch.valid_rows_T.to(features.device)
    )
    assert packed.last_hidden is not None
    on_host = HiddenStates(features=packed.features.cpu(), last_hidden=packed.last_hidden.cpu())
    bed.states.add_pack(ids, [len(sample.input_ids_T) for sample in samples], on_host)


def _train(bed: Bed, objective: Objective) -> tuple[Drafter, AcceptanceReading]:
    """Train a fresh drafter; the reading is over the last tenth of the steps."""
    args = bed.args
    section = DrafterSection(num_layers=args.layers, block_size=args.block_size)
    shape = drafter_config(bed.target.info, section, target_layer_ids=bed.layer_ids)
    drafter = build_drafter(shape, seed=args.seed, dtype=bed.target.dtype).to(args.device)
    optimizer = MasterAdamW(
        drafter.named_parameters(), AdamWSettings.from_config(OptimConfig(weight_decay=0.0))
    )
    counts = BlockCounts.zeros(args.block_size, args.device)
    for step, ids in enumerate(_draws(bed)):
        sums = _sums(bed, drafter, ids, objective, draw=step)
        optimizer.accumulate(sums.numerator, sums.denominator)
        optimizer.step(
            learning_rate(step, total_steps=args.steps, peak=args.lr, warmup_ratio=0.04, shape="cosine")
        )
        if step >= int(args.steps * 0.9):
            counts = counts + sums.counts
    return drafter, DeferredCounts(counts).read()


def _draws(bed: Bed) -> Iterator[list[int]]:
    """Deal the training samples, the same ones at the same step for every objective."""
    rng, left = np.random.default_rng(bed.args.seed), []
    for _ in range(bed.args.steps):
        while len(left) < bed.args.samples:
            left += rng.permutation(bed.training).tolist()
        yield left[: bed.args.samples]
        del left[: bed.args.samples]


@torch.no_grad()
def _measure(bed: Bed, drafter: Drafter) -> AcceptanceReading:
    counts = BlockCounts.zeros(bed.args.block_size, bed.args.device)
    for place, sample in enumerate(bed.held_out):
        counts = counts + _sums(bed, drafter, [sample], Objective(), draw=-1 - place).counts
    return DeferredCounts(counts).read()


def _sums(bed: Bed, drafter: Drafter, ids: list[int], objective: Objective, *, draw: int) -> StepSums:
    args, states = bed.args, bed.states.find_pack(ids)
    assert states is not None
    tokens = pack_tokens([bed.corpus[sample] for sample in ids])
    pack = FeaturePack(
        epoch=0,
        pack_id=draw,
        bucket=0,
        tokens=tokens,
        features_TLD=states.features,
        last_hidden_TD=states.last_hidden,
        nbytes=states.nbytes,
    )
    rng = np.random.default_rng([args.seed, draw & 0xFFFF_FFFF])
    anchors = select_anchors(tokens, args.anchors, block_size=args.block_size, rng=rng)
    return microbatch_sums(
        drafter,
        bed.ends,
        pack,
        anchors,
        block_labels(tokens, anchors, block_size=args.block_size, gamma=args.gamma),
        noise_sigma=0.0,
        noise_seed=0,
        head_chunk_rows=2048,
        attention=bed.attention,
        objective=objective,
    )


if __name__ == "__main__":
    raise SystemExit(main())
