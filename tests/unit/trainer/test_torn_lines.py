"""Metrics lines of which the disk takes only a part: none is left half, none is joined to the next."""

from __future__ import annotations

import json
import logging
import os

from trainer.telemetry.sink import JsonlSink


def test_a_line_that_only_half_fits_is_taken_back_and_counted(tmp_path, monkeypatch, caplog) -> None:
    sink = JsonlSink(tmp_path, max_bytes=4096)
    sink.write({"step": 1})
    real = os.write

    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda handle, data: real(handle, data[: len(data) // 2]))
        with caplog.at_level(logging.ERROR):
            sink.write({"step": 2})
            sink.write({"step": 3})
    sink.write({"step": 4})

    assert [json.loads(line)["step"] for line in sink.path.read_text().splitlines()] == [1, 4]
    assert sink.lost == 2
    assert [record.getMessage().count("No space left on device") for record in caplog.records] == [1]


def test_a_line_that_a_crash_of_the_machine_tore_costs_no_other(tmp_path) -> None:
    (tmp_path / "metrics.ndjson").write_text('{"step": 1}\n{"st')

    JsonlSink(tmp_path, max_bytes=4096).write({"step": 2})

    assert (tmp_path / "metrics.ndjson").read_text().splitlines() == ['{"step": 1}', '{"st', '{"step":2}']
