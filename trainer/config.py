"""The trainer's configuration: frozen dataclasses and their checks.

Owns every default, unit and range. `trainer.flags` builds a `TrainConfig` from flags, environment and TOML;
everything else receives the finished object. Must not import torch or touch a model: a wrong value is refused
before anything expensive happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

MOST_NUMBER = 2**53
"""Of a key without a range of its own: nothing that is counted or measured here comes near."""
PATH_MARGIN = 128
"""Characters below a given folder that its own files need."""
MOST_SECONDS = 31_536_000
"""Of a key in seconds: a year. Beyond some three hundred of them the calls that wait refuse the number."""


def setting(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare one key: its default, what it means (with unit), and the values that can work."""
    return field(default=default, metadata={"doc": doc, "ge": ge, "gt": gt, "le": le, "choices": choices})


def _check_value(where: str, value: Any, meta: Mapping[str, Any]) -> None:
    """Hold one value against its declared range; text is only held against `choices`."""
    if meta["choices"] and value not in meta["choices"]:
        choices = ", ".join(choice or '""' for choice in meta["choices"])
        raise ConfigError(f"{where} must be one of {choices}: {value!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} must be a finite number: {value}")
    if meta["ge"] is not None and value < meta["ge"]:
        raise ConfigError(f"{where} must be at least {meta['ge']}: {_spelled(value)}")
    if meta["gt"] is not None and value <= meta["gt"]:
        raise ConfigError(f"{where} must be above {meta['gt']}: {_spelled(value)}")
    most = meta["le"]
    if most is None:
        most = MOST_SECONDS if where.endswith("_s") else MOST_NUMBER
    if value > most:
        raise ConfigError(f"{where} must be at most {most}: {_spelled(value)}")


