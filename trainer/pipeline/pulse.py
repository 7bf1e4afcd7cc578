"""Signs of life between the trainers of one run, over the key-value store that they met at.

Started and asked by `pipeline.nodes`. Each rank counts upwards under its own key every second and looks at
the others: one that stands still for too long, or that says why it failed, ends the run here through the
board. A stop request travels the same way. Runs in a thread with a connection of its own, so that a waiting
collective never holds it up.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from trainer.errors import PipelineError
from trainer.flags import World
from trainer.pipeline.workers import Board

_LOG = logging.getLogger(__name__)

BEAT_S = 1.0
LOST_AFTER_S = 60.0
"""A rank whose count stands still for so long is lost; a busy machine delays a beat by seconds."""
EXPLAIN_S = 5.0
"""After a broken link: how long to watch who still beats."""
PART_S = 15.0
"""At the end: how long to wait for the others to part."""
STORE_LIMIT = timedelta(seconds=20)
PREFIX = "dflash"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNote:
    """A stop that some rank was asked for, and whether it wants a checkpoint."""

    rank: int
    save: bool


class Pulse:
    """This rank's beat and its view of the others.

    Args:
        board: told of the first loss.
    """

    def __init__(self, world: World, board: Board) -> None:
        self.stop: StopNote | None = None
        self._world = world
        self._board = board
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            PREFIX,
            dist.TCPStore(  # type: ignore[attr-defined]
                world.address, world.port, is_master=False, wait_for_workers=False, timeout=STORE_LIMIT
            ),
        )
        self._lock = threading.Lock()
        self._count = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._is_over = threading.Event()
        self._has_lost = False
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Say who this is and begin to beat."""
        self._store.set(self._key("host", self._world.rank), socket.gethostname())
        self._beat()
        self._thread.start()

    def announce_stop(self, *, save: bool) -> None:
        """Leave a stop request for all."""
        self._write("stop", json.dumps({"rank": self._world.rank, "save": save}))

    def look_for_stop(self) -> StopNote | None:
        """Read the request that some rank has left, now."""
        text = self._read("stop")
        if text is not None and self.stop is None:
            body = json.loads(text)
            self.stop = StopNote(rank=int(body["rank"]), save=bool(body["save"]))
        return self.stop

    def close(self, reason: str) -> None:
        """Leave: with the reason of a failure, or "" in good order.

        Rank 0 then waits a little for the others to leave too: the store may live in its process.
        """
        self._write(self._key("end", self._world.rank), reason or "ok")
        self._is_over.set()
        deadline = time.monotonic() + (0.0 if reason or self._world.rank else PART_S)
        while time.monotonic() < deadline and not all(
            self._read(self._key("end", r)) for r in self._others()
        ):
            time.sleep(0.1)

    def explain_loss(self, symptom: str) -> str:
        """Say which rank is gone after the link to it broke; watches a few seconds who still beats."""
        before = {rank: self._read(self._key("beat", rank)) for rank in self._others()}
        deadline = time.monotonic() + EXPLAIN_S
        silent = set(before)
        while silent and time.monotonic() < deadline:
            ended = {rank: end for rank in before if (end := self._read(self._key("end", rank)))}
            if ended:
                return self._describe(*min(ended.items(), key=lambda entry: (entry[1] == "ok", entry[0])))
            silent = {rank for rank in silent if self._read(self._key("beat", rank)) == before[rank]}
            time.sleep(BEAT_S / 4)
        if not silent:
            return f"the link between the ranks broke: {symptom}"
        return f"{self._name(min(silent))} was lost: it gives no sign of life ({symptom})"

    def _run(self) -> None:
        while not self._is_over.wait(BEAT_S):
            self._beat()
            self._look()

    def _beat(self) -> None:
        self._count += 1
        self._write(self._key("beat", self._world.rank), str(self._count))

    def _look(self) -> None:
        self.look_for_stop()
        now = time.monotonic()
        for rank in self._others():
            end = self._read(self._key("end", rank))
            if end == "ok":
                continue
            if end:
                self._report(self._describe(rank, end))
            value = self._read(self._key("beat", rank)) or ""
            if value != self._seen.get(rank, ("-", now))[0]:
                self._seen[rank] = (value, now)
            elif now - self._seen[rank][1] > LOST_AFTER_S:
                self._report(f"{self._name(rank)} was lost: no sign of life for {LOST_AFTER_S:.0f} s")

    def _describe(self, rank: int, end: str) -> str:
        return f"{self._name(rank)} " + ("has left the run" if end == "ok" else f"ended the run: {end}")

    def _report(self, text: str) -> None:
        if not self._has_lost and not self._is_over.is_set():
            self._has_lost = True
            _LOG.error("%s", text)
            self._board.fail("pulse", PipelineError(text))

    def _name(self, rank: int) -> str:
        host = self._read(self._key("host", rank))
        return f"rank {rank} ({host})" if host else f"rank {rank}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank != self._world.rank]

    @staticmethod
    def _key(kind: str, rank: int) -> str:
        return f"{kind}/{rank}"

    def _read(self, key: str) -> str | None:
        """Return a key's text, or None where nobody wrote it yet or the store is gone (which is reported)."""
        try:
            with self._lock:
                return bytes(self._store.get(key)).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            self._report_store(error)
            return None

    def _write(self, key: str, text: str) -> None:
        try:
            with self._lock:
                self._store.set(key, text)
        except RuntimeError as error:
            self._report_store(error)

    def _report_store(self, error: RuntimeError) -> None:
        if not self._is_over.is_set():
            self._report(
                f"rank 0 was lost: the meeting point {self._world.meeting_point} on it does not answer "
                f"({type(error).__name__})"
            )
