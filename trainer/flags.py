"""The flags of `train`, and where each configuration value comes from.

Owns the closed list of flags (`FLAGS`), the `DFLASH_*` variables and all access to the process environment.
`trainer.__main__` calls `resolve`. Must not import torch: a wrong value is refused within a second.

Precedence: flag, `DFLASH_*` variable, `--set table.key=value`, TOML file, default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import MOST_NUMBER, SECTIONS, TrainConfig, shorten, why_unusable
from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One `train` flag and the key it sets; `constant` marks a switch."""

    name: str
    key: str
    constant: bool | float | None = None


FLAGS: tuple[Flag, ...] = (
    Flag(name="--target-model", key="paths.target_model"),
    Flag(name="--data-dir", key="paths.data_dir"),
    Flag(name="--output-dir", key="paths.output_dir"),
    Flag(name="--target-gpus", key="devices.target_gpus"),
    Flag(name="--drafter-gpus", key="devices.drafter_gpus"),
    Flag(name="--epochs", key="optim.epochs"),
    Flag(name="--lr", key="optim.lr"),
    Flag(name="--warmup-ratio", key="optim.warmup_ratio"),
    Flag(name="--weight-decay", key="optim.weight_decay"),
    Flag(name="--grad-accum", key="optim.grad_accum"),
    Flag(name="--grad-clip", key="optim.grad_clip"),
    Flag(name="--token-budget", key="data.token_budget"),
    Flag(name="--max-seq-len", key="data.max_seq_len"),
    Flag(name="--max-batch-size", key="data.max_batch_size"),
    Flag(name="--block-size", key="drafter.block_size"),
    Flag(name="--max-anchors", key="loss.max_anchors"),
    Flag(name="--num-draft-layers", key="drafter.num_layers"),
    Flag(name="--gamma", key="loss.decay_gamma"),
    Flag(name="--noise-start", key="loss.noise_start"),
    Flag(name="--noise-end", key="loss.noise_end"),
    Flag(name="--use-soft-labels", key="loss.soft_label_weight", constant=1.0),
    Flag(name="--soft-label-weight", key="loss.soft_label_weight"),
    Flag(name="--no-wandb-gpu-metrics", key="wandb.gpu_metrics", constant=False),
    Flag(name="--hs-min-ready", key="queue.hs_min_ready"),
    Flag(name="--hs-max-depth", key="queue.hs_max_depth"),
    Flag(name="--hs-max-bytes", key="queue.hs_max_bytes"),
    Flag(name="--seed", key="optim.seed"),
    Flag(name="--resume", key="checkpoint.resume"),
    Flag(name="--eval-every", key="eval.every"),
    Flag(name="--eval-prompts", key="eval.prompts"),
    Flag(name="--checkpoint-every", key="checkpoint.every"),
    Flag(name="--keep-checkpoints", key="checkpoint.keep"),
    Flag(name="--attention", key="loss.attention"),
    Flag(name="--compile", key="loss.compile", constant=True),
    Flag(name="--no-compile", key="loss.compile", constant=False),
    Flag(name="--wandb-project", key="wandb.project"),
    Flag(name="--wandb-mode", key="wandb.mode"),
)
"""The closed list of `train` flags that set a key (`--config` and `--set` come on top of it)."""

EXTRA_ENVIRONMENT: Mapping[str, str] = {
    "DFLASH_PROFILE_INTERVAL": "telemetry.profile_interval_s",
    "DFLASH_SPLIT_FC_LAYERS": "drafter.split_fc_layers",
}
RUN_DIR_VARIABLE = "DFLASH_RUN_DIR"
LAUNCHER_VARIABLES = (RUN_DIR_VARIABLE, "DFLASH_RUN_TOKEN")
"""Set by whatever launches the trainer; they are no settings."""
_COUNT = re.compile(r"[0-9]{1,9}")
CONFIG_LIMIT_BYTES = 1_048_576


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """How many trainers make this run, one per machine, and which of them this is.

    `address` and `port` are where they meet; nobody meets where `size` is 1.
    """

    rank: int = 0
    size: int = 1
    address: str = ""
    port: int = 0

    @property
    def meeting_point(self) -> str:
        """Address and port as text."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A finished configuration with its provenance.

    `sources` maps each key that is not a default to where its value came from; `notes` are lines for the log.
    """

    config: TrainConfig
    sources: Mapping[str, str]
    notes: tuple[str, ...]
    run_dir: Path
    is_own_run_dir: bool
    world: World = World()


