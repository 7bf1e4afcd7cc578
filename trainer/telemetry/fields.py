"""Every field of a metrics line: its path, unit, kind and meaning.

Read by the reference page (`docs.generate` calls `render_reference`) and by the test that holds it against
real lines: what is written is listed here, and what is listed is written. Pure data; whoever adds a field to
a line adds it here. Must not import anything heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.telemetry.metrics import DRAFTER_STAGES, TARGET_STAGES

KINDS: Mapping[str, str] = {
    "now": "as it is when the line is written",
    "interval": "over the interval since the line before of the same source",
    "total": "since the run began (a resumed run goes on counting)",
    "process": "since this process began",
    "fact": "does not change while the process runs",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field; `*` in the path stands for a name or a place in a list."""

    path: str
    unit: str
    kind: str
    meaning: str

    @property
    def group(self) -> str:
        """First part of the path."""
        return self.path.split("/", 1)[0]


_TOP = (
    Field("v", "", "fact", "version of the line's format"),
    Field("t", "s", "now", "time of the line, Unix time"),
    Field("step", "steps", "total", "optimizer steps done"),
    Field("tokens", "tokens", "total", "tokens of the packs trained on, padding not counted"),
    Field("nonfinite/*", "text", "now", "paths whose value was not finite; there they are null"),
    Field("reasons/*", "text", "now", "why a group of the line is empty"),
)

_TRAIN = (
    Field(
        "train/loss",
        "nats",
        "interval",
        "loss over all supervised block positions: weighted mean, or with D-PACE weighted sum per block",
    ),
    Field("train/eal", "tokens", "interval", "expected acceptance length, bonus token included"),
    Field(
        "train/accuracy/*", "ratio", "interval", "share of right top predictions at this offset of a block"
    ),
    Field("train/lr", "1", "now", "learning rate of the last step"),
    Field("train/noise_sigma", "1", "now", "amplitude of the noise on hidden states at the last step"),
    Field("train/skipped", "steps", "total", "steps skipped for a loss or gradient that was not finite"),
    Field("train/tok_s", "tokens/s", "interval", "throughput of the interval"),
    Field("train/tok_s_ema", "tokens/s", "now", "the same, smoothed (0.8 old, 0.2 new)"),
    Field("train/epoch", "epochs", "total", "packs consumed over packs in an epoch"),
    Field("train/plan_epoch", "epochs", "now", "epoch of the latest pack, from 0"),
    Field("train/total_steps", "steps", "fact", "steps that the plan holds"),
)

_QUEUE = (
    Field("queue/feed", "batches", "now", "batches planned and waiting for a target worker"),
    Field("queue/hs", "packs", "now", "packs of hidden states that wait for a drafter"),
    Field("queue/min_ready", "packs", "now", "packs that must wait before a drafter may pull"),
    Field("queue/max_depth", "packs", "fact", "packs that may wait at most"),
    Field("queue/hs_per_max_ratio", "ratio", "now", "hs over max_depth; near 1 the drafters are slower"),
    Field("queue/hs_per_min_ready_ratio", "ratio", "now", "hs over min_ready; below 1 the drafters wait"),
    Field("queue/bytes", "bytes", "now", "hidden states that wait"),
    Field("queue/buckets/*/upto", "tokens", "fact", "longest sample of this length bucket"),
    Field("queue/buckets/*/depth", "packs", "now", "packs of this bucket that wait"),
    Field("queue/put_blocked_s", "s", "process", "time target workers waited for room, all together"),
    Field("queue/get_blocked_s", "s", "process", "time drafter workers waited for packs, all together"),
    Field("queue/starved_ratio", "ratio", "process", "share of the time in which drafters waited"),
    Field("queue/full_ratio", "ratio", "process", "share of the time in which targets waited"),
)

_STAGE_MEANINGS: Mapping[str, str] = {
    "wait_input": "waiting for a batch",
    "forward": "forward pass",
    "pack": "gathering valid rows into the slot",
    "d2h": "copy from device to host",
    "put": "waiting for room in the queue of hidden states",
    "wait_hidden_states": "waiting for a pack",
    "h2d": "copy from host to device",
    "loss": "head, loss and the gradient of its input, in chunks",
    "backward": "backward pass and adding up of gradients",
    "all_reduce": "summing gradients over drafters; null with a single one",
    "optimizer": "clipping, AdamW, copy to the forward's weights",
}

_PROFILE = (
    *(
        Field(f"profile/*/{stage}_ms", "ms", "interval", f"mean: {_STAGE_MEANINGS[stage]}")
        for stage in dict.fromkeys((*TARGET_STAGES, *DRAFTER_STAGES))
    ),
    Field("profile/*/reason", "text", "now", "why a stage is null"),
    Field("profile/*/copy_ms", "ms", "now", "`checkpoint`: copying the state of the latest save"),
    Field("profile/*/write_ms", "ms", "now", "`checkpoint`: writing it, in the background"),
    Field("profile/*/failed", "times", "process", "`checkpoint`: saves that failed"),
)

