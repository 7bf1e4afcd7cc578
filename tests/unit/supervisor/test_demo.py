"""What the demo prints and writes by itself; the commands that it runs have tests of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.commands.demo import (
    LATE_PACKAGE,
    DemoError,
    Pace,
    Places,
    progress_line,
    render_run,
    speed_line,
    without_package,
)
from supervisor.domain.spec import parse_run_file

LOCK = f"numpy==2.0 \\\n    --hash=sha256:aa\n{LATE_PACKAGE}==13 \\\n    --hash=sha256:bb\nwandb==0.29\n"


def block(size: int, speedup: float | None) -> dict[str, object]:
    slow = 30.0 if speedup else None
    speed = {"speedup": speedup, "plain_ms_per_token": slow}
    return {"block_size": size, "speed": {**speed, "speculative_ms_per_token": slow and slow / speedup}}


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (
            [block(4, 1.2), block(3, 1.25)],
            "decoding: 30.0 ms a token without the drafter, 24.0 with it in blocks of 3: 1.25 x as fast",
        ),
        (
            [block(4, 0.5)],
            "decoding: 30.0 ms a token without the drafter, 60.0 with it in blocks of 4: 0.50 x as fast",
        ),
        ([block(4, None), {"block_size": 3, "speed": None}], "decoding: no speed was measured"),
    ],
    ids=["the faster one", "slower", "not measured"],
)
def test_the_speed_is_told_whichever_way_it_comes_out(blocks: list[object], expected: str) -> None:
    assert speed_line({"block_sizes": blocks}) == expected


def test_a_lock_loses_one_package_with_its_hashes() -> None:
    assert without_package(LOCK, LATE_PACKAGE) == "numpy==2.0 \\\n    --hash=sha256:aa\nwandb==0.29\n"
    with pytest.raises(DemoError, match="does not hold numpy-ml"):
        without_package(LOCK, "numpy-ml")


def test_a_line_about_a_run_shows_unknown_as_a_dash() -> None:
    line = progress_line({"phase": "starting"}, elapsed_s=0.0, left_s=None)

    assert "step –/–  loss –" in line
    assert "time left unknown" in line


def live_run(attempt: int, step: int) -> dict[str, object]:
    return {"phase": "running", "attempt": {"number": attempt, "status": {"step": step, "total_steps": 100}}}


def test_the_time_left_follows_from_the_pace_of_the_present_attempt() -> None:
    pace = Pace()

    assert (pace.elapsed_s(5.0), pace.elapsed_s(65.0)) == (0.0, 60.0)
    assert pace.left_s(live_run(1, 10), 100.0) is None
    assert pace.left_s(live_run(1, 20), 110.0) == 80.0
    assert pace.left_s(live_run(2, 20), 111.0) is None
    assert pace.left_s(live_run(2, 40), 151.0) == 120.0
    shown = progress_line(live_run(2, 40), elapsed_s=125.0, left_s=120.0)
    assert shown.startswith("    2m 5s, about 2m 0s left")


def test_the_run_file_is_one_that_the_supervisor_reads(tmp_path: Path) -> None:
    places = Places(repository=tmp_path / 'a "b"', work=tmp_path / "work", cache=tmp_path / "cache")

    spec = parse_run_file(render_run(places), "demo.toml")

    assert spec.name == "demo"
    assert str(places.target) in spec.command.args
