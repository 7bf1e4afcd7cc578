"""Renders docs/reference/run-file.md from the models that read run files.

Called by `docs.generate` and by the test that compares page and models. Types, ranges and defaults come from
`supervisor.domain`; only the meanings stand here, and a key without one, or a meaning without its key, ends
the rendering. Must not import the daemon.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from supervisor.domain.layout import LOG_FIELDS
from supervisor.domain.policy import MAX_REGEX, MAX_SECONDS, RestartRule
from supervisor.domain.spec import RunSpec, StageCopy

EXAMPLE = """\
name = "slammed"
node = "ct200"
secrets = ["WANDB_API_KEY"]
source = "bundled"

[environment]
lock = "bundled"

[stage]
copy = [{ from = "/models/Qwen3-8B", to = "/dev/shm/Qwen3-8B" }]

[gpus]
indices = [0, 5]
share = false

[command]
args = ["--target-model", "/dev/shm/Qwen3-8B", "--data-dir", "/workspace/tokenized_completions",
        "--output-dir", "/workspace/checkpoints", "--target-gpus", "0", "--drafter-gpus", "5"]

[env]
DFLASH_PROFILE_INTERVAL = "60"

[capabilities]
nvml = "required"
wandb = "wanted"
flash_linear_attention = "wanted"
kernels = "wanted"
gpu_direct = "off"

[log]
pattern = "{log_dir}/train_{name}{attempt}.log"
warn_bytes = 10_000_000_000
min_free_bytes = 5_000_000_000
action = "stop_at_checkpoint"

[resume]
from = "latest"

[restart]
policy = "on-failure"
rules = [{ exit_codes = [7], phase = "loading", action = "fail" },
         { reason = "ReadyTimeout", action = "hold" },
         { signal = 11, action = "restart_uncounted" },
         { log_pattern = "NCCL.*unhandled", action = "restart" }]
success_exit_codes = [0]
base_s = 10
factor = 2
cap_s = 300
healthy_s = 600
burst = 5
interval_s = 3600
max_restarts = 20
no_progress = 3
uncounted_per_day = 10

[drift]
release = "notify"
capability = "at_next_checkpoint"
critical = "notify"
minor = "when_cheap"
debounce_s = 60
min_interval_s = 21600
auto_revert = true

[health]
ready_timeout_s = 1800
ready_regex = ""
progress_regex = ""
liveness = { period_s = 5, timeout_s = 10, failure_threshold = 1, success_threshold = 1 }
readiness = { period_s = 5, timeout_s = 10, failure_threshold = 1, success_threshold = 1 }

[health.progress]
factor = 5
floor_s = 60
action = "restart"
period_s = 5
timeout_s = 5
failure_threshold = 1
success_threshold = 1

[health.quality]
nan = "hold"
throughput_drop = 0.3
action = "log_only"
period_s = 5
timeout_s = 5
failure_threshold = 3
success_threshold = 1

[stop]
signal = "SIGTERM"
grace_s = 120
extend_max_s = 900
term_s = 30
kill_s = 10
verify_s = 60
gpu_wait_s = 50
gpu_free_bytes = 536_870_912
orphan_after_s = 0
"""

PROGRAM = """\
name = "old-kind"
node = "ct200"
source = "none"

[environment]
python = "/root/venv/bin/python"

[command]
argv = ["/root/run.sh"]