def resolve(
    flags: Mapping[str, Any],
    *,
    toml_path: str | None = None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge all sources into one checked configuration.

    Args:
        flags: flag name (with dashes) to its value, for a switch any value; only flags that were given.
        toml_path: the `--config` file.
        overrides: `table.key=value` texts of `--set`, later ones win.
        environ: the environment; the process's own when None.

    Raises:
        ConfigError: one line that names the key, its value, its source and what to do.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(key: str, value: Any, source: str) -> None:
        values[key] = _coerce(key, value, source)
        sources[key] = source

    for key, value in _toml_values(toml_path):
        put(key, value, f"{toml_path}")
    for text in overrides:
        key, separator, raw = text.partition("=")
        if not separator:
            raise ConfigError(f"--set needs table.key=value: {shorten(repr(text))}")
        put(key.strip(), _parse_text(raw.strip()), "--set")
    notes = _apply_environment(environ, put)
    _refuse_contradicting((_FLAG_BY_NAME[name].key, name) for name in flags)
    for name, value in flags.items():
        flag = _FLAG_BY_NAME[name]
        put(flag.key, value if flag.constant is None else flag.constant, name)

    config = _build(values, sources)
    world = find_world(environ)
    run_dir = environ.get(RUN_DIR_VARIABLE, "")
    reason = why_unusable(run_dir) if run_dir else ""
    if reason:
        raise ConfigError(
            f"{RUN_DIR_VARIABLE} is no usable path: {shorten(run_dir)!r} ({reason}); name another"
        )
    own_run_dir = Path(config.paths.output_dir) / (f"run-rank{world.rank}" if world.rank else "run")
    return Resolved(
        config=config,
        sources=sources,
        notes=tuple(notes),
        run_dir=Path(run_dir) if run_dir else own_run_dir,
        is_own_run_dir=not run_dir,
        world=world,
    )


def find_world(environ: Mapping[str, str]) -> World:
    """Read what `torchrun` (or whoever starts one trainer per machine) says in the environment.

    Raises:
        ConfigError: a variable is missing or no number, or several trainers were started on one machine.
    """
    environ = {name: text for name, text in environ.items() if text}
    if environ.get("RANK", "0") != "0" and "WORLD_SIZE" not in environ:
        raise ConfigError(
            f"RANK is set and WORLD_SIZE is not: RANK={shorten(environ['RANK'])}; start with torchrun, or "
            "unset RANK to train on one machine"
        )
    if environ.get("WORLD_SIZE", "1") == "1" and environ.get("RANK", "0") == "0":
        return World()
    if environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun started {shorten(environ['LOCAL_WORLD_SIZE'])} trainers on this machine, but one "
            "drives all of its devices: use --nproc-per-node 1"
        )
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    bad = [f"{name}={shorten(text)}" for name in names if not _COUNT.fullmatch(text := environ.get(name, ""))]
    if bad or not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must all be set for several machines: "
            f"{', '.join(bad) or 'no MASTER_ADDR'}; start with torchrun, or unset WORLD_SIZE"
        )
    rank, size, port = (int(environ[name]) for name in names)
    if rank >= size:
        raise ConfigError(
            f"RANK must be below WORLD_SIZE: {rank} of {size}; count machines from 0, or start with torchrun"
        )
    if not 1 <= port <= 65_535:
        raise ConfigError(f"MASTER_PORT must be from 1 to 65535: {port}; take a free one of rank 0's machine")
    return World(rank=rank, size=size, address=environ["MASTER_ADDR"], port=port)


