"""The daemon's clock: close to the wall, and deaf to jumps of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from supervisor import clock as module
from supervisor.clock import SystemClock


class Jumped(datetime):
    """A wall clock that somebody set."""

    by = timedelta()

    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime.now(UTC) + cls.by


def test_time_is_that_of_the_wall_and_goes_on() -> None:
    clock = SystemClock()
    first, second = clock.now(), clock.now()
    assert first.tzinfo is UTC
    assert first <= second
    assert abs(first - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("days", [365, -365], ids=["ahead", "back"])
def test_a_wall_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    clock = SystemClock()
    before = clock.now()
    monkeypatch.setattr(module, "datetime", Jumped)
    monkeypatch.setattr(Jumped, "by", timedelta(days=days))

    assert timedelta() <= clock.now() - before < timedelta(days=1)
    assert abs(SystemClock().now() - before) > timedelta(days=300), "a new daemon reads the wall anew"


def test_pauses_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    before = clock.now()
    since = module._since_boot_s()
    monkeypatch.setattr(module, "_since_boot_s", lambda: since + 3600)
    assert clock.now() - before >= timedelta(seconds=3500)
