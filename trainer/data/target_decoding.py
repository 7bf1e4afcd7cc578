"""Lets a target complete prompts in the fastest way that gives its own results.

Called by `generate`, which loads the target through here. By slots when the target allows it, which is
measured on a short text before it is trusted; else batch after batch, with the reason in the log. Slots are
as many as asked for, or as the device has room for. Must not know files or text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.data.cpu_products import pack_linears
from trainer.data.decoding import Completion, DecodingStats, Request, SlotDecoder
from trainer.data.plain_decoding import complete_batch
from trainer.data.pretrained import cache_argument, load_causal_lm
from trainer.data.slot_cache import (
    SlotCache,
    find_obstacle,
    prompt_masks,
    sliding_window,
    slot_attention,
    step_masks,
)
from trainer.data.token_choice import Sampling
from trainer.errors import OutOfMemoryError

log = logging.getLogger(__name__)

CACHE_SHARE = 0.8
"""Share of the free device memory that keys and values may take; the rest is for a step's own tensors."""
LARGEST_DEVIATION = {torch.float32: 0.02, torch.bfloat16: 0.3}
"""Of logits by slots from plain ones, in standard deviations of the logits; a wrong mask gives about 1."""
PROBE_IDS = (11, 29, 7, 41, 3, 23, 37, 13, 31, 5, 19)
PROBE_CACHED = (4, 7)

