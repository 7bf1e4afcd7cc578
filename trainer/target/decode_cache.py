"""What a target remembers of one sequence while it decodes, and how it takes steps back.

Made by `Target.new_cache`, used by `Target.step` and cropped by speculative decoding after each verify. Plain
attention forgets rejected tokens by cutting keys and values off. Linear attention and sliding windows cannot
be cut back: their layers are copied before a step and put back after a rejection, and what was accepted of
that step runs once more in front of the next one. Must not run the model.

Dimension suffixes: T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

REPLAY_TOKENS = 16
"""Accepted tokens that may run again in front of each step, before they get a forward of their own."""


class TargetCache:
    """The committed prefix of one sequence.

    Args:
        open_entries: makes an empty cache of transformers; None where none can be trusted, then each step
            runs the whole prefix again: slower, but exact.
        is_plain: every layer can be cut back in place.
    """

    def __init__(self, open_entries: Callable[[], Any] | None, *, is_plain: bool = True) -> None:
        self._open_entries = open_entries
        self._is_plain = is_plain
        self._stored = 0
        self._kept: list[Any] = []
        self._kept_length = 0
        self.entries: Any | None = None if open_entries is None else open_entries()
        self.token_ids_T = torch.empty(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Tokens that the cache stands for."""
        return int(self.token_ids_T.shape[0])

    @property
    def recomputes(self) -> bool:
        """True where `Target.step` has to run the prefix again."""
        return self.entries is None

    @property
    def behind_T(self) -> Tensor:  # noqa: N802 (dimension suffix)
        """Committed tokens that the entries do not hold (any more)."""
        return self.token_ids_T[self._stored :]

    def append(self, token_ids_T: Tensor) -> None:
        """Note the tokens of a step that is about to run, on the device where they are.

        A copy to the host would make a GPU's every step wait.
        """
        self.token_ids_T = torch.cat([self.token_ids_T.to(token_ids_T.device), token_ids_T])

    def keep(self) -> None:
        """Copy what a rejection after the next step would need."""
        if self._is_plain or self.entries is None:
            return
        # plain layers are cut back instead: their keys and values are the large part
        self._kept = [
            None if type(layer) is DynamicLayer else copy.deepcopy(layer) for layer in self.entries.layers
        ]
        self._kept_length = self._stored

    def caught_up(self) -> None:
        """Note that the entries now hold every token."""
        self._stored = self.length

    def crop(self, length: int) -> None:
        """Forget everything behind the first `length` tokens.

        Raises:
            ValueError: there are not so many tokens.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} tokens to {length}")
        surplus = self._stored - length
        self.token_ids_T = self.token_ids_T[:length]
        if surplus <= 0:
            return
        if self.entries is None:
            self._stored = length
        elif self._is_plain:
            # A negative count means "drop this many" in every transformers 5; positive lengths were removed.
            self.entries.crop(-surplus)
            self._stored = length
        else:
            self._put_back(length)

    def _put_back(self, length: int) -> None:
        if length < self._kept_length or not self._kept:
            assert self._open_entries is not None
            self.entries, self._kept, self._stored = self._open_entries(), [], 0
            return
        assert self.entries is not None
        for index, kept in enumerate(self._kept):
            if kept is not None:
                self.entries.layers[index] = kept
            elif self._stored > self._kept_length:
                self.entries.layers[index].crop(self._kept_length - self._stored)
        # the copies are the entries now: a second crop before the next step has to start over
        self._stored, self._kept = self._kept_length, []