[health]
ready_regex = "^step 1 "
progress_regex = "^step ([0-9]+) "
"""

_OF_PROBES = {
    "period_s": "Look at least this often; looks closer together count as one. The shortest period of the "
    "four probes holds for all, and none is longer than 5 s",
    "timeout_s": "Time for the node to answer one look",
    "failure_threshold": "Bad looks in a row before the answer turns",
    "success_threshold": "Good looks in a row before it turns back",
}
"""What every probe takes; one that means something else by a key says so in `MEANINGS`."""

_NOTHING_ASKED = "Nothing is asked of the node here: counts in the longest time until a failure shows only"

MEANINGS: Mapping[str, str] = {
    "name": "Name of the run: lower case, digits, dot, dash, underscore, at most 64. A run keeps it",
    "node": "Node on which it runs; `dflashctl node add` made it",
    "secrets": "Names of secrets that become environment variables of the process; the values never "
    "stand here",
    "source": "`bundled`, the path of a trainer folder (relative to the file), or `none` for a program "
    "that is "
    "on the node already. A launch on a release of another source is warned of",
    "environment.lock": "`bundled`, or the path of a hashed lock. Says what the run is meant for; which "
    "lock a "
    "node gets is what `dflashctl node deploy --lock` names. Not together with `python`",
    "environment.python": "Absolute path of an external interpreter in the node; it is probed and "
    "watched for "
    "drift, never written to. Not together with `lock`",
    "stage.copy": "Files or folders to copy inside the node before a launch, unless the target is there",
    "stage.copy[].from": "What is copied; absolute path in the node",
    "stage.copy[].to": "Where to; written under another name first, then renamed",
    "gpus.indices": "GPUs that the run locks; empty = those of `--target-gpus` and `--drafter-gpus`",
    "gpus.share": "true: a GPU may be used by another run that says so too",
    "command.args": "Flags of the bundled trainer ([settings](trainer-settings.md)). One of `args` and "
    "`argv`",
    "command.argv": "Any program: absolute path and arguments; there is no shell. Needed with `source = "
    "none`",
    "env": "Environment variables. Not `PATH`, `BASH_ENV`, `ENV`, `IFS`, `LD_…`, `PYTHON…`, nor "
    "`DFLASH_RUN_DIR` and `DFLASH_RUN_TOKEN`; a number becomes text",
    "capabilities.nvml": "GPU telemetry (package `nvidia-ml-py`)",
    "capabilities.wandb": "W&B package",
    "capabilities.flash_linear_attention": "Fast kernels of linear-attention targets (package "
    "`flash-linear-attention`)",
    "capabilities.kernels": "Compiled kernels (package `liger-kernel`); probed, not used by the trainer yet",
    "capabilities.gpu_direct": "CUDA build of torch with a visible GPU; the trainer stages through host "
    "memory whatever this says",
    "log.pattern": "Path of an attempt's log; placeholders "
    + ", ".join(f"`{{{name}}}`" for name in LOG_FIELDS)
    + "; must hold `{attempt}` and be absolute or begin with `{log_dir}/` or `{root}/`. A number whose file "
    "exists is skipped, with an event",
    "log.warn_bytes": "A log above this size turns `DiskOK` false; nothing is ever cut",
    "log.min_free_bytes": "Less free space beside the log turns `DiskOK` false; a launch is refused",
    "log.action": "What `DiskOK` = false does",
    "resume.from": "`latest`, `scratch` (a new lineage beside the old one) or the absolute path of a "
    "checkpoint",
    "restart.policy": "Whether an ended attempt is followed by another one: on failure, also after a "
    "success, or not",
    "restart.rules": "Tried in order before the defaults; all matchers that a rule gives must match",
    "restart.rules[].reason": "A [reason](states.md#reasons) by name",
    "restart.rules[].exit_codes": "Any of these exit codes",
    "restart.rules[].signal": "The signal that ended it",
    "restart.rules[].log_pattern": "Found in one of the last 200 lines of the log",
    "restart.rules[].phase": "The trainer's last phase",
    "restart.rules[].action": "Restart and count it, restart without counting, end as failed, or hold",
    "restart.success_exit_codes": "Exit codes that mean success",
    "restart.base_s": "Delay after the first counted failure",
    "restart.factor": "Growth of the delay with each further one",
    "restart.cap_s": "Longest delay, before a spread of a fifth to either side; not below `base_s`",
    "restart.healthy_s": "An attempt that has trained this long, with progress, forgets failures and proves "
    "its release and environment good",
    "restart.burst": "More counted failures than this within `interval_s` hold the run (`CrashLoop`)",
    "restart.interval_s": "Sliding window of `burst`; the delays must fit into it, else the file is refused",
    "restart.max_restarts": "Counted restarts since the last start by an operator; then held "
    "(`BudgetExhausted`)",
    "restart.no_progress": "Ends in a row without a newer checkpoint, or with the same cause, that hold "
    "the run",
    "restart.uncounted_per_day": "Restarts that are no failures (drift, reboots) within 24 hours before "
    "a hold",
    "drift.release": "When the trainer's source or lock was deployed anew",
    "drift.capability": "When a package changed that a declared capability depends on",
    "drift.critical": "When torch, CUDA, NCCL, triton, the driver or Python changed",
    "drift.minor": "When any other package changed",
    "drift.debounce_s": "Wait this long after a change: more may follow",
    "drift.min_interval_s": "At most one restart by drift in this time",
    "drift.auto_revert": "A new pair that fails before it proved good: once back to the last good pair, "
    "then hold",
    "health.ready_timeout_s": "Not training after this long: stopped, failed with `ReadyTimeout`",
    "health.ready_regex": "For programs: a log line that says that the work has begun; without it, a "
    "program's first output does",
    "health.progress_regex": "For programs: a log line with the step in its first group",
    "health.progress.factor": "The step may stand still for this many times the longest normal interval",
    "health.progress.floor_s": "The limit is never below this",
    "health.progress.action": "What a stall does beyond the condition `Progressing`",
    "health.quality.nan": "What a reported NaN or infinity does; the trainer's own exit 5 is held "
    "whatever this says",
    "health.quality.throughput_drop": "Drop of tokens/s against the running mean that counts as bad",
    "health.quality.action": "What a lasting drop does",
    "health.liveness.failure_threshold": "Absences in a row that end the attempt; each is proof by identity",
    "health.readiness.failure_threshold": "Looks in a row beyond `ready_timeout_s`",
    "health.progress.timeout_s": _NOTHING_ASKED,
    "health.quality.timeout_s": _NOTHING_ASKED,
    "health.quality.failure_threshold": "Low samples in a row before it counts; a NaN counts at once",
    "stop.signal": "Goes to the main process together with `control/stop.json`",
    "stop.grace_s": "Time to finish the step and save",
    "stop.extend_max_s": "Most that the trainer may have in all by asking for more",
    "stop.term_s": "Time after SIGTERM",
    "stop.kill_s": "SIGKILL to all that is the attempt's is repeated for so long",
    "stop.verify_s": "Time for its absence to be verified; what is left then is quarantined",
    "stop.gpu_wait_s": "Time for GPU memory to be released before the run is held (`GpuNotReleased`)",
    "stop.gpu_free_bytes": "A GPU with at most this much in use counts as released",
    "stop.orphan_after_s": "Above 0: the shim stops the trainer after so long without contact",
}
"""What each key means; what all probes share has its text in `_OF_PROBES`."""

_HEAD = """# Run file

