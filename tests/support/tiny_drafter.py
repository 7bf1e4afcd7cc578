"""A tiny drafter and packs for it, made locally: the drafter's counterpart of `tests.support.tiny`.

`drafter_config` fits `tiny_target` (H=64, L=8, V=97) with N=2, K=2, B=4; `make_pack` builds packed documents
with random hidden states. Everything is seeded; nothing here may be used outside tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import tiny_target
from trainer.drafter.anchors import Anchors
from trainer.drafter.loss import FrozenEnds
from trainer.drafter.model import Drafter, DrafterConfig, build_drafter
from trainer.pipeline.messages import FeaturePack, PackedTokens

VOCAB, HIDDEN, LAYERS, MASK_ID = 97, 64, 8, 96


def talkative_target(folder: Path) -> Path:
    """A tiny target whose greedy continuations vary; with small weights they repeat one token for ever."""
    return tiny_target(folder, initializer_range=0.4)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8},
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
"""Families of targets beside the Llama of `tiny_target`: plain, sliding and scaled, hybrid."""


def family_pair(folder: Path, family: str, *, attention: str = "sdpa") -> tuple[Any, Drafter]:
    """A tiny random target of another family, loaded in fp32, and an untrained drafter that fits it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.target.loader import load_target

    fields = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    directory = folder / family
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **fields, **FAMILIES[family])
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    target = load_target(directory, device="cpu", dtype=torch.float32, attn=attention, mask_token_id=MASK_ID)
    ends = {"embed_scale": target.info.embed_scale, "logit_softcap": target.info.logit_softcap}
    return target, make_drafter(seed=1, **ends)


def drafter_config(**overrides: Any) -> DrafterConfig:
    """A valid tiny config; any field can be overridden."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "block_size": 4,
        "mask_token_id": MASK_ID,
        "target_layer_ids": (1, 5),
        "num_target_layers": LAYERS,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    fields |= overrides
    fields.setdefault("layer_types", ("full_attention",) * fields["num_hidden_layers"])
    return DrafterConfig(**fields)


def make_drafter(
    seed: int = 0, dtype: torch.dtype = torch.float32, *, split_fc: bool = False, **overrides: Any
) -> Drafter:
    """A random drafter; weights larger than at the start of training, so that every path matters."""
    overrides.setdefault("initializer_range", 0.15)
    return build_drafter(drafter_config(**overrides), seed=seed, dtype=dtype, split_fc=split_fc)


def make_ends(seed: int = 1, **overrides: Any) -> FrozenEnds:
    """A random embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    return FrozenEnds(
        embed_weight_VD=torch.randn(VOCAB, HIDDEN, generator=generator),
        head_weight_VD=torch.randn(VOCAB, HIDDEN, generator=generator) * 0.2,
        **overrides,
    )


def make_tokens(lengths: Sequence[int] = (15, 25), *, seed: int = 2, supervised: float = 1.0) -> PackedTokens:
    """Documents of random tokens; each token after the second is supervised with the given probability."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    position = torch.cat([torch.arange(length) for length in lengths])
    chance = torch.rand(total, generator=generator)
    return PackedTokens(
        input_ids_T=torch.randint(4, 55, (total,), generator=generator),
        loss_mask_T=(chance < supervised) & (position >= 2),
        doc_id_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32),
        position_T=position,
    )


def make_pack(
    tokens: PackedTokens,
    *,
    seed: int = 3,
    features: torch.Tensor | None = None,
    last_hidden: torch.Tensor | None = None,
    captured: int = 2,
) -> FeaturePack:
    """A pack with random hidden states, or the given ones; the last one only where given."""
    if features is None:
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(tokens.input_ids_T.numel(), captured, HIDDEN, generator=generator)
    return FeaturePack(
        epoch=0,
        pack_id=0,
        bucket=0,
        tokens=tokens,
        features_TLD=features,
        last_hidden_TD=last_hidden,
        nbytes=features.nbytes + (0 if last_hidden is None else last_hidden.nbytes),
    )


def make_last_hidden(tokens: PackedTokens, *, seed: int = 4) -> torch.Tensor:
    """Random last hidden states of a pack's tokens, for soft labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens.input_ids_T.numel(), HIDDEN, generator=generator)


def anchors_at(*positions: int, padding: int = 0) -> Anchors:
    """Blocks at the given rows, in the given order, and some padding slots."""
    return Anchors(
        position_A=torch.tensor([*positions, *[0] * padding], dtype=torch.int64),
        valid_A=torch.tensor([True] * len(positions) + [False] * padding),
    )


def overfit(target: Any, samples: Sequence[Any], *, steps: int, seed: int = 0) -> Drafter:
    """Train a tiny drafter on a few samples, all anchors, no noise, until it knows them by heart."""
    from trainer.data.collate import pack_tokens
    from trainer.drafter.anchors import anchor_candidates, block_labels, pad_anchors, select_anchors
    from trainer.drafter.loss import microbatch_sums
    from trainer.eval.speculative import frozen_ends

    drafter = build_drafter(drafter_config(), seed=seed, dtype=torch.float32)
    ends, ids = frozen_ends(target, drafter.config), drafter.config.target_layer_ids
    features = [
        target.hidden_states(torch.as_tensor(sample.input_ids_T, dtype=torch.int64)[None], None, ids)[0][0]
        for sample in samples
    ]
    tokens = pack_tokens(samples)
    pack = make_pack(tokens, features=torch.cat(features))
    count = len(anchor_candidates(tokens))
    anchors = select_anchors(tokens, count, block_size=4, rng=torch.Generator())
    labels = block_labels(tokens, pad_anchors(anchors, count), block_size=4, gamma=4.0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        sums = microbatch_sums(
            drafter,
            ends,
            pack,
            anchors,
            labels,
            noise_sigma=0.0,
            noise_seed=0,
            head_chunk_rows=4096,
            attention="sdpa",
        )
        optimizer.zero_grad()
        (sums.numerator / sums.denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter
