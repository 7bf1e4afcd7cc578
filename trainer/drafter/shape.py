"""The drafter's shape: what the configuration leaves open is taken from the target.

Called by `trainer.train`. Pure; must not import the target package (its facts come in as a protocol).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from trainer.config import DrafterSection
from trainer.drafter.masks import FULL, SLIDING
from trainer.drafter.model import DrafterConfig, default_target_layer_ids
from trainer.errors import ConfigError


class TargetFacts(Protocol):
    """What a drafter copies from its target (`trainer.target.loader.TargetInfo` has it)."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102 - names say it
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def rms_norm_eps(self) -> float: ...  # noqa: D102
    @property
    def rope_theta(self) -> float: ...  # noqa: D102
    @property
    def rope_scaling(self) -> Mapping[str, Any] | None: ...  # noqa: D102
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def embed_scale(self) -> float | None: ...  # noqa: D102
    @property
    def logit_softcap(self) -> float | None: ...  # noqa: D102
    @property
    def bos_token_id(self) -> int | None: ...  # noqa: D102
    @property
    def eos_token_id(self) -> int | None: ...  # noqa: D102
    @property
    def pad_token_id(self) -> int | None: ...  # noqa: D102
    @property
    def mask_token_id(self) -> int: ...  # noqa: D102


def drafter_config(
    facts: TargetFacts, section: DrafterSection, *, target_layer_ids: tuple[int, ...]
) -> DrafterConfig:
    """Combine the configuration with the target's facts.

    With a sliding window the layers named in `sliding_layers` slide, by default all but the last, as in
    published drafters.

    Raises:
        ConfigError: a combination that cannot work.
    """
    layers = section.num_layers
    slides = section.sliding_window > 0
    return DrafterConfig(
        num_hidden_layers=layers,
        hidden_size=facts.hidden_size,
        intermediate_size=section.intermediate_size or facts.intermediate_size,
        num_attention_heads=section.num_attention_heads or facts.num_attention_heads,
        num_key_value_heads=section.num_key_value_heads or facts.num_key_value_heads,
        head_dim=section.head_dim or facts.head_dim,
        vocab_size=facts.vocab_size,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        rope_scaling=facts.rope_scaling,
        max_position_embeddings=facts.max_position_embeddings,
        block_size=section.block_size,
        mask_token_id=facts.mask_token_id,
        target_layer_ids=target_layer_ids or default_target_layer_ids(facts.num_layers, layers),
        num_target_layers=facts.num_layers,
        layer_types=_layer_types(section),
        sliding_window=section.sliding_window if slides else None,
        embed_scale=facts.embed_scale,
        logit_softcap=facts.logit_softcap,
        bos_token_id=facts.bos_token_id,
        eos_token_id=facts.eos_token_id,
        pad_token_id=facts.pad_token_id,
    )


def imported_config(facts: TargetFacts, fields: Mapping[str, Any]) -> DrafterConfig:
    """Build the config of an imported drafter and hold it against the target that it will train with.

    Raises:
        ConfigError: it was made for another target.
    """
    config = DrafterConfig(**fields)
    pairs = {
        "hidden size": (config.hidden_size, facts.hidden_size),
        "layers of the target": (config.num_target_layers, facts.num_layers),
        "vocabulary": (config.vocab_size, facts.vocab_size),
        "logit cap": (config.logit_softcap, facts.logit_softcap),
    }
    wrong = [f"{name} {own} against {its}" for name, (own, its) in pairs.items() if own != its]
    scales = config.embed_scale or 1.0, facts.embed_scale or 1.0
    # published scales are rounded to bf16 here and there
    if not math.isclose(*scales, rel_tol=5e-3):
        wrong.append(f"embedding scale {scales[0]} against {scales[1]}")
    if wrong:
        raise ConfigError(
            f"imported drafter does not fit the target: {', '.join(wrong)}; import it for its own target"
        )
    return config


def _layer_types(section: DrafterSection) -> tuple[str, ...]:
    layers = range(section.num_layers)
    if not section.sliding_window:
        return (FULL,) * len(layers)
    sliding = section.sliding_layers or layers[:-1]
    return tuple(SLIDING if layer in sliding else FULL for layer in layers)
