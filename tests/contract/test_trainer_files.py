"""The files by which a trainer is watched: `status.json`, `metrics.ndjson` and the checkpoint manifest."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import metrics_lines, read_status, run_here, settings_for
from trainer.lifecycle.heartbeat import PHASES, StatusFile
from trainer.telemetry.fields import FIELDS, field_paths

NUMBER = (int, float)
OPTIONAL = (int, float, type(None))

STATUS = {
    "v": int,
    "phase": str,
    "phase_since": NUMBER,
    "step": int,
    "total_steps": (int, type(None)),
    "last_progress_at": OPTIONAL,
    "last_checkpoint": (dict, type(None)),
    "message": str,
    "stop": (dict, type(None)),
    "degraded": dict,
}
LINE = {
    "v": int,
    "t": NUMBER,
    "step": int,
    "tokens": int,
    "train": {
        "loss": OPTIONAL,
        "lr": OPTIONAL,
        "noise_sigma": OPTIONAL,
        "tok_s": OPTIONAL,
        "eal": OPTIONAL,
        "skipped": int,
    },
    "queue": {
        "feed": int,
        "hs": int,
        "min_ready": int,
        "max_depth": int,
        "bytes": int,
        "buckets": [{"upto": int, "depth": int}],
        "put_blocked_s": NUMBER,
        "get_blocked_s": NUMBER,
        "starved_ratio": NUMBER,
        "full_ratio": NUMBER,
    },
    "profile": {"target": {"forward_ms": OPTIONAL}, "drafter": {"forward_ms": OPTIONAL}},
    "workers": [{"name": str, "tokens": int, "busy_ratio": NUMBER}],
    "batch": {"padding_ratio": OPTIONAL, "bucket_entropy": OPTIONAL},
    "gpu": [
        {
            "index": int,
            "uuid": (str, type(None)),
            "util_ratio": OPTIONAL,
            "mem_used_bytes": OPTIONAL,
            "power_w": OPTIONAL,
            "temp_c": OPTIONAL,
            "reason": (str, type(None)),
        }
    ],
    "cuda": [{"index": int, "allocated_bytes": int, "reserved_bytes": int, "alloc_retries": int}],
}


def faults(value: Any, shape: Any, path: str = "") -> list[str]:
    """What of `shape` the value lacks or has in another type; further keys are allowed."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{path}: not an object"]
        return [
            fault
            for key, part in shape.items()
            for fault in (
                faults(value[key], part, f"{path}.{key}") if key in value else [f"{path}.{key}: missing"]
            )
        ]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{path}: not a list"]
        return [fault for n, part in enumerate(value) for fault in faults(part, shape[0], f"{path}[{n}]")]
    wrong = not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool)
    return [f"{path}: {type(value).__name__}"] if wrong else []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    target, data = tiny_target(folder), write_tiny_corpus(folder / "data")
    phases: list[str] = []
    real = StatusFile.set_phase

    def spy(self, phase, message=""):
        phases.append(phase)
        real(self, phase, message)

    StatusFile.set_phase = spy
    try:
        code = run_here(
            settings_for(
                target, data, folder / "out", checkpoint__every=6, telemetry__profile_interval_s=0.3
            ),
            DFLASH_RUN_DIR=str(folder / "attempt"),
        )
    finally:
        StatusFile.set_phase = real
    assert code == 0
    return folder, phases


ONLY_SOMETIMES = ("nonfinite/*", "reasons/*", "eval/*", "gpu/*", "cuda/*")
"""What a line of a short run on a machine without a GPU need not have."""


def test_every_documented_metric_is_written_and_nothing_else(run):
    folder, _ = run

    seen = {path for line in metrics_lines(folder / "attempt") for path in field_paths(line)}

    documented = {field.path for field in FIELDS}
    assert seen - documented == set(), "describe it in trainer/telemetry/fields.py"
    missing = {
        path for path in documented - seen if not path.startswith(tuple(p[:-1] for p in ONLY_SOMETIMES))
    }
    assert missing == set(), "documented, but no line has it"


