"""Continuous batching: every slot decodes its own prompt, and a finished one is replaced at once.

Called by `generate` for completions (greedy) and for prompts that the target invents (sampled). All state
that a step changes lies on the device in tensors of fixed shape, so that on CUDA a step is one graph, per
number of rows and attended width; the host looks only every few steps. A prompt's last token is decoded
like any other: filling a slot needs no logits. Must not know files, tokenizers or text.

Dimension suffixes: N slots, M slots being filled, R rows in view, P prompt positions, V vocabulary, O tokens
said so far.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from trainer.data.pretrained import cache_argument
from trainer.data.slot_cache import SlotCache, prompt_masks, sliding_window, slot_attention, step_masks
from trainer.data.step_graphs import StepGraphs
from trainer.data.token_choice import Sampling, draw

log = logging.getLogger(__name__)

FILL_TOKENS = 16_384
"""Most padded prompt tokens in one forward; bounds its activations."""
FILL_STEP = 32
"""Prompts are padded to a multiple of this."""
FEWEST_ROWS = 64
"""On CUDA a step with fewer rows takes no less time."""
REPORT_S = 10.0
"""Between two progress lines."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt; `uniforms`, numbers or an array in [0, 1), one per token, only where tokens are drawn."""

    key: int
    input_ids: Sequence[int]
    uniforms: Any = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What the target said to one prompt; `token_ids` holds the stop token when there was one."""

    token_ids: list[int]
    is_cut_off: bool


@dataclass(slots=True)
class DecodingStats:
    """What a run did; `tokens` are those of finished prompts, `slot_steps` all rows of all steps."""

    tokens: int = 0
    unfinished_tokens: int = 0
    steps: int = 0
    slot_steps: int = 0
    wall_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second, filling included."""
        return (self.tokens + self.unfinished_tokens) / max(self.wall_s, 1e-9)

    @property
    def slots_in_use_ratio(self) -> float:
        """Share of computed rows whose token was wanted."""
        return (self.tokens + self.unfinished_tokens) / max(self.slot_steps, 1)


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a step reads and writes, per slot; always the same tensors."""

    token_N: Tensor
    """Last known token, not yet in the cache."""
    position_N: Tensor
    """Its position = tokens in the cache."""
    said_N: Tensor
    """Tokens said so far."""
    alive_N: Tensor
    output_NO: Tensor
    """Tokens said; the last column takes what stopped rows say."""
    uniform_NO: Tensor | None

    @staticmethod
    def empty(slots: int, max_new_tokens: int, *, sampled: bool, device: torch.device) -> SlotState:
        """All slots free."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        uniform_NO = zeros(slots, max_new_tokens + 1, dtype=torch.float32) if sampled else None
        alive_N = zeros(slots, dtype=torch.bool)
        return SlotState(
            zeros(slots), zeros(slots), zeros(slots), alive_N, zeros(slots, max_new_tokens + 1), uniform_NO
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor that is there."""
        values = [getattr(self, entry.name) for entry in fields(self)]
        return [value for value in values if value is not None]


@dataclass(slots=True)
class _Seat:
    """The host's view of an occupied slot; `position` is what the row can have reached at most."""

    request: Request
    position: int


@dataclass(kw_only=True)
class SlotDecoder:
    """Decodes any number of prompts in a fixed number of slots.

    Attributes:
        model: a causal language model of transformers without obstacle (`slot_cache.find_obstacle`).
        slots: prompts at once.
        positions: most tokens of a prompt together with its completion.
        max_new_tokens: most tokens per completion.
        stop_ids: ids that end a completion.
        sampling: draw tokens instead of taking the likeliest.
        look_every: steps between two looks of the host; a row that stops wastes at most that many.
        width_step: attended positions are rounded up to a multiple of this.
        use_graphs: capture steps as CUDA graphs (CUDA only).
    """

    model: Any
    slots: int
    positions: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling | None = None
    look_every: int = 1
    width_step: int = 32
    use_graphs: bool = True
    stats: DecodingStats = field(default_factory=DecodingStats, init=False)

    def __post_init__(self) -> None:
        self._device: torch.device = self.model.get_input_embeddings().weight.device
        self._dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        self._window = sliding_window(self.model)
        self._cached = cache_argument(self.model)
        self._on_cuda = self._device.type == "cuda"
        self._cache = SlotCache(slots=self.slots, positions=_ceil(self.positions + 1, self.width_step))
        self._seats: list[_Seat | None] = [None] * self.slots
        self._rows = self.slots
        with torch.inference_mode():
            self._stop_ids = torch.tensor(sorted(self.stop_ids), dtype=torch.int64, device=self._device)
            self._state = SlotState.empty(
                self.slots, self.max_new_tokens, sampled=self.sampling is not None, device=self._device
            )
        self._graphs = StepGraphs(self._step, self._state.tensors()) if self._is_capturing() else None

    @property
    def has_graphs(self) -> bool:
        """Whether steps run as CUDA graphs (False after a capture failed)."""
        return self._graphs is not None and self._graphs.is_usable

    @property
    def cache_nbytes(self) -> int:
        """Bytes of keys and values on the device, 0 before the first step."""
        return self._cache.nbytes

    @torch.inference_mode()
    def run(
        self, requests: Iterable[Request], deliver: Callable[[list[tuple[Request, Completion]]], None]
    ) -> None:
        """Complete every request; `deliver` gets each once, as it finishes, in no promised order.

        Requests of similar length should be neighbours: the longest row in a slot sets the attended width.
        """
        waiting = deque(requests)
        started = reported = time.monotonic()
        finished: list[tuple[Request, Completion]] = []
        total, done = len(waiting), 0
        with slot_attention(self.model), _on(self._device):
            while waiting or any(self._seats):
                self._admit(waiting)
                if not waiting:
                    self._shrink()
                self._launch()
                # The device is busy with the steps just launched while the host writes what came before.
                self._hand_over(finished, deliver)
                finished = self._collect()
                done += len(finished)
                self.stats.wall_s = time.monotonic() - started
                if time.monotonic() - reported > REPORT_S:
                    reported = time.monotonic()
                    self._report(done, total)
            self._hand_over(finished, deliver)
        self._rows = self.slots
        self.stats.wall_s = time.monotonic() - started

    def _hand_over(
        self,
        finished: list[tuple[Request, Completion]],
        deliver: Callable[[list[tuple[Request, Completion]]], None],
    ) -> None:
        if finished:
            deliver(finished)

    def _report(self, done: int, total: int) -> None:
        log.info(
            "completed %d of %d prompts, %.1f tokens/s, %.0f %% of %d slots in use",
            done,
            total,
            self.stats.tokens_per_s,
            100 * self.stats.slots_in_use_ratio,
            self.slots,
        )

    # --- filling -----------------------------------------------------------------------------------------

    def _admit(self, waiting: deque[Request]) -> None:
        free = [slot for slot in range(self._rows) if self._seats[slot] is None]
        # Filling a few slots costs almost as much as filling many: wait for some, unless all is done.
        if not waiting or (len(free) < max(1, self.slots // 16) and any(self._seats)):
            return
        chosen = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
        for slot, request in chosen:
            self._seats[slot] = _Seat(request, len(request.input_ids) - 1)
        self._seat(chosen)
        for batch in _fill_batches(chosen):
            self._fill(batch)

    def _seat(self, chosen: Sequence[tuple[int, Request]]) -> None:
        slots_M = self._to_device([slot for slot, _ in chosen])
        last_M = self._to_device([request.input_ids[-1] for _, request in chosen])
        length_M = self._to_device([len(request.input_ids) - 1 for _, request in chosen])
        state = self._state
        state.token_N.index_copy_(0, slots_M, last_M)
        state.position_N.index_copy_(0, slots_M, length_M)
        state.said_N.index_fill_(0, slots_M, 0)
        state.alive_N.index_fill_(0, slots_M, True)
        if state.uniform_NO is not None:
            uniform_MO = torch.zeros(len(chosen), self.max_new_tokens + 1)
            for row, (_, request) in enumerate(chosen):
                uniform_MO[row, : len(request.uniforms)] = torch.as_tensor(request.uniforms)
            state.uniform_NO.index_copy_(0, slots_M, self._copy(uniform_MO))

    def _fill(self, batch: Sequence[tuple[int, Request]]) -> None:
        """Put the prompts but for their last tokens into the cache, padded on the right.

        What padding leaves there is overwritten by the row's own tokens before anything attends to it.
        """
        length = _ceil(max(len(request.input_ids) for _, request in batch) - 1, FILL_STEP)
        length = min(length, self._cache.positions)
        ids_MP = torch.zeros(len(batch), length, dtype=torch.int64)
        for row, (_, request) in enumerate(batch):
            ids_MP[row, : len(request.input_ids) - 1] = torch.tensor(request.input_ids[:-1])
        self._cache.fill(self._to_device([slot for slot, _ in batch]))
        self.model(
            input_ids=self._copy(ids_MP),
            attention_mask=prompt_masks(length, window=self._window, device=self._device),
            position_ids=torch.arange(length, device=self._device)[None],
            logits_to_keep=1,
            use_cache=True,
            **{self._cached: self._cache},
        )

    def _to_device(self, values: Sequence[int]) -> Tensor:
        return self._copy(torch.tensor(values, dtype=torch.int64))

    def _copy(self, tensor: Tensor) -> Tensor:
        """To the device without waiting for what is queued there."""
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._on_cuda else tensor

    # --- stepping ----------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Queue the steps up to the next look."""
        seats = [seat for seat in self._seats if seat is not None]
        reach = max(seat.position for seat in seats) + self.look_every
        width = min(_ceil(reach + 1, self.width_step), self._cache.positions)
        for _ in range(self.look_every):
            if self.has_graphs and self._graphs is not None:
                self._graphs.step(self._rows, width)
            else:
                self._step(self._rows, width)
        for seat in seats:
            seat.position = min(seat.position + self.look_every, self.positions)
        self.stats.steps += self.look_every
        self.stats.slot_steps += self.look_every * self._rows

    def _step(self, rows: int, width: int) -> None:
        """Decode one token in each of the first `rows` slots; only device work, no host value."""
        state = self._state
        token_R, said_R, alive_R = state.token_N[:rows], state.said_N[:rows], state.alive_N[:rows]
        # A stopped row may stand behind the view; inside, it still sees a key: no NaN gets into the cache.
        position_R = state.position_N[:rows].clamp(max=width - 1)
        self._cache.step(position_R, width=width)
        logits_RV = self.model(
            input_ids=token_R[:, None],
            attention_mask=step_masks(position_R, width=width, window=self._window, dtype=self._dtype),
            position_ids=position_R[:, None],
            use_cache=True,
            **{self._cached: self._cache},
        ).logits[:, -1]
        chosen_R = self._choose(logits_RV, said_R)
        column_R = torch.where(alive_R, said_R, self.max_new_tokens)
        state.output_NO[:rows].scatter_(1, column_R[:, None], chosen_R[:, None])
        token_R.copy_(torch.where(alive_R, chosen_R, token_R))
        said_R.add_(alive_R)
        state.position_N[:rows].add_(alive_R)
        is_stop_R = (chosen_R[:, None] == self._stop_ids).any(1)
        alive_R.logical_and_(~(is_stop_R | (said_R >= self.max_new_tokens)))

    def _choose(self, logits_RV: Tensor, said_R: Tensor) -> Tensor:
        if self.sampling is None:
            return logits_RV.argmax(-1)
        assert self._state.uniform_NO is not None
        uniform_R = self._state.uniform_NO[: said_R.shape[0]].gather(1, said_R[:, None])[:, 0]
        return draw(logits_RV, uniform_R, self.sampling)

    # --- results -----------------------------------------------------------------------------------------

    def _collect(self) -> list[tuple[Request, Completion]]:
        # host sync: which rows have stopped; the only one while none has.
        view = torch.stack((self._state.alive_N[: self._rows].long(), self._state.said_N[: self._rows]))
        alive, said = view.tolist()
        seated = [slot for slot, seat in enumerate(self._seats[: self._rows]) if seat is not None]
        ended = [slot for slot in seated if not alive[slot]]
        self.stats.unfinished_tokens = sum(said[slot] for slot in seated if alive[slot])
        if not ended:
            return []
        # host sync: their tokens.
        outputs = self._state.output_NO[self._to_device(ended)].tolist()
        finished = []
        for slot, tokens in zip(ended, outputs, strict=True):
            seat = self._seats[slot]
            assert seat is not None
            token_ids = tokens[: said[slot]]
            finished.append((seat.request, Completion(token_ids, token_ids[-1] not in self.stop_ids)))
            self._seats[slot] = None
            self.stats.tokens += len(token_ids)
        return finished

    def _shrink(self) -> None:
        """With nothing left to seat, put the living rows first and stop computing the others."""
        seated = [slot for slot, seat in enumerate(self._seats) if seat is not None]
        rows = self._rows
        # Each number of rows costs a capture: a few steps down. Without graphs any number will do.
        while self._on_cuda and rows >= 4 * len(seated) and rows >= 4 * FEWEST_ROWS:
            rows //= 4
        if not self._on_cuda:
            rows = len(seated)
        if rows >= self._rows or not seated:
            return
        spare = [slot for slot in range(self._rows) if self._seats[slot] is None]
        order = [*seated, *spare][:rows]
        source_M = self._to_device(order)
        width = max(seat.position for seat in self._seats if seat is not None) + 1
        self._cache.move(source_M, width=min(width, self._cache.positions))
        for tensor in self._state.tensors():
            tensor[:rows] = tensor.index_select(0, source_M)
        self._seats = [self._seats[slot] for slot in order] + [None] * (self.slots - rows)
        self._rows = rows

    def _is_capturing(self) -> bool:
        return self.use_graphs and self._on_cuda


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one; graphs and streams belong to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _fill_batches(chosen: Sequence[tuple[int, Request]]) -> list[list[tuple[int, Request]]]:
    """Cut into batches of similar length below `FILL_TOKENS`; prompts of one token need no filling."""
    batches: list[list[tuple[int, Request]]] = []
    longest = 0
    for slot, request in sorted(chosen, key=lambda entry: -len(entry[1].input_ids)):
        if len(request.input_ids) == 1:
            continue
        if not batches or (len(batches[-1]) + 1) * longest > FILL_TOKENS:
            batches.append([])
            longest = _ceil(len(request.input_ids), FILL_STEP)
        batches[-1].append((slot, request))
    return batches


def _ceil(value: int, step: int) -> int:
    return -(-value // step) * step