def set_collective_defaults() -> None:
    """Let a lost peer be a wait that the trainer ends itself, not an abort of the process by a library."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def render_reference() -> str:
    """Return the reference page of all settings, `docs/reference/trainer-settings.md`."""
    flags = {flag.key: flag.name for flag in FLAGS if flag.constant is None}
    lines = [
        "# Trainer settings",
        "",
        "Every key of the trainer's TOML file, with its flag where it has one. A value comes from, in this",
        "order: flag, environment variable (`DFLASH_` and the flag's name, such as `DFLASH_MAX_ANCHORS`),",
        "`--set table.key=value`, the file given by `--config`, the default. Generated from",
        "`trainer/config.py`.",
        "",
    ]
    for table, section in SECTIONS.items():
        lines += [f"## [{table}]", "", "| key | flag | default | meaning |", "|---|---|---|---|"]
        for item in dataclasses.fields(section):
            flag = flags.get(f"{table}.{item.name}", "")
            default = json.dumps(item.default) if item.default is not None else "none"
            meaning = str(item.metadata["doc"]) + _render_range(item.metadata)
            lines.append(f"| `{item.name}` | {f'`{flag}`' if flag else ''} | `{default}` | {meaning} |")
        lines.append("")
    lines += ["## Switches and further variables", ""]
    lines += [
        f"- `{flag.name}`: same as `{flag.key} = {json.dumps(flag.constant)}`"
        for flag in FLAGS
        if flag.constant is not None
    ]
    lines += [f"- `{name}`: sets `{key}`" for name, key in EXTRA_ENVIRONMENT.items()]
    lines.append(f"- `{RUN_DIR_VARIABLE}`: folder of status and metrics; default `<output-dir>/run`")
    return "\n".join(lines) + "\n"


def _render_range(meta: Mapping[str, Any]) -> str:
    limits = {"ge": "at least", "gt": "above", "le": "at most"}
    parts = [f"{text} {meta[name]}" for name, text in limits.items() if meta[name] is not None]
    if meta["choices"]:
        parts.append("one of " + ", ".join(choice or '""' for choice in meta["choices"]))
    return f" ({', '.join(parts)})" if parts else ""


def set_allocator_defaults() -> None:
    """Ask torch for growable segments; must run before CUDA starts, and leaves a given choice alone."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def find_server_key() -> str | None:
    """Return the key for an OpenAI-compatible server, None when the environment carries none."""
    return os.environ.get("OPENAI_API_KEY") or None


def has_wandb_key() -> bool:
    """Tell whether the environment carries a W&B key (its value is never read further)."""
    return bool(os.environ.get("WANDB_API_KEY"))


def has_wandb_credentials() -> bool:
    """Tell whether W&B could find a key: in the environment, or in a netrc file (which is not read here)."""
    netrc = os.environ.get("NETRC")
    files = [Path(netrc)] if netrc else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return has_wandb_key() or any(not why_unusable(str(file)) and file.is_file() for file in files)


def _refuse_contradicting(given: Iterable[tuple[str, str]]) -> None:
    """Two names that set one key (`--compile` and `--no-compile`) leave open which was meant."""
    by_key: dict[str, str] = {}
    for key, name in given:
        first = by_key.setdefault(key, name)
        if first != name:
            raise ConfigError(f"{first} and {name} both set {key}: keep one of them")


_FLAG_BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}
_KEY_TYPES: Mapping[str, Any] = {
    f"{table}.{name}": annotation
    for table, section in SECTIONS.items()
    for name, annotation in typing.get_type_hints(section).items()
}


