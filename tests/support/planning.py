"""A clock for `plan`'s two measurements, for tests that must know what was measured."""

from __future__ import annotations

import types

import pytest

from trainer.planning import measure


def know_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a prefill take 0.5 s (median of three), a drafter's micro-batch 2 s."""
    durations = iter([0.25, 0.5, 4.0, 2.0, 1.0, 8.0])
    readings = iter([reading for seconds in durations for reading in (100.0, 100.0 + seconds)])
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: next(readings)))
