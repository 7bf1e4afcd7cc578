"""The benchmarks' tables say what was measured; nothing is timed here."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.tables import Figure, Ratio, Table, percentile

MODULES = ("__main__", "adoption", "api", "bed", "deploy", "launch", "tables", "transport")


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 21)]

    assert percentile(values, 0.95) == 19.0
    assert percentile(values, 0.05) == 1.0
    assert percentile([3.0], 0.95) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_second_column_is_the_bad_side() -> None:
    assert Figure("start", "ms", [1.0, 2.0, 9.0]).p95 == 9.0
    assert Figure("upload", "MB/s", [1.0, 2.0, 9.0]).p95 == 1.0


def test_a_table_prints_figures_then_ratios_with_their_bars_then_notes() -> None:
    table = Table(
        "start of a run",
        [Figure("ours", "ms", [150.0, 160.0, 170.0]), Figure("bare", "ms", [90.0])],
        [
            Ratio(name="ours above bare", value=70.0, unit="ms", at_most=150),
            Ratio(name="ours / bare", value=1.78),
            Ratio(name="uploads", value=90.0, unit="MB/s", at_least=100),
        ],
        ["a note"],
    )

    lines = table.render().splitlines()

    assert lines[0] == "start of a run"
    assert lines[1].split() == ["p50", "p95", "unit", "n"]
    assert lines[2].split() == ["ours", "160.00", "170.00", "ms", "3"]
    assert lines[3].split() == ["bare", "90.00", "90.00", "ms", "1"]
    assert lines[4].split()[3:] == ["70.00", "ms", "≤", "150:", "met"]
    assert lines[5].split() == ["ours", "/", "bare", "1.78", "×"]
    assert lines[6].endswith("≥ 100: NOT MET")
    assert lines[7] == "  a note"