def _spelled(value: float) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to write out a whole number of thousands of digits
        return f"a number of {int(value).bit_length()} bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A table of the TOML file; checks the declared ranges of its keys."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_value(f"{_table_of(type(self))}.{item.name}", getattr(self, item.name), item.metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class PathsConfig(Section):
    """Where the run reads and writes."""

    target_model: str = setting("", "folder of the frozen target model (config.json, safetensors, tokenizer)")
    data_dir: str = setting("", "folder or file of tokenized completions (Parquet, Arrow or JSONL)")
    output_dir: str = setting("", "folder for LINEAGE/{state,export}/step-*; created when missing")


DTYPE_CHOICES = ("auto", "fast", "fp32", "bf16")
"""Names of dtypes; `pipeline.devices.pick_dtype` resolves them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesConfig(Section):
    """Which devices run the workers: CUDA indices, or `cpu` (once per worker), separated by commas."""

    target_gpus: str = setting(
        "cpu", "devices of the target workers, one each: CUDA indices such as 0,1, or cpu (cpu,cpu = two)"
    )
    drafter_gpus: str = setting(
        "cpu", "devices of the drafter workers, one replica each: CUDA indices such as 5, or cpu"
    )
    target_dtype: str = setting(
        "auto",
        "dtype of the target: auto = bf16 on CUDA, fp32 on CPU; fast = bf16 wherever it is faster",
        choices=DTYPE_CHOICES,
    )
    drafter_dtype: str = setting(
        "auto",
        "dtype of the drafter's forward: auto = bf16 on CUDA, fp32 on CPU; fast = bf16 wherever it is faster",
        choices=DTYPE_CHOICES,
    )
    cpu_threads: int = setting(
        0, "torch threads of each CPU worker; 0 = cores divided by CPU workers", ge=0, le=4096
    )

    def targets(self) -> tuple[str, ...]:
        """Return the devices of the target workers, as torch names."""
        return parse_devices("--target-gpus", self.target_gpus)

    def drafters(self) -> tuple[str, ...]:
        """Return the devices of the drafter workers, as torch names."""
        return parse_devices("--drafter-gpus", self.drafter_gpus)

    def shared(self) -> tuple[str, ...]:
        """Return the CUDA devices that run a target worker and a drafter worker."""
        drafters = self.drafters()
        return tuple(device for device in self.targets() if device in drafters and device != "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Section):
    """How samples become batches."""

    token_budget: int = setting(49152, "padded tokens in one batch", ge=8, le=16_777_216)
    max_seq_len: int = setting(8192, "longer samples are truncated to this many tokens", ge=4)
    max_batch_size: int = setting(64, "samples in one batch", ge=1, le=65_536)
    bucket_edges: tuple[int, ...] = setting(
        (), "upper lengths of the buckets, ascending; empty = standard edges"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig(Section):
    """The frozen target."""

    mask_token_id: int | None = setting(
        None, "embedding row that marks a drafted position; none = chosen by rule", ge=0
    )
    target_layer_ids: tuple[int, ...] = setting((), "tapped decoder layers, 0-based; empty = spread evenly")
    attention: str = setting("sdpa", "attention of the target", choices=("sdpa", "eager"))
    fast_kernels: str = setting(
        "wanted",
        "kernels that the target's layers could use on CUDA (linear attention, fused attention): whether a "
        "missing one is reported or ends the start",
        choices=("required", "wanted", "off"),
    )
    cache_features_bytes: int = setting(
        0,
        "keep hidden states of whole samples in host memory up to this size and reuse them in later epochs",
        ge=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSection(Section):
    """Shape of the drafter; 0 means: taken from the target."""

    num_layers: int = setting(5, "decoder layers of the drafter", ge=1, le=1000)
    block_size: int = setting(16, "tokens in one block, its anchor included", ge=2, le=4096)
    num_attention_heads: int = setting(0, "query heads; 0 = as the target", ge=0)
    num_key_value_heads: int = setting(0, "key/value heads; 0 = as the target", ge=0)
    head_dim: int = setting(0, "width of a head; 0 = as the target", ge=0)
    intermediate_size: int = setting(0, "width of the MLP; 0 = as the target", ge=0)
    sliding_window: int = setting(
        0, "window of the sliding layers in tokens; 0 = all layers see everything", ge=0
    )
    sliding_layers: tuple[int, ...] = setting(
        (), "which layers slide, 0-based; empty = all but the last, where sliding_window is set"
    )
    split_fc_layers: bool = setting(
        False, "evaluate fc as a sum over the captured layers; weights and exports stay the same"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig(Section):
    """What is minimised."""

    weighting: str = setting(
        "decay",
        "weight of block positions: decay = fixed by loss.decay_gamma, dpace = from the drafter's confidence",
        choices=("decay", "dpace"),
    )
    decay_gamma: float = setting(7.0, "position decay: weight exp(-(k-1)/gamma) at offset k", gt=0)
    dpace_alpha: float = setting(
        0.5, "smoothing of dpace: 0 = the bare probabilities, 1 = as if every draft were right", ge=0, le=1
    )
    soft_label_weight: float = setting(
        0.0,
        "share of KL against the target's logits, the rest is cross-entropy; above 0 the target runs all "
        "layers and its last hidden state travels along",
        ge=0,
        le=1,
    )
    max_anchors: int = setting(512, "blocks drawn in one pack", ge=1, le=65_536)
    head_chunk_rows: int = setting(2048, "block rows whose logits exist at the same time", ge=1)
    noise_start: float = setting(0.05, "amplitude of the uniform noise on hidden states at step 0", ge=0)
    noise_end: float = setting(0.01, "the same at the last step", ge=0)
    attention: str = setting("auto", "attention of the drafter", choices=("auto", "flex", "sdpa", "dense"))
    compile: bool = setting(True, "use kernels that are compiled at start (FlexAttention); no effect on CPU")
    flex_min_tokens: int = setting(
        0,
        "FlexAttention pads shorter packs to this many tokens: fewer shapes to compile, against padding; "
        "data.token_budget makes it one shape",
        ge=0,
    )

    @property
    def uses_soft_labels(self) -> bool:
        """Whether the target's distribution is part of the loss, so that its last hidden state is needed."""
        return self.soft_label_weight > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig(Section):
    """AdamW, its schedule and its guards."""

    epochs: int = setting(6, "passes over the data", ge=1, le=100_000)
    max_steps: int = setting(
        0, "stop after this many optimizer steps; 0 = as many as the epochs hold", ge=0, le=1_000_000_000
    )
    lr: float = setting(6e-4, "peak learning rate", gt=0)
    warmup_ratio: float = setting(0.04, "share of the steps with rising learning rate", ge=0, le=1)
    schedule: str = setting(
        "cosine",
        "shape after warm-up; wsd = constant, then linear to 0",
        choices=("cosine", "constant", "wsd"),
    )
    decay_ratio: float = setting(
        0.2, "share of the steps with falling learning rate at the end, for schedule wsd", ge=0, le=1
    )
    weight_decay: float = setting(0.01, "decoupled weight decay; never on norm weights", ge=0)
    beta1: float = setting(0.9, "AdamW first moment", ge=0, le=0.999999)
    beta2: float = setting(0.999, "AdamW second moment", ge=0, le=0.999999)
    eps: float = setting(1e-8, "AdamW epsilon", gt=0)
    grad_accum: int = setting(1, "packs (micro-batches) per drafter in one optimizer step", ge=1, le=100_000)
    grad_clip: float = setting(1.0, "largest global gradient norm", gt=0)
    max_nonfinite_steps: int = setting(5, "stop with exit 5 after so many non-finite steps in a row", ge=1)
    seed: int = setting(0, "seed of everything random in the run", ge=0, le=2**31 - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueConfig(Section):
    """The hidden-states queue between target and drafter."""

    hs_min_ready: int = setting(
        30, "packs that must wait before a drafter may pull, so that lengths mix", ge=1
    )
    hs_max_depth: int = setting(90, "packs that may wait at most", ge=1)
    hs_max_bytes: int = setting(0, "bytes that may wait at most; 0 = 40 % of the available memory", ge=0)
    feed_depth: int = setting(8, "batches planned ahead of the target workers", ge=1)
    ordered: bool = setting(False, "one producer, first in first out: a resumed run repeats bit for bit")
    stall_s: float = setting(900.0, "seconds without any sign of life before the run ends as stalled", gt=0)
    start_stall_s: float = setting(
        3600.0, "the same for each phase of the start: reading data and models, compiling", gt=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Section):
    """When the run saves and from where it continues."""

    resume: str = setting("latest", "latest, scratch, or the path of a state/step-* folder")
    every: int = setting(500, "optimizer steps between checkpoints; 0 = only at the end", ge=0)
    keep: int = setting(3, "checkpoints kept per lineage, newest first", ge=1)
    keep_best: int = setting(
        1,
        "best checkpoints kept beside the newest: by acceptance length of the online evaluation where "
        "there is one, else by expected acceptance length; 0 = none",
        ge=0,
    )
    stall_s: float = setting(
        1800.0, "seconds that a checkpoint may hold up training before the run ends as stalled", gt=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig(Section):
    """Speculative decoding against the real target while training."""

    every: int = setting(0, "optimizer steps between evaluations; 0 = never", ge=0)
    prompts: str = setting("", "JSONL file of held-out prompts")
    max_prompts: int = setting(8, "prompts used, from the top of the file", ge=1)
    max_new_tokens: int = setting(64, "tokens generated per prompt", ge=1)
    thinking: str = setting(
        "template",
        "whether the target thinks on the prompts; template = as its chat template does by itself",
        choices=("template", "on", "off"),
    )
    held_out_data: str = setting(
        "", "held-out samples as `prepare` writes them, for the expected acceptance length; empty = none"
    )
    held_out_every: int = setting(
        0, "optimizer steps between passes over the held-out samples; 0 = as eval.every", ge=0
    )
    held_out_samples: int = setting(64, "held-out samples used, from the top of the file", ge=1)
    alarm_gap: float = setting(
        0.3, "relative gap between expected and real acceptance length that is an alarm", gt=0
    )
    alarm_min_blocks: int = setting(64, "blocks on either side below which nothing is compared", ge=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig(Section):
    """Weights & Biases, in its own thread and never in the way."""

    project: str = setting("", "project name; empty = dflash")
    mode: str = setting(
        "",
        "empty = online when a project is named, else disabled",
        choices=("", "online", "offline", "disabled"),
    )
    gpu_metrics: bool = setting(True, "read NVML for the metrics lines")
    init_timeout_s: float = setting(
        15.0, "seconds to wait for the service before going offline, which itself has a minute at least", gt=0
    )
    finish_timeout_s: float = setting(30.0, "seconds to wait at the end", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig(Section):
    """Status file, metrics lines and the log."""

    log_every: int = setting(10, "optimizer steps between progress lines", ge=1)
    profile_interval_s: float = setting(60.0, "seconds between lines that come by the clock", gt=0)
    status_interval_s: float = setting(5.0, "seconds between writes of status.json", gt=0)
    metrics_max_bytes: int = setting(
        64 << 20, "size at which metrics.ndjson moves to metrics.ndjson.1", ge=4096
    )
    nvml: str = setting("wanted", "GPU readings", choices=("required", "wanted", "off"))
    wandb: str = setting(
        "wanted", "W&B package, when its mode is not disabled", choices=("required", "wanted")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything one training run needs; built by `resolve`."""

    paths: PathsConfig = field(default_factory=PathsConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    data: DataConfig = field(default_factory=DataConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        for check in _COMBINATIONS:
            check(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as plain JSON values, tables in declaration order."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


def why_unusable(path: str) -> str:
    """Say why nothing can lie at a path, or below it; empty where something could."""
    if not path:
        return "it is empty"
    try:
        path.encode()
        for place in (Path(path), Path(path) / ("x" * PATH_MARGIN)):
            with contextlib.suppress(
                FileNotFoundError, NotADirectoryError
            ):  # each command says what it misses
                place.stat()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    except ValueError:
        return "it holds a NUL character"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def shorten(text: str) -> str:
    """Cut a text of any length that somebody gave, for an error message."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_MOST_SHOWN = 80


def config_hash(config: TrainConfig) -> str:
    """Return the SHA-256 of everything that decides what is learnt (not paths, telemetry, devices)."""
    relevant = {table: keys for table, keys in config.as_dict().items() if table in LEARNING_TABLES}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


LEARNING_TABLES = ("data", "target", "drafter", "loss", "optim")


_INDEX = re.compile(r"[0-9]{1,4}")


def parse_devices(flag: str, text: str) -> tuple[str, ...]:
    """Turn `0,1`, `cpu` or `cpu,cpu` into torch device names, one per worker.

    Raises:
        ConfigError: empty or unknown entries, a GPU named twice, or cpu beside GPUs.
    """
    devices: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if word != "cpu" and not _INDEX.fullmatch(word):
            raise ConfigError(f"{flag} takes cpu or CUDA indices separated by commas: {text[:80]!r}")
        device = word if word == "cpu" else f"cuda:{int(word)}"
        if device in devices and device != "cpu":
            raise ConfigError(f"{flag} names {word} twice: {text!r}; a GPU runs one such worker")
        devices.append(device)
    if len({device == "cpu" for device in devices}) > 1:
        raise ConfigError(f"{flag} cannot mix cpu and CUDA devices: {text!r}")
    return tuple(devices)


def _table_of(section: type) -> str:
    return _TABLE_NAMES.get(section.__name__, section.__name__)


_TABLE_NAMES: Mapping[str, str] = {str(item.type): item.name for item in dataclasses.fields(TrainConfig)}
SECTIONS: Mapping[str, type[Section]] = typing.get_type_hints(TrainConfig)


def _check_devices(config: TrainConfig) -> None:
    targets = config.devices.targets()
    config.devices.drafters()
    if config.queue.ordered and len(targets) > 1:
        raise ConfigError(
            f"queue.ordered needs exactly one target worker: --target-gpus names {len(targets)}; "
            "name one device or set queue.ordered to false"
        )


def _check_paths(config: TrainConfig) -> None:
    paths = config.paths
    for flag, value in (
        ("--target-model", paths.target_model),
        ("--data-dir", paths.data_dir),
        ("--output-dir", paths.output_dir),
    ):
        if not value:
            raise ConfigError(
                f"{flag} is missing: name a folder by the flag or paths.{flag[2:].replace('-', '_')}"
            )
    if not (Path(paths.target_model) / "config.json").is_file():
        raise ConfigError(f"--target-model holds no config.json: {paths.target_model}; name a model folder")
    if not Path(paths.data_dir).exists():
        raise ConfigError(f"--data-dir does not exist: {paths.data_dir}; make it with dflash-train prepare")
    if Path(paths.output_dir).exists() and not Path(paths.output_dir).is_dir():
        raise ConfigError(f"--output-dir is not a folder: {paths.output_dir}")


def _check_usable(config: TrainConfig) -> None:
    paths, resume = config.paths, config.checkpoint.resume
    for name, path in (
        ("--target-model", paths.target_model),
        ("--data-dir", paths.data_dir),
        ("--output-dir", paths.output_dir),
        ("--resume", "" if resume in ("latest", "scratch") else resume),
        ("--eval-prompts", config.eval.prompts),
        ("eval.held_out_data", config.eval.held_out_data),
    ):
        reason = why_unusable(path) if path else ""
        if reason:
            raise ConfigError(f"{name} is no usable path: {shorten(path)!r} ({reason}); name another")


def _check_data(config: TrainConfig) -> None:
    queue = config.queue
    if queue.hs_min_ready > queue.hs_max_depth:
        raise ConfigError(
            f"--hs-min-ready must not exceed --hs-max-depth: {queue.hs_min_ready} > {queue.hs_max_depth}"
        )
    edges = config.data.bucket_edges
    if any(not 1 <= edge <= MOST_NUMBER for edge in edges) or list(edges) != sorted(set(edges)):
        raise ConfigError(f"data.bucket_edges must be positive and ascending: {list(edges)}")
    if edges and edges[-1] < config.data.max_seq_len:
        raise ConfigError(
            f"data.bucket_edges must reach --max-seq-len: {edges[-1]} < {config.data.max_seq_len}; "
            "add an edge or lower --max-seq-len"
        )
    if config.data.max_seq_len > config.data.token_budget:
        raise ConfigError(
            f"--token-budget must hold one sample of --max-seq-len: {config.data.token_budget} < "
            f"{config.data.max_seq_len}; raise the first or lower the second"
        )
    if config.target.cache_features_bytes and config.queue.ordered:
        raise ConfigError(
            "target.cache_features_bytes cannot go with queue.ordered: cached hidden states differ in the "
            "last bits from those of another batch; set one of them to 0 or false"
        )


def _check_drafter(config: TrainConfig) -> None:
    drafter = config.drafter
    sliding = drafter.sliding_layers
    if sliding and not drafter.sliding_window:
        raise ConfigError(
            f"drafter.sliding_layers needs drafter.sliding_window: {list(sliding)} and no window; "
            "set the window (2048 in published drafters) or leave the layers away"
        )
    if any(layer >= drafter.num_layers or layer < 0 for layer in sliding) or len(set(sliding)) < len(sliding):
        raise ConfigError(
            f"drafter.sliding_layers must be different and within 0..{drafter.num_layers - 1}: "
            f"{list(sliding)}"
        )


def _check_schedule(config: TrainConfig) -> None:
    optim = config.optim
    if optim.schedule == "wsd" and optim.warmup_ratio + optim.decay_ratio > 1:
        raise ConfigError(
            f"--warmup-ratio and optim.decay_ratio must not exceed 1 together: {optim.warmup_ratio} + "
            f"{optim.decay_ratio}; lower one of them"
        )


def _check_unavailable(config: TrainConfig) -> None:
    cpu_drafter = "cpu" in config.devices.drafters()
    if config.loss.attention == "flex" and cpu_drafter:
        raise ConfigError("--attention flex has no backward pass on the CPU: take sdpa, dense or auto")
    if config.loss.attention == "flex" and not config.loss.compile:
        raise ConfigError("--attention flex needs compiled kernels: leave --no-compile away, or take sdpa")


def _check_runs(config: TrainConfig) -> None:
    resume = config.checkpoint.resume
    if resume not in ("latest", "scratch") and not Path(resume).is_dir():
        raise ConfigError(f"--resume takes latest, scratch or an existing state/step-* folder: {resume}")
    if config.eval.every and not config.eval.prompts:
        raise ConfigError("--eval-every needs --eval-prompts: name a JSONL file of held-out prompts")
    if config.eval.prompts and not Path(config.eval.prompts).is_file():
        raise ConfigError(f"--eval-prompts does not exist: {config.eval.prompts}")
    if config.eval.held_out_data and not Path(config.eval.held_out_data).exists():
        raise ConfigError(
            f"eval.held_out_data does not exist: {config.eval.held_out_data}; "
            "prepare --held-out-ratio makes it"
        )
    if config.eval.held_out_every and not config.eval.held_out_data:
        raise ConfigError(
            "eval.held_out_every needs eval.held_out_data: name the held-out file that prepare wrote"
        )
    if config.loss.noise_end > config.loss.noise_start:
        raise ConfigError(
            f"--noise-end must not exceed --noise-start: {config.loss.noise_end} > {config.loss.noise_start}"
        )


_COMBINATIONS: tuple[Callable[[TrainConfig], None], ...] = (
    _check_devices,
    _check_data,
    _check_drafter,
    _check_schedule,
    _check_unavailable,
    _check_usable,
    _check_paths,
    _check_runs,
)
