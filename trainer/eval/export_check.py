"""Every check of an exported drafter, each with a name and a verdict: what `export --check` prints.

Called by `eval.export_command`. Files, config and tensors are looked at one by one, so that one fault does
not hide the next; then the drafter is loaded and drafts a block through the inference path, which must equal
the training forward. With the target at hand, what was copied from it is compared too. Must not write
anything.

Dimension suffixes: T context tokens, L captured layers, D hidden, K block positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import export_faults as faults
from trainer.checkpoint.drafter_format import tensor_faults
from trainer.checkpoint.export import CONFIG_NAME, read_config, read_weights
from trainer.checkpoint.store import MANIFEST, verify
from trainer.data.collate import made_up_documents
from trainer.drafter.anchors import Anchors
from trainer.drafter.cache import DraftCache
from trainer.drafter.exported import load_drafter
from trainer.drafter.loss import FrozenEnds, block_hidden
from trainer.drafter.model import Drafter
from trainer.errors import TrainerError
from trainer.eval.speculative import frozen_ends
from trainer.pipeline.messages import FeaturePack, HiddenStates
from trainer.target.capture import Target

CONTEXT_TOKENS = 24
"""Length of the text on which the draft step is compared."""
TRIED_ROWS = 512
"""Embedding rows that stand in for the target's when it is not at hand."""
TOLERANCE = 1e-4
"""Largest difference of hidden states between the two forwards, in fp32, relative to their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verdict; `detail` says what was found, or what is wrong."""

    name: str
    is_passed: bool
    detail: str


def inspect_export(directory: Path, target: Target | None = None) -> list[Check]:
    """Run every check; one that needs what an earlier one could not read fails with that reason.

    Args:
        directory: the export.
        target: the drafter's target, in fp32 on the CPU; None leaves the comparison with it away.
    """
    return list(_inspect(directory, target))


def render_checks(checks: list[Check]) -> str:
    """Lay the verdicts out as a table."""
    width = max(len(check.name) for check in checks)
    return "".join(
        f"{'pass' if check.is_passed else 'FAIL'}  {check.name:<{width}}  {check.detail}\n"
        for check in checks
    )


def _inspect(directory: Path, target: Target | None) -> Iterator[Check]:
    if (directory / MANIFEST).is_file():
        yield _try("manifest", lambda: _verify(directory))
    raw: dict[str, Any] = {}
    yield _try("config file", lambda: _fill(raw, read_config(directory)))
    for name, find in faults.CONFIG_CHECKS.items():
        yield _judge(name, find, raw)
    tensors: dict[str, Tensor] = {}
    yield _try("weight files", lambda: _fill(tensors, read_weights(directory)))
    for name, find_in in faults.TENSOR_CHECKS.items():
        yield _judge(name, find_in, tensors)
    yield _judge("tensor names and shapes", lambda found: _tensor_faults(raw, found), tensors)
    loaded: list[Drafter] = []
    yield _try("reload", lambda: _reload(directory, tensors, loaded))
    if target is not None:
        facts = dataclasses.asdict(target.info)
        yield _judge("copied from the target", lambda found: faults.target_faults(found, facts), raw)
        yield _judge("mask token in the target", lambda found: _mask_faults(found, target), raw)
    yield _try("draft step", lambda: _draft_step(loaded, target))


def _try(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name=name, is_passed=True, detail=run())
    except TrainerError as error:
        return Check(name=name, is_passed=False, detail=str(error))


def _verify(directory: Path) -> str:
    verify(directory)
    return "size and SHA-256 of every file"


def _judge(name: str, find: Callable[[Any], list[str]], subject: dict[str, Any]) -> Check:
    """Turn a list of faults into a verdict; broken values of any kind are faults, not crashes."""
    if not subject:
        return Check(name=name, is_passed=False, detail="not checked: nothing could be read")
    try:
        found = find(subject)
    except (TrainerError, KeyError, TypeError, ValueError, AttributeError) as error:
        found = [f"cannot be checked: {type(error).__name__}: {error}"]
    return Check(name=name, is_passed=not found, detail="; ".join(found) or "ok")


