"""Acceptance while training: a few held-out prompts, decoded speculatively against the real target.

Called between optimizer steps by `trainer.train`. The figure is the mean over prompts of each prompt's mean
acceptance length, greedy. Must not change drafter or target.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trainer.drafter.model import Drafter
from trainer.eval.speculative import TargetLike, speculative_generate


class OnlineEvaluation:
    """Measures the drafter as it is now.

    Args:
        lock: the target worker's; held per prompt, so that both share one replica of the target.
        beat: called after each prompt, a sign of life.
        is_stopping: asked before each prompt; a stop does not wait for the rest of an evaluation.
    """

    def __init__(
        self,
        target: TargetLike,
        prompts: Sequence[Sequence[int]],
        *,
        stop_ids: Collection[int],
        max_new_tokens: int,
        lock: threading.Lock,
        beat: Callable[[], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._stop_ids = stop_ids
        self._max_new_tokens = max_new_tokens
        self._lock = lock
        self._beat = beat
        self._is_stopping = is_stopping

    def measure(self, drafter: Drafter, step: int) -> Mapping[str, Any] | None:
        """Return the record for the metrics line, or None when a stop came in between.

        Prompts that end at once are left out, not counted as 1.
        """
        started_s = time.monotonic()
        if drafter.device != self._target.device:
            drafter = copy.deepcopy(drafter).to(self._target.device)
        lengths: list[float] = []
        tokens = 0
        for prompt in self._prompts:
            if self._is_stopping():
                return None
            with self._lock:
                result = speculative_generate(
                    self._target,
                    drafter,
                    prompt,
                    max_new_tokens=self._max_new_tokens,
                    eos_ids=self._stop_ids,
                )
            tokens += len(result.token_ids)
            if result.acceptance_length is not None:
                lengths.append(result.acceptance_length)
            self._beat()
        return {
            "step": step,
            "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
            "prompts": len(lengths),
            "new_tokens": tokens,
            "seconds": round(time.monotonic() - started_s, 3),
        }