def _toml_values(path: str | None) -> list[tuple[str, Any]]:
    """Flatten the TOML file to `table.key` and value."""
    if path is None:
        return []
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(CONFIG_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config cannot be read: {shorten(path)} ({reason})") from error
    if len(content) > CONFIG_LIMIT_BYTES:
        raise ConfigError(
            f"--config has more than {CONFIG_LIMIT_BYTES:,} bytes: {path}; name a settings file"
        )
    try:
        document = tomllib.loads(content.decode("utf-8").replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config is not valid TOML: {path} ({error})") from error
    pairs: list[tuple[str, Any]] = []
    for table, content in document.items():
        if table not in SECTIONS or not isinstance(content, dict):
            raise ConfigError(f"unknown table in {path}: [{table}]{_near(table, SECTIONS)}")
        pairs += [(f"{table}.{key}", value) for key, value in content.items()]
    return pairs


def _apply_environment(environ: Mapping[str, str], put: Callable[[str, Any, str], None]) -> list[str]:
    """Take `DFLASH_*` variables over; return a note for each that means nothing here."""
    known = {_variable_of(flag): flag for flag in FLAGS}
    notes, given = [], []
    for name in sorted(environ):
        if not name.startswith("DFLASH_") or name in LAUNCHER_VARIABLES or not environ[name]:
            continue
        if name in EXTRA_ENVIRONMENT:
            put(EXTRA_ENVIRONMENT[name], _parse_text(environ[name]), name)
        elif name not in known:
            notes.append(f"{name} is set but names no setting of the trainer{_near(name, known)}")
        elif known[name].constant is None:
            given.append(known[name])
            put(known[name].key, _parse_text(environ[name]), name)
        elif _coerce(name, _parse_text(environ[name]), name, bool):
            given.append(known[name])
            put(known[name].key, known[name].constant, name)
    _refuse_contradicting((flag.key, _variable_of(flag)) for flag in given)
    return notes


def _variable_of(flag: Flag) -> str:
    return f"DFLASH_{flag.name[2:].replace('-', '_').upper()}"


def _parse_text(raw: str) -> Any:
    """Read a value as TOML would; anything else is plain text, also what would be more than one value."""
    try:
        document = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):  # numbers of thousands of digits, brackets of thousands of levels
        return raw
    return document["value"] if len(document) == 1 else raw


def _coerce(key: str, value: Any, source: str, annotation: Any = None) -> Any:
    """Bring a raw value to the type of its key."""
    if annotation is None:
        if key not in _KEY_TYPES:
            raise ConfigError(f"unknown key from {source}: {shorten(key)}{_near(key, _KEY_TYPES)}")
        annotation = _KEY_TYPES[key]
    if isinstance(value, str) and annotation is not str:
        value = _parse_text(value)
    return _convert(key, value, source, annotation)


def _convert(key: str, value: Any, source: str, annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        if value is None:
            return None
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        return _coerce_list(key, value, source)
    if annotation is bool and value in (0, 1):
        return bool(value)
    if annotation is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    if type(value) is not annotation:
        raise ConfigError(f"{key} takes {_TYPE_NAMES[annotation]}: {_spelled(value)} (from {source})")
    return value


def _spelled(value: Any) -> str:
    try:
        return shorten(repr(value))
    except ValueError:  # of a number with thousands of digits
        return (
            f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a list of long numbers"
        )


_TYPE_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def _coerce_list(key: str, value: Any, source: str) -> tuple[int, ...]:
    if isinstance(value, str):
        value = [_parse_text(part) for part in value.split(",")]
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple) or any(
        type(entry) is not int or abs(entry) > MOST_NUMBER for entry in value
    ):
        raise ConfigError(f"{key} takes a list of whole numbers: {_spelled(value)} (from {source})")
    return tuple(value)


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}" if close else ""


def _build(values: Mapping[str, Any], sources: Mapping[str, str]) -> TrainConfig:
    """Construct the sections; range errors gain the source of the value."""
    sections: dict[str, Any] = {}
    for table, section in SECTIONS.items():
        given = {
            key.split(".", 1)[1]: value for key, value in values.items() if key.split(".", 1)[0] == table
        }
        try:
            sections[table] = section(**given)
        except ConfigError as error:
            key = str(error).split(" ", 1)[0]
            raise ConfigError(f"{error} (from {sources[key]})" if key in sources else str(error)) from None
    return TrainConfig(**sections)