def test_a_line_knows_every_worker_of_several_targets_and_drafters(tmp_path):
    target, data = tiny_target(tmp_path), write_tiny_corpus(tmp_path / "data")
    settings = settings_for(
        target, data, tmp_path / "out", devices__target_gpus="cpu,cpu", devices__drafter_gpus="cpu,cpu"
    )

    assert run_here(settings, DFLASH_RUN_DIR=str(tmp_path / "attempt")) == 0

    lines = metrics_lines(tmp_path / "attempt")
    names = ["target-cpu0", "target-cpu1", "drafter-cpu0", "drafter-cpu1"]
    assert [worker["name"] for worker in lines[-1]["workers"]] == names
    assert set(lines[-1]["profile"]) == {"target", "drafter", "checkpoint", *names}
    assert lines[-1]["profile"]["drafter-cpu1"]["all_reduce_ms"] > 0
    assert sum(worker["batches"] for worker in lines[-1]["workers"][2:]) == 18
    assert max(line["batch"]["packs"] for line in lines if "packs" in line["batch"]) >= 4
    assert {path for line in lines for path in field_paths(line)} <= {field.path for field in FIELDS}


def test_an_empty_group_says_why(run):
    folder, _ = run

    for line in metrics_lines(folder / "attempt"):
        for group in ("gpu", "cuda"):
            assert line[group] or line["reasons"][group]


def test_checker_finds_what_is_missing_or_of_another_type():
    assert faults({"a": 1}, {"a": int}) == []
    assert faults({}, {"a": int}) == [".a: missing"]
    assert faults({"a": True}, {"a": int}) == [".a: bool"]
    assert faults({"a": [{"b": "x"}]}, {"a": [{"b": int}]}) == [".a[0].b: str"]


def test_status_record_has_every_field_of_the_contract(run):
    status = read_status(run[0] / "attempt")

    assert faults(status, STATUS) == []
    assert status["phase"] in PHASES
    assert faults(status["last_checkpoint"], {"step": int, "path": str, "saved_at": NUMBER}) == []


def test_phases_come_in_order_and_under_their_names(run):
    seen = [phase for n, phase in enumerate(run[1]) if n == 0 or phase != run[1][n - 1]]

    assert seen == [
        "loading",
        "filling",
        "training",
        "checkpointing",
        "training",
        "checkpointing",
        "training",
        "checkpointing",
        "training",
        "done",
    ]


def test_every_metrics_line_has_every_field_of_the_contract(run):
    lines = metrics_lines(run[0] / "attempt")

    assert len(lines) >= 9
    for line in lines:
        assert faults(line, LINE) == []


def test_metrics_lines_are_in_order_of_time_and_step(run):
    lines = metrics_lines(run[0] / "attempt")

    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


def test_bucket_depths_sum_to_the_queue_depth(run):
    for line in metrics_lines(run[0] / "attempt"):
        queue = line["queue"]
        assert sum(bucket["depth"] for bucket in queue["buckets"]) == queue["hs"]
        assert queue["hs"] <= queue["max_depth"]


def test_checkpoint_manifest_lists_every_other_file_with_size_and_digest(run):
    for kind in ("state", "export"):
        folder = run[0] / "out" / "lineage-0000" / kind / "step-00000018"
        manifest = json.loads((folder / "manifest.json").read_text())

        assert manifest["v"] == 1
        assert manifest["step"] == 18
        others = sorted(entry.name for entry in folder.iterdir() if entry.name != "manifest.json")
        assert sorted(manifest["files"]) == others
        for name, entry in manifest["files"].items():
            assert entry["size"] == (folder / name).stat().st_size
            assert len(entry["sha256"]) == 64


def test_status_is_replaced_whole(run):
    names = {entry.name for entry in (run[0] / "attempt").iterdir()}

    assert names == {"config.json", "control", "metrics.ndjson", "startup.json", "status.json"}


@pytest.mark.parametrize("command", ["train", "prepare", "generate", "eval", "export"])
def test_help_and_wrong_flags_need_no_torch(command):
    program = (
        "import sys; from trainer.__main__ import main\n"
        "try: main([sys.argv[1], '--help'])\n"
        "except SystemExit: pass\n"
        "code = main([sys.argv[1], '--no-such-flag'])\n"
        "sys.exit(code if 'torch' not in sys.modules and 'pyarrow' not in sys.modules else 99)"
    )

    result = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True)

    assert result.returncode == 2, result.stderr
    assert "usage: dflash-train" in result.stdout
    assert f"ConfigError: dflash-train {command}: " in result.stdout + result.stderr