def _fill(place: dict[str, Any], values: dict[str, Any]) -> str:
    place.update(values)
    return f"{len(values)} entries"


def _tensor_faults(raw: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    return tensor_faults(raw, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def _reload(directory: Path, tensors: dict[str, Tensor], loaded: list[Drafter]) -> str:
    drafter = load_drafter(directory)
    stored = drafter.state_dict()
    faults.refuse(
        [
            f"{name} changes when loaded"
            for name, tensor in tensors.items()
            if not _is_same(tensor, stored[name])
        ]
        + faults.rewritten_faults(read_config(directory), dataclasses.asdict(drafter.config)),
        str(directory / CONFIG_NAME),
    )
    loaded.append(drafter.float())
    return f"{len(stored)} tensors bit-equal, {sum(t.numel() for t in stored.values()):,} parameters"


def _is_same(one: Tensor, other: Tensor) -> bool:
    # bytes, not values: a NaN equals itself here, it has its own check
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _mask_faults(raw: dict[str, Any], target: Target) -> list[str]:
    mask = int(raw["dflash_config"]["mask_token_id"])
    if mask in target.info.stop_ids:
        return [f"mask token {mask} ends generations of the target"]
    if target.tokenizer is None or mask == target.info.mask_token_id:
        return []
    text = target.tokenizer.convert_ids_to_tokens(mask) if mask < len(target.tokenizer) else None
    if text is None or text in target.tokenizer.all_special_tokens:
        return []
    return [f"mask token {mask} is text of the target: {text!r}"]


def _draft_step(loaded: list[Drafter], target: Target | None) -> str:
    """Compare one block of the inference path with the training forward on the same states."""
    faults.refuse([] if loaded else ["not checked: the drafter does not load"], "draft step")
    drafter = loaded[0]
    pack, ends = _context(drafter, target)
    anchor, size = CONTEXT_TOKENS - 1, drafter.config.block_size
    with torch.no_grad():
        anchors = Anchors(position_A=torch.tensor([anchor]), valid_A=torch.tensor([True]))
        trained_KD = block_hidden(drafter, ends, pack, anchors, attention="dense")
    token = int(pack.tokens.input_ids_T[anchor])
    ids_K = torch.tensor([token] + [drafter.config.mask_token_id] * (size - 1))
    drafted_KD = drafter.draft(
        pack.features_TLD[:anchor].flatten(1),
        ends.embed(ids_K),
        DraftCache(drafter.config.num_hidden_layers),
        start=anchor,
    )
    difference = float((drafted_KD - trained_KD).abs().max() / trained_KD.abs().max())
    # not <=: a NaN must fail as well
    faults.refuse(
        [] if difference <= TOLERANCE else [f"inference differs from training by {difference:.1e}"],
        "draft step",
    )
    source = "states of the target" if target is not None else "random states"
    return f"block of {size} on {source}: inference equals training within {difference:.0e}"


def _context(drafter: Drafter, target: Target | None) -> tuple[FeaturePack, FrozenEnds]:
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    rows = TRIED_ROWS if target is None else target.info.vocab_size
    ids_T = torch.randint(0, min(rows, config.vocab_size), (CONTEXT_TOKENS,), generator=generator)
    ends: FrozenEnds
    if target is None:
        layers = len(config.target_layer_ids)
        features_TLD = torch.randn(CONTEXT_TOKENS, layers, config.hidden_size, generator=generator)
        table_VD = torch.randn(TRIED_ROWS, config.hidden_size, generator=generator)
        ends = _SmallEnds(embed_weight_VD=table_VD, head_weight_VD=table_VD, embed_scale=config.embed_scale)
    else:
        ends = frozen_ends(target, config)
        features_BTLD, _ = target.hidden_states(ids_T[None], None, config.target_layer_ids)
        features_TLD = features_BTLD[0]
    tokens = made_up_documents([CONTEXT_TOKENS], ids_T)
    pack = FeaturePack.unplanned(tokens, HiddenStates(features=features_TLD))
    return pack, ends


class _SmallEnds(FrozenEnds):
    """A few random embedding rows for all tokens: a whole table of a large target would take gigabytes."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens by their number modulo the rows there are."""
        return super().embed(token_ids % TRIED_ROWS)
