"""Token ids and masks of many samples in flat arrays: in memory up to a limit, then in a file that is mapped.

Filled once by `Corpus.open`, then only read, by any number of threads. What is in the file costs no memory of
its own: the kernel keeps pages of it as long as there is room. The file has no name, so nothing is left
behind. Must not know what a good sample is.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

CHUNK_TOKENS = 4_194_304
"""A sample lies in one chunk, so this is also the longest sample."""
MEMORY_TOKENS = 67_108_864
"""Tokens that stay in memory (5 bytes each, so 320 MiB); further chunks go to the file."""
TOKEN_BYTES = 5


class TokenStore:
    """Append samples, `seal`, then `read` them by their place."""

    def __init__(self, *, memory_tokens: int = MEMORY_TOKENS, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._memory_tokens = memory_tokens
        self._chunk_tokens = chunk_tokens
        self._chunks: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        self._spilled: dict[int, tuple[int, int]] = {}
        self._bases: list[int] = []
        self._open: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        self._open_tokens = 0
        self._tokens = 0
        self._file: IO[bytes] | None = None
        self._spills = True

    @property
    def tokens(self) -> int:
        """Tokens appended so far."""
        return self._tokens

    @property
    def mapped_tokens(self) -> int:
        """Tokens that lie in the file."""
        return sum(length for _, length in self._spilled.values())

    def append(self, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> None:
        """Add a sample behind the last one; the arrays are copied later, so they must not change."""
        if self._open_tokens + len(ids) > self._chunk_tokens:
            self._close_chunk()
        self._open.append((ids, mask))
        self._open_tokens += len(ids)
        self._tokens += len(ids)

    def seal(self) -> None:
        """Finish; from now on the store is only read."""
        self._close_chunk()
        if self._file is not None and self._spilled:
            # One mapping for all: each would hold a file descriptor of its own.
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            for chunk, (offset, length) in self._spilled.items():
                ids = np.frombuffer(mapped, dtype=np.int32, count=length, offset=offset)
                mask = np.frombuffer(mapped, dtype=np.bool_, count=length, offset=offset + ids.nbytes)
                self._chunks[chunk] = (ids, mask)
        self._starts = np.asarray(self._bases, dtype=np.int64)

    def read(self, start: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Views of the sample that was appended as tokens `start` to `end` of all."""
        chunk = int(np.searchsorted(self._starts, start, side="right")) - 1
        ids, mask = self._chunks[chunk]
        base = self._bases[chunk]
        return ids[start - base : end - base], mask[start - base : end - base]

    def iter_ids(self) -> Iterator[NDArray[np.int32]]:
        """All ids in order, chunk by chunk."""
        yield from (ids for ids, _ in self._chunks)

    def iter_masks(self) -> Iterator[NDArray[np.bool_]]:
        """All masks in order, chunk by chunk."""
        yield from (mask for _, mask in self._chunks)

    def _close_chunk(self) -> None:
        if not self._open:
            return
        ids = np.concatenate([part for part, _ in self._open]).astype(np.int32, copy=False)
        mask = np.concatenate([part for _, part in self._open]).astype(np.bool_, copy=False)
        self._bases.append(self._tokens - self._open_tokens)
        if self._spills and self._tokens > self._memory_tokens and self._spill(ids, mask):
            ids, mask = np.empty(0, np.int32), np.empty(0, np.bool_)
        ids.setflags(write=False)
        mask.setflags(write=False)
        self._chunks.append((ids, mask))
        self._open, self._open_tokens = [], 0

    def _spill(self, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> bool:
        """Write a chunk behind the file's end; False where there is no room."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="dflash-tokens-")  # noqa: SIM115 - as long as we
            offset = self._file.seek(0, os.SEEK_END)
            # Ids have to begin at a multiple of their size.
            padding = bytes(-len(mask) % ids.itemsize)
            self._file.write(ids.tobytes() + mask.tobytes() + padding)
            self._file.flush()
        except OSError as error:
            self._spills = False
            log.warning(
                "tokens stay in memory from here on (%d bytes each): cannot write to %s: %s; "
                "name a folder with room by TMPDIR",
                TOKEN_BYTES,
                tempfile.gettempdir(),
                error.strerror or error,
            )
            return False
        self._spilled[len(self._chunks)] = (offset, len(ids))
        return True
