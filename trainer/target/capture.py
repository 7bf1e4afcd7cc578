"""The frozen target at work: hidden states of chosen layers, and stepping with a cache for decoding.

Called by target workers (`hidden_states`) and by speculative decoding (`new_cache`, `step`, `crop`). Layer
ids count decoder layers from 0; what is captured is the residual stream *after* that layer, before any later
norm. Every call runs without gradients (not in inference mode: such tensors could not feed a drafter's
backward) and leaves the weights untouched. One `Target` belongs to one thread: hooks live for one call. Must
not know the drafter.

Dimension suffixes: B batch, T tokens, L captured layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.data.cpu_products import pack_linears
from trainer.data.pretrained import cache_argument
from trainer.errors import ConfigError, DataError
from trainer.target.decode_cache import REPLAY_TOKENS, TargetCache

if TYPE_CHECKING:
    from trainer.target.loader import TargetInfo


_LOG = logging.getLogger(__name__)

TRIAL_TOKENS = 20
"""Length of the sequence on which a cache is tried."""


class _LastTapReached(Exception):  # noqa: N818 - control flow, not an error
    """Ends a forward pass once the last layer that anyone asked for has run."""


class Target:
    """A frozen language model, its facts (`info`) and its tokenizer (None when the directory had none)."""

    def __init__(self, model: Any, info: TargetInfo, tokenizer: Any | None) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._model = model
        self._body = model.get_decoder()
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ConfigError(
                f"target's head must be a plain matrix, a drafter borrows it: {info.model_type}"
            )
        self.embed_weight_VD: Tensor = model.get_input_embeddings().weight
        self.head_weight_VD: Tensor = head.weight
        self._head = head
        self._cache_argument = cache_argument(model)
        self._can_go_back: bool | None = None

    def head_product(self, hidden: Tensor) -> Tensor:
        """Multiply rows [..., D] with the head; what the model does to logits afterwards is not included."""
        product: Tensor = self._head.forward(hidden)
        return product

    def pack(self, *, only_head: bool = False) -> None:
        """Get ready to decode on a CPU; `only_head` leaves alone what hidden states are made by."""
        pack_linears(self._head if only_head else self._model)

    def tensors(self) -> dict[str, Tensor]:
        """Return every weight and buffer by name, each storage once."""
        entries = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: tensor for name, tensor in entries if tensor is not None}

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embed_weight_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states."""
        return self.embed_weight_VD.dtype

    @torch.no_grad()
    def hidden_states(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None,
        layer_ids: Sequence[int],
        *,
        with_last_hidden: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a right-padded batch and return what the tapped layers produced.

        Args:
            input_ids_BT: int64, right-padded with any valid id.
            attention_mask_BT: True on real tokens; None when nothing is padded. Attention is causal and
                padding comes last, so real tokens never see it: the mask is checked (on the CPU only) but
                not given to the model, which keeps the faster kernels. Rows at padding hold rubbish.
            layer_ids: decoder layers, 0-based, in the order wanted; layers behind the last one are not run.
            with_last_hidden: also return the last hidden state, after the final norm; runs all layers.

        Returns:
            `(features_BTLD, last_hidden_BTD or None)` on the target's device.
        """
        self.check_layer_ids(layer_ids)
        if attention_mask_BT is not None and attention_mask_BT.device.type == "cpu":
            _check_right_padded(attention_mask_BT)
        input_ids_BT = input_ids_BT.to(self.device, non_blocking=True)
        with self._tap(layer_ids, stop_after_last=not with_last_hidden) as tapped:
            try:
                last_BTD = self._body(input_ids=input_ids_BT, use_cache=False).last_hidden_state
            except _LastTapReached:
                last_BTD = None
        return _stack(tapped, layer_ids), last_BTD

    def new_cache(self) -> TargetCache:
        """An empty cache for one sequence; how it takes steps back depends on the target's layers."""
        open_entries = functools.partial(DynamicCache, config=self._model.config.get_text_config())
        if self._is_plain():
            return TargetCache(open_entries)
        if self._can_go_back is None:
            self._can_go_back = self._try_going_back(TargetCache(open_entries, is_plain=False))
        return TargetCache(open_entries, is_plain=False) if self._can_go_back else TargetCache(None)

    @torch.no_grad()
    def step(
        self, input_ids_1T: Tensor, cache: TargetCache, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run the next T tokens of one sequence behind what `cache` holds, and add them to it.

        Returns:
            `(logits_TV, features_TLD)` of the new tokens; `layer_ids` may be empty.
        """
        self.check_layer_ids(layer_ids)
        new = int(input_ids_1T.shape[1])
        if len(cache.behind_T) > REPLAY_TOKENS and not cache.recomputes:
            self._run(cache.behind_T[None], cache, logits=1)
            cache.caught_up()
        cache.keep()
        cache.append(input_ids_1T[0])
        with self._tap(layer_ids, stop_after_last=False) as tapped:
            logits_TV = self._run(cache.behind_T[None], cache, logits=new)
        cache.caught_up()
        return logits_TV, _stack(tapped, layer_ids)[0, -new:]

    def _run(self, input_ids_1T: Tensor, cache: TargetCache, *, logits: int) -> Tensor:
        """Run tokens with the cache, or all of them without; returns the logits of the last few."""
        if cache.recomputes:
            arguments: dict[str, Any] = {"input_ids": cache.token_ids_T[None].to(self.device)}
            arguments["use_cache"] = False
        else:
            arguments = {"input_ids": input_ids_1T.to(self.device), "use_cache": True}
            arguments[self._cache_argument] = cache.entries
        output: Tensor = self._model(**arguments, logits_to_keep=logits).logits
        return output[0, -logits:]

    @property
    def has_plain_cache(self) -> bool:
        """True where keys and values are all there is to keep, so that rows can be overwritten."""
        return self._is_plain()

    @torch.no_grad()
    def run_rows(
        self,
        input_ids_BT: Tensor,
        entries: Any,
        layer_ids: Sequence[int],
        *,
        positions_BT: Tensor,
        visible_BTS: Tensor,
        logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:
        """Run several sequences at once against a cache that knows where each of them stands.

        Args:
            input_ids_BT: int64, on the target's device.
            entries: a transformers cache; it decides which keys the layers get.
            layer_ids: decoder layers to capture; may be empty.
            positions_BT: position of every token in its own sequence.
            visible_BTS: bool, which of the S keys a token may see.
            logits_to_keep: last rows whose logits are wanted; 0 for all.

        Returns:
            `(logits_BTV, features_BTLD)`.
        """
        self.check_layer_ids(layer_ids)
        hidden = torch.finfo(self.dtype).min
        mask_B1TS = torch.zeros(visible_BTS.shape, dtype=self.dtype, device=self.device)
        mask_B1TS = mask_B1TS.masked_fill_(~visible_BTS, hidden)[:, None]
        with self._tap(layer_ids, stop_after_last=False) as tapped:
            output = self._model(
                input_ids=input_ids_BT,
                position_ids=positions_BT,
                attention_mask=mask_B1TS,
                logits_to_keep=logits_to_keep,
                use_cache=True,
                **{self._cache_argument: entries},
            )
        return output.logits, _stack(tapped, layer_ids)

    def check_layer_ids(self, layer_ids: Sequence[int]) -> None:
        """Refuse ids that are no decoder layer, and the last one, whose meaning differs between engines."""
        bad = [layer for layer in layer_ids if not 0 <= layer < self.info.num_layers - 1]
        if bad or len(set(layer_ids)) != len(layer_ids):
            limit = self.info.num_layers - 2
            raise ConfigError(f"target_layer_ids must be different and within 0..{limit}: {list(layer_ids)}")

    def _is_plain(self) -> bool:
        config = self._model.config.get_text_config()
        plain = set(self.info.layer_types) == {"full_attention"}
        windowed = getattr(config, "sliding_window", None) is not None and not getattr(
            config, "layer_types", None
        )
        return plain and not windowed

    def _try_going_back(self, cache: TargetCache) -> bool:
        """Reject tokens once and compare with a run without cache: not every family's cache can do it."""
        ids_1T = (torch.arange(1, TRIAL_TOKENS + 1) * 7919 % self.info.vocab_size)[None]
        expected_TV, _ = self.step(ids_1T, TargetCache(None), ())
        try:
            self.step(ids_1T[:, :10], cache, ())
            self.step(torch.cat([ids_1T[:, 10:12], ids_1T[:, :4]], dim=1), cache, ())
            cache.crop(12)
            logits_TV, _ = self.step(ids_1T[:, 12:], cache, ())
            difference = float((logits_TV - expected_TV[12:]).abs().max() / expected_TV.abs().max())
        except (
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            RuntimeError,
            NotImplementedError,
        ) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            if difference <= (1e-3 if self.dtype == torch.float32 else 0.1):
                return True
            reason = f"logits differ by {difference:.1e} of their size"
        _LOG.warning(
            "decoding with %s runs the whole prefix at each step, which is slow: "
            "its cache does not come back after rejected tokens (%s)",
            self.info.model_type,
            reason,
        )
        return False

    @contextmanager
    def _tap(self, layer_ids: Sequence[int], *, stop_after_last: bool) -> Iterator[dict[int, Tensor]]:
        tapped: dict[int, Tensor] = {}
        last = max(layer_ids, default=-1)
        handles = []

        def keep(layer: int, output: Any) -> None:
            tapped[layer] = output[0] if isinstance(output, tuple) else output
            if stop_after_last and layer == last:
                raise _LastTapReached

        for layer in set(layer_ids):
            hook = lambda _module, _inputs, output, layer=layer: keep(layer, output)  # noqa: E731
            handles.append(self._body.layers[layer].register_forward_hook(hook))
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()


def _stack(tapped: dict[int, Tensor], layer_ids: Sequence[int]) -> Tensor:
    if not layer_ids:
        return torch.empty(1, 0, 0, 0)
    return torch.stack([tapped[layer] for layer in layer_ids], dim=2)


def _check_right_padded(attention_mask_BT: Tensor) -> None:
    mask_BT = attention_mask_BT.bool()
    if bool((mask_BT[:, 1:] & ~mask_BT[:, :-1]).any()):
        raise DataError("batch is not right-padded: a real token follows padding")