_WORKERS = (
    Field("workers/*/name", "text", "fact", "name of the worker and of its thread"),
    Field("workers/*/batches", "packs", "process", "packs done"),
    Field("workers/*/tokens", "tokens", "process", "tokens done"),
    Field("workers/*/busy_ratio", "ratio", "interval", "share of the time in which it worked"),
    Field("workers/*/balance_ratio", "ratio", "process", "tokens of its kind: the most over the least"),
    Field("workers/*/reason", "text", "now", "why the balance is null"),
)

_BATCH = (
    Field("batch/sequences", "samples", "process", "samples that target workers took"),
    Field("batch/padding_ratio", "ratio", "process", "padding in the target's batches"),
    Field(
        "batch/budget_fill_ratio", "ratio", "process", "padded tokens of a batch over the token budget, mean"
    ),
    Field("batch/bucket_entropy", "nats", "process", "entropy of how batches spread over the buckets"),
    Field("batch/bucket_batches/*", "batches", "process", "batches of this bucket, shortest first"),
    Field("batch/packs", "packs", "interval", "packs trained on"),
    Field("batch/valid_tokens", "tokens", "interval", "tokens of these packs"),
    Field("batch/supervised_tokens", "tokens", "interval", "tokens of these packs that are training targets"),
    Field("batch/supervised_rows", "rows", "interval", "block positions that carried weight"),
    Field("batch/blocks", "blocks", "interval", "anchors drawn"),
    Field("batch/anchor_fill_ratio", "ratio", "interval", "anchors drawn over `loss.max_anchors`"),
)

_GPU = (
    Field("gpu/*/index", "", "fact", "number of the card in NVML, which ignores CUDA_VISIBLE_DEVICES"),
    Field("gpu/*/uuid", "text", "fact", "identity of the card"),
    Field(
        "gpu/*/cuda_index", "", "fact", "torch's number of the card, null when this process does not use it"
    ),
    Field("gpu/*/util_ratio", "ratio", "now", "share of the time in which a kernel ran"),
    Field("gpu/*/mem_used_bytes", "bytes", "now", "memory in use by all processes"),
    Field("gpu/*/mem_total_bytes", "bytes", "fact", "memory of the card"),
    Field("gpu/*/mem_reserved_bytes", "bytes", "now", "memory kept by the driver, not part of used"),
    Field("gpu/*/power_w", "W", "now", "power draw"),
    Field("gpu/*/temp_c", "°C", "now", "temperature"),
    Field("gpu/*/sm_clock_mhz", "MHz", "now", "clock of the processors"),
    Field("gpu/*/mem_clock_mhz", "MHz", "now", "clock of the memory"),
    Field("gpu/*/throttle_reasons", "bits", "now", "what holds the clocks down, NVML's bits"),
    Field("gpu/*/throttle", "text", "now", "the same in names joined by `|`, or none"),
    Field("gpu/*/reason", "text", "now", "why a field is null"),
)

_CUDA = (
    Field("cuda/*/index", "", "fact", "torch's number of the device"),
    Field("cuda/*/uuid", "text", "fact", "identity of the card, to find it in `gpu`"),
    Field("cuda/*/allocated_bytes", "bytes", "now", "memory of live tensors"),
    Field("cuda/*/reserved_bytes", "bytes", "now", "memory that the allocator holds"),
    Field("cuda/*/fragmentation_bytes", "bytes", "now", "reserved less allocated"),
    Field("cuda/*/peak_bytes", "bytes", "process", "most memory of live tensors at one time"),
    Field("cuda/*/alloc_retries", "times", "process", "allocations that had to empty the cache first"),
    Field("cuda/*/ooms", "times", "process", "allocations that failed"),
)

_TELEMETRY = (
    Field("telemetry/reports_dropped", "lines", "process", "interval reports that found the reporter behind"),
    Field(
        "telemetry/lines_failed", "lines", "process", "lines lost to an error, whose traceback is in the log"
    ),
    Field("telemetry/jsonl_lost", "lines", "process", "lines that `metrics.ndjson` did not take"),
    Field(
        "telemetry/wandb_dropped", "lines", "process", "lines that W&B was too slow for; null when it is off"
    ),
)

