"""How good each checkpoint of a lineage is, so that the best one is kept beside the newest.

Owns `<lineage>/scores.json`. Called by `checkpoint.saver`, from the drafter's thread and from the one that
writes. Of several metrics the first in `METRICS` that any checkpoint has decides: what was measured by real
decoding counts before what training estimates. Must not import torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Collection
from pathlib import Path

_LOG = logging.getLogger(__name__)

METRICS = ("acceptance_length", "held_out_eal", "eal")
"""Best first: online evaluation by real decoding, estimate on held-out data, estimate of training itself."""

SCORES_FILE = "scores.json"
SCORES_VERSION = 1


class ScoreBook:
    """Scores by checkpoint step and metric; larger is better."""

    def __init__(self, lineage_dir: Path) -> None:
        self.path = lineage_dir / SCORES_FILE
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[int, float]] = {}
        self._newest_step = -1
        self._scores: dict[int, dict[str, float]] = self._read()

    def observe(self, metric: str, step: int, value: float | None) -> None:
        """Take a new value of a metric; it is the score of the checkpoint of that step, or of the next one.

        Raises:
            ValueError: not one of `METRICS`.
        """
        if metric not in METRICS:
            raise ValueError(f"unknown score: {metric}; known are {', '.join(METRICS)}")
        if value is None or not math.isfinite(value):
            return
        with self._lock:
            self._latest[metric] = (step, float(value))
            if step in self._scores:
                self._scores[step][metric] = float(value)
                self._write()

    def add_checkpoint(self, step: int) -> None:
        """Give the checkpoint of a step what was observed since the one before."""
        with self._lock:
            fresh = {name: value for name, (at, value) in self._latest.items() if at > self._newest_step}
            self._scores[step] = self._scores.get(step, {}) | fresh
            self._newest_step = step
            self._write()

    def best(self, count: int, steps: Collection[int]) -> list[int]:
        """Return the best `count` of these steps, best first; of equals the later one."""
        with self._lock:
            known = {step: self._scores.get(step, {}) for step in steps}
            metric = next((name for name in METRICS if any(name in s for s in known.values())), None)
            if metric is None:
                return []
            ranked = [(scores[metric], step) for step, scores in known.items() if metric in scores]
            return [step for _, step in sorted(ranked, reverse=True)[:count]]

    def forget(self, steps: Collection[int]) -> None:
        """Drop the scores of all other steps: their checkpoints are gone."""
        with self._lock:
            self._scores = {step: scores for step, scores in self._scores.items() if step in steps}
            self._write()

    def _read(self) -> dict[int, dict[str, float]]:
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            return {
                int(step): {str(name): float(value) for name, value in scores.items()}
                for step, scores in record["scores"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning("scores of earlier checkpoints are lost: %s (%s)", self.path, error)
            return {}

    def _write(self) -> None:
        record = {"v": SCORES_VERSION, "scores": {str(k): v for k, v in sorted(self._scores.items())}}
        temporary = self.path.with_name(f".{self.path.name}.tmp-{os.getpid()}")
        try:
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            # only the choice of the best after a restart suffers
            _LOG.warning("scores of checkpoints cannot be written: %s (%s)", self.path, error)