Deliver = Callable[[list[tuple[Request, Completion]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLimits:
    """What bounds a batch of requests; `batch_size` None means what suits the device."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling | None = None
    batch_size: int | None = None


class Target:
    """A target model, loaded when first needed.

    Args:
        directory: the model.
        device: where it runs.
        dtype: of its weights.
    """

    def __init__(self, directory: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self._place = (directory, device, dtype)
        self._model: Any = None
        self._token_nbytes = 0
        self._obstacle: str | None = None
        self._may_capture = True

    def decode(self, requests: Sequence[Request], limits: DecodingLimits, deliver: Deliver) -> DecodingStats:
        """Complete requests, the longest prompts first; `deliver` gets each once, in no promised order.

        Raises:
            OutOfMemoryError: the device is too small for one slot, or for a step.
        """
        if self._model is None:
            self._load()
        ordered = sorted(requests, key=lambda request: -len(request.input_ids))
        run = self._run_slots if self._obstacle is None else self._run_batches
        try:
            return run(ordered, limits, deliver)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"no memory left to generate on {self._place[1]}: lower --batch-size"
            ) from error

    def _load(self) -> None:
        directory, device, dtype = self._place
        self._model = load_causal_lm(directory, device=device, dtype=dtype)
        if device.type == "cpu":
            pack_linears(self._model)
        self._obstacle = find_obstacle(self._model)
        if self._obstacle is None:
            self._obstacle, self._token_nbytes = measure_slots(self._model)
        if self._obstacle is not None:
            log.warning("decoding batch after batch, slower: %s", self._obstacle)

    def _run_slots(
        self, requests: Sequence[Request], limits: DecodingLimits, deliver: Deliver
    ) -> DecodingStats:
        on_cuda = self._place[1].type == "cuda"
        width_step = 128 if on_cuda else 32
        positions = len(requests[0].input_ids) + limits.max_new_tokens
        slots = min(limits.batch_size or (256 if on_cuda else 32), len(requests))
        if on_cuda:
            slots = self._affordable(slots, positions + width_step)
        decoder = SlotDecoder(
            model=self._model,
            slots=slots,
            positions=positions,
            max_new_tokens=limits.max_new_tokens,
            stop_ids=limits.stop_ids,
            sampling=limits.sampling,
            look_every=8 if on_cuda else 1,
            width_step=width_step,
            use_graphs=self._may_capture,
        )
        decoder.run(requests, deliver)
        self._may_capture = decoder.has_graphs
        steps = "CUDA graphs" if decoder.has_graphs else "plain steps"
        log.info(
            "decoded %d tokens in %.1f s: %.1f tokens/s, %.0f %% of %d slots in use, %s",
            decoder.stats.tokens,
            decoder.stats.wall_s,
            decoder.stats.tokens_per_s,
            100 * decoder.stats.slots_in_use_ratio,
            slots,
            steps,
        )
        return decoder.stats

    def _affordable(self, slots: int, positions: int) -> int:
        device = self._place[1]
        # What the allocator keeps without use is as good as free.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
        room = int(free * CACHE_SHARE) // (self._token_nbytes * positions)
        if room < 1:
            raise OutOfMemoryError(
                f"no room on {device} for one prompt of {positions} tokens: lower --max-new-tokens"
            )
        if room < slots:
            log.warning("decoding %d prompts at once, not %d: %s has no room for more", room, slots, device)
        return min(slots, room)

    def _run_batches(
        self, requests: Sequence[Request], limits: DecodingLimits, deliver: Deliver
    ) -> DecodingStats:
        size = limits.batch_size or 32
        stats, started = DecodingStats(), time.monotonic()
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            completions = complete_batch(
                self._model,
                [request.input_ids for request in batch],
                max_new_tokens=limits.max_new_tokens,
                stop_ids=limits.stop_ids,
                sampling=limits.sampling,
                uniforms=[request.uniforms for request in batch],
            )
            deliver(list(zip(batch, completions, strict=True)))
            said = [len(completion.token_ids) for completion in completions]
            stats.tokens += sum(said)
            stats.steps += max(said)
            stats.slot_steps += sum(said)
            stats.wall_s = time.monotonic() - started
            log.info(
                "completed %d of %d prompts, %.1f tokens/s",
                first + len(batch),
                len(requests),
                stats.tokens_per_s,
            )
        return stats


def measure_slots(model: Any) -> tuple[str | None, int]:
    """Decode a few tokens by slots and plainly; returns what speaks against slots and bytes per cached token.

    The config alone cannot tell: a target may keep its keys elsewhere, or attend in a way of its own.
    """
    try:
        by_slots, nbytes = _probe_slots(model)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return f"it cannot run by slots ({type(error).__name__}: {first})", 0
    plain = _probe_plain(model)
    spread = float(plain.float().std())
    deviation = float((by_slots.float() - plain.float()).abs().max()) / max(spread, 1e-12)
    allowed = LARGEST_DEVIATION.get(model.dtype, 0.3)
    if not deviation <= allowed:
        return f"by slots its logits deviate by {deviation:.3f} standard deviations, allowed {allowed}", 0
    return None, nbytes


def _probe_ids(model: Any) -> list[int]:
    vocabulary = int(model.config.get_text_config().vocab_size)
    return [token % vocabulary for token in PROBE_IDS]


@torch.inference_mode()
def _probe_plain(model: Any) -> Tensor:
    ids = torch.tensor([_probe_ids(model)], device=model.get_input_embeddings().weight.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return torch.stack([logits[cached : cached + 3] for cached in PROBE_CACHED])


@torch.inference_mode()
def _probe_slots(model: Any) -> tuple[Tensor, int]:
    """Logits [2 rows, 3 steps, vocabulary] of two rows with unequal pasts, and bytes per cached token."""
    weight = model.get_input_embeddings().weight
    device, window, ids = weight.device, sliding_window(model), _probe_ids(model)
    cache = SlotCache(slots=len(PROBE_CACHED), positions=16)
    cached = {cache_argument(model): cache, "use_cache": True}
    ids_T = torch.tensor(ids, device=device)
    steps = []
    with slot_attention(model):
        width = max(PROBE_CACHED)
        cache.fill(torch.arange(len(PROBE_CACHED), device=device))
        model(
            input_ids=ids_T[None, :width].expand(len(PROBE_CACHED), -1),
            attention_mask=prompt_masks(width, window=window, device=device),
            position_ids=torch.arange(width, device=device)[None],
            logits_to_keep=1,
            **cached,
        )
        for step in range(3):
            position_R = torch.tensor(PROBE_CACHED, device=device) + step
            cache.step(position_R, width=16)
            masks = step_masks(position_R, width=16, window=window, dtype=weight.dtype)
            steps.append(
                model(
                    input_ids=ids_T[position_R][:, None],
                    attention_mask=masks,
                    position_ids=position_R[:, None],
                    **cached,
                ).logits[:, -1]
            )
    return torch.stack(steps, dim=1), cache.nbytes // (cache.slots * cache.positions)
