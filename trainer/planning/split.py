"""How many GPUs should run the target and how many the drafter, and what that will bring.

Pure: from two rates (measured, or counted work) to a split. Called by `trainer.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import TrainConfig
from trainer.drafter.model import DrafterConfig
from trainer.planning.packs import PackFacts
from trainer.target.capture import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to divide the GPUs."""

    targets: int
    drafters: int
    tokens_per_s: float

    @property
    def text(self) -> str:
        """The split in words."""
        if self.targets + self.drafters == 1 or not (self.targets and self.drafters):
            return "one GPU for both"
        return f"{self.targets} target + {self.drafters} drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second of one worker on each side; only the ratio counts where they are not measured."""

    target: float
    drafter: float
    is_measured: bool


def best_split(gpus: int, rates: Rates) -> Split:
    """Return the split with the highest throughput; of equal ones that with fewer targets.

    A single GPU does both in turn.
    """
    if gpus < 2:
        both = 1.0 / (1.0 / rates.target + 1.0 / rates.drafter)
        return Split(targets=gpus, drafters=0, tokens_per_s=both)
    splits = [evaluate(targets, gpus - targets, rates) for targets in range(1, gpus)]
    return max(splits, key=lambda split: split.tokens_per_s)


def evaluate(targets: int, drafters: int, rates: Rates) -> Split:
    """Return what a split brings: the slower side decides."""
    rate = min(targets * rates.target, drafters * rates.drafter)
    return Split(targets=targets, drafters=drafters, tokens_per_s=rate)


def counted_rates(config: TrainConfig, target: Target, drafter: DrafterConfig, packs: PackFacts) -> Rates:
    """Return rates from counted work, as if both sides reached the same share of a GPU's arithmetic."""
    return Rates(
        target=1.0 / target_flops_per_token(config, target, drafter, packs),
        drafter=packs.mean_tokens / drafter_flops(config, drafter, packs),
        is_measured=False,
    )


def target_flops_per_token(
    config: TrainConfig, target: Target, drafter: DrafterConfig, packs: PackFacts
) -> float:
    """Count a prefill: two per weight of the layers that run, and causal attention."""
    info = target.info
    layers = info.num_layers if config.loss.uses_soft_labels else max(drafter.target_layer_ids) + 1
    weights = sum(
        tensor.numel()
        for name, tensor in target.tensors().items()
        if ".layers." in f".{name}" and int(f".{name}".split(".layers.")[1].split(".")[0]) < layers
    )
    mean_length = packs.common_lengths[0]
    width = info.num_attention_heads * info.head_dim
    return 2.0 * weights + layers * 4.0 * width * mean_length / 2.0


def drafter_flops(config: TrainConfig, drafter: DrafterConfig, packs: PackFacts) -> float:
    """Count forward and backward of a mean pack."""
    layers, hidden, tokens = drafter.num_hidden_layers, drafter.hidden_size, packs.mean_tokens
    width = drafter.num_attention_heads * drafter.head_dim
    kv_width = drafter.num_key_value_heads * drafter.head_dim
    block = drafter.block_size
    rows = config.loss.max_anchors * block
    linear = (
        layers
        * (2 * hidden * width + 2 * hidden * kv_width + 3 * hidden * drafter.intermediate_size)
        * 2.0
        * rows
    )
    context = (
        layers * 2 * hidden * kv_width * 2.0 * tokens
        + 2.0 * len(drafter.target_layer_ids) * hidden * hidden * tokens
    )
    attention = layers * 4.0 * width * rows * (packs.common_lengths[0] / 2 + block)
    head = 2.0 * hidden * drafter.vocab_size * rows * (block - 1) / block
    return 3 * (linear + context) + 3.5 * attention + 2 * head