A run is one TOML file; `dflashctl run FILE` stores it as a new generation of the run and starts it.
Only `name`, `node` and `[command]` are needed. An unknown key, a wrong type or a value out of range is an
error that names file, line and field, and the nearest key. Durations are seconds, sizes bytes.
Regular expressions have at most {regex} characters and no repetition inside a repeated group.

This page is written by `make docs` from the models that read the file; a test compares the two.
"""


def render_run_file_page() -> str:
    """Return docs/reference/run-file.md."""
    found = dict(iter_keys(RunSpec))
    unknown = set(MEANINGS) - set(found)
    if unknown:
        raise KeyError(f"meanings of keys that do not exist: {sorted(unknown)}")
    lines = [_HEAD.format(regex=MAX_REGEX)]
    table = None
    for path, field in found.items():
        here = path.partition(".")[0] if "." in path else ""
        if here != table:
            table = here
            lines += ["", f"## [{here}]" if here else "## Top of the file", ""]
            lines += ["| key | type and range | default | meaning |", "|---|---|---|---|"]
        key = path.removeprefix(f"{here}.")
        lines.append(f"| `{key}` | {_type_of(field)} | {_default_of(field)} | {_meaning(path)} |")
    lines += ["", "## A complete file", "", f"```toml\n{EXAMPLE}```", ""]
    lines += ["## A program of the old kind", "", f"```toml\n{PROGRAM}```", ""]
    lines.append(
        "The trainer of this version takes one target device and one drafter device; others are refused at "
        "its start\n(exit code 2)."
    )
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def iter_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All keys of a table and of the tables in it, by dotted path; list items as `name[]`."""
    simple = {name: field for name, field in model.model_fields.items() if _table_of(field) is None}
    for name, field in [
        *simple.items(),
        *(item for item in model.model_fields.items() if item[0] not in simple),
    ]:
        path = f"{prefix}{field.alias or name}"
        inner = _table_of(field)
        if inner is None:
            yield path, field
        elif inner in (StageCopy, RestartRule):
            yield path, field
            yield from iter_keys(inner, f"{path}[].")
        else:
            yield from iter_keys(inner, f"{path}.")


def _meaning(path: str) -> str:
    if path in MEANINGS:
        return MEANINGS[path]
    if path.startswith("health.") and path.rpartition(".")[2] in _OF_PROBES:
        return _OF_PROBES[path.rpartition(".")[2]]
    raise KeyError(f"key of the run file without a meaning: {path}")


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a table or of the items of a list of tables."""
    candidates = [field.annotation, *typing.get_args(field.annotation)]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _type_of(field: FieldInfo) -> str:
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = arguments[1]
        return _describe(arguments[0], inner.metadata if isinstance(inner, FieldInfo) else [])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        kept = [item for item in arguments if item is not types.NoneType]
        return _describe(kept[0], metadata)
    if origin is tuple:
        few = ", not empty," if any(hasattr(item, "min_length") for item in metadata) else ""
        return f"list{few} of {_describe(arguments[0], [])}"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if isinstance(annotation, type) and annotation in names:
        return names[annotation] + _range_of(metadata)
    return "table" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else "table of texts"


def _range_of(metadata: list[Any]) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{words[name]} {_bound(getattr(item, name))}"
        for item in metadata
        for name in words
        if getattr(item, name, None) is not None
    ]
    return f", {', '.join(limits)}" if limits else ""


def _bound(value: float) -> str:
    known = {MAX_SECONDS: "366 days", 1 << 60: "2^60"}
    return known.get(int(value)) or f"{value:,}"


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{json.dumps(value)}`"