_EVAL = (
    Field("eval/step", "steps", "now", "optimizer step whose weights were evaluated"),
    Field("eval/seconds", "s", "now", "how long the evaluation took"),
    Field(
        "eval/acceptance_length",
        "tokens",
        "now",
        "mean over prompts of each prompt's mean tokens per verify, bonus token included, greedy",
    ),
    Field(
        "eval/per_offset/*", "ratio", "now", "share of verifies whose drafts up to this offset were accepted"
    ),
    Field("eval/prompts", "prompts", "now", "prompts with at least one verify"),
    Field("eval/verifies", "verifies", "now", "blocks that the target verified"),
    Field("eval/new_tokens", "tokens", "now", "tokens that the prompts got"),
    Field("eval/tokens_s", "tokens/s", "now", "these by the time of decoding, prefill included"),
    Field("eval/held_out_eal", "tokens", "now", "expected acceptance length on the held-out samples"),
    Field("eval/held_out_eal_blocks", "blocks", "now", "complete blocks that it was counted on"),
    Field("eval/held_out_eal_per_offset/*", "ratio", "now", "share of these right up to this offset"),
    Field(
        "eval/output_eal", "tokens", "now", "expected acceptance length of the very blocks that were decoded"
    ),
    Field("eval/output_eal_blocks", "blocks", "now", "complete blocks that it was counted on"),
    Field("eval/output_eal_per_offset/*", "ratio", "now", "share of these right up to this offset"),
    Field("eval/eal", "tokens", "now", "the one that reality is compared with: held out where known"),
    Field(
        "eval/gap",
        "ratio",
        "now",
        "(expected - real) / expected, the real one as mean over verifies; null with too few blocks",
    ),
    Field("eval/alarm", "text", "now", "what is wrong when the gap is above `eval.alarm_gap`, else null"),
)

FIELDS: tuple[Field, ...] = (
    *_TOP,
    *_TRAIN,
    *_QUEUE,
    *_PROFILE,
    *_WORKERS,
    *_BATCH,
    *_GPU,
    *_CUDA,
    *_TELEMETRY,
    *_EVAL,
)

_NAMED = (
    "profile",
    "train/accuracy",
    "reasons",
    "eval/per_offset",
    "eval/held_out_eal_per_offset",
    "eval/output_eal_per_offset",
)
"""Paths whose keys are names rather than fields."""


def field_paths(line: Mapping[str, Any]) -> set[str]:
    """Return the documented form of every path of a line: names and list places become `*`."""
    return {path for key, value in line.items() for path in _paths(key, value)}


def _paths(path: str, node: Any) -> Iterator[str]:
    if not isinstance(node, Mapping | list | tuple):
        yield path
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _paths(f"{path}/*" if path in _NAMED else f"{path}/{key}", value)
    else:
        for value in node:
            yield from _paths(f"{path}/*", value)


_GROUPS: Mapping[str, str] = {
    "train": "What is learnt, and how fast. Null until the first interval ends.",
    "queue": "Between target and drafter workers.",
    "profile": "Where the time goes: `target` and `drafter` are means over their workers, and each worker "
    "stands under its name (`target-gpu0`). Device stages are timed by events that are read an interval "
    "later, so timing never makes a step wait. A stage that did not run keeps its last mean.",
    "workers": "One entry per worker.",
    "batch": "What the batches were made of.",
    "gpu": "One entry per card of the machine, by NVML; empty with a reason where NVML is off.",
    "cuda": "The allocator's figures of the devices in use; empty on the CPU.",
    "telemetry": "What telemetry itself lost.",
    "eval": "The latest evaluation, only in the line that follows one: speculative decoding against the real "
    "target, and the estimate beside it, both with the weights that an export would hold.",
}


def render_reference() -> str:
    """Return the reference page of all metrics, `docs/reference/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Every field of a line of `metrics.ndjson`. A line is written every `telemetry.log_every` optimizer",
        "steps, and by the clock every `telemetry.profile_interval_s` seconds (`DFLASH_PROFILE_INTERVAL`).",
        "W&B gets the numbers of the same line under the same paths; an entry of a list goes by its `name`",
        "or `index`, else by its place. Ratios run from 0 to 1 where nothing else is said. What is not known",
        "is null, with the reason beside it; it is never 0. Generated from `trainer/telemetry/fields.py`.",
        "",
        "| kind | means |",
        "|---|---|",
        *(f"| {kind} | {text} |" for kind, text in KINDS.items()),
    ]
    for group, fields in _by_group().items():
        lines += ["", f"## {group or 'The line itself'}", ""]
        if group in _GROUPS:
            lines += [_GROUPS[group], ""]
        lines += ["| field | unit | kind | meaning |", "|---|---|---|---|"]
        lines += [f"| `{f.path}` | {f.unit} | {f.kind} | {f.meaning} |" for f in fields]
    return "\n".join(lines) + "\n"


def _by_group() -> dict[str, list[Field]]:
    groups: dict[str, list[Field]] = {}
    for field in FIELDS:
        groups.setdefault("" if field in _TOP else field.group, []).append(field)
    return groups
