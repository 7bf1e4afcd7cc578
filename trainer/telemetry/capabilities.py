"""The start-up report: which optional parts are off, why, and what would turn them on.

Built by `trainer.train` before anything is loaded, printed to the log and written to `startup.json` of the
run folder. A part that the configuration requires and that is off ends the start with a `DependencyError`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.errors import DependencyError

_LOG = logging.getLogger(__name__)

PACKAGES = (
    "dflash-supervisor",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "pyarrow",
    "nvidia-ml-py",
    "wandb",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One optional part as it was found at start-up."""

    name: str
    level: str
    """required, wanted or off"""
    is_on: bool
    reason: str
    remedy: str = ""


def has_module(name: str) -> bool:
    """Tell whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def package_versions() -> dict[str, str | None]:
    """Return the installed version of each package that matters; None where it is missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def report(capabilities: Sequence[Capability]) -> list[dict[str, Any]]:
    """Log every capability and return the records for `startup.json`.

    Raises:
        DependencyError: a required one is off; all of them are named in one line.
    """
    for entry in capabilities:
        if entry.is_on:
            _LOG.info("capability %s: on%s", entry.name, f" ({entry.reason})" if entry.reason else "")
        else:
            level = logging.WARNING if entry.level != "off" else logging.INFO
            remedy = f"; remedy: {entry.remedy}" if entry.remedy else ""
            _LOG.log(level, "capability %s: OFF, %s%s", entry.name, entry.reason, remedy)
    return [asdict(entry) for entry in capabilities]


def require(capabilities: Sequence[Capability]) -> None:
    """Refuse to start without what the configuration requires.

    Raises:
        DependencyError: names every required part that is off, with reason and remedy.
    """
    missing = [entry for entry in capabilities if entry.level == "required" and not entry.is_on]
    if missing:
        texts = [f"{entry.name} ({entry.reason}; {entry.remedy})" for entry in missing]
        raise DependencyError(f"required but not available: {', '.join(texts)}")


def find(
    config: TrainConfig,
    *,
    has_cuda: bool,
    nvml_reason: str,
    nvml_wanted: bool,
    wandb_mode: str,
    has_wandb_key: bool,
) -> list[Capability]:
    """Say of every optional part whether it is on; `nvml_reason` is empty when NVML answers."""
    uses_cuda = any(d != "cpu" for d in (*config.devices.targets(), *config.devices.drafters()))
    return [
        Capability(
            name="cuda",
            level="required" if uses_cuda else "off",
            is_on=has_cuda and uses_cuda,
            reason="" if has_cuda and uses_cuda else "no CUDA device" if uses_cuda else "CPU devices chosen",
            remedy="take cpu for both device flags, or a machine with a GPU" if uses_cuda else "",
        ),
        Capability(
            name="nvml",
            level=config.telemetry.nvml if nvml_wanted else "off",
            is_on=not nvml_reason,
            reason=nvml_reason,
            remedy="install nvidia-ml-py; a GPU driver must be present" if nvml_reason else "",
        ),
        _wandb(config, mode=wandb_mode, has_key=has_wandb_key),
        _parquet(config),
        Capability(
            name="kernels",
            level="off",
            is_on=False,
            reason="no fused kernels are used in this version" if uses_cuda else "CPU devices chosen",
        ),
    ]


def _parquet(config: TrainConfig) -> Capability:
    path = Path(config.paths.data_dir)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    tables = [file.name for file in files if file.suffix in (".parquet", ".arrow")]
    is_installed = has_module("pyarrow")
    needs = f"{tables[0]} cannot be read" if tables else "the data are JSONL, which need it not"
    reason = f"module pyarrow cannot be imported; {needs}"
    return Capability(
        name="parquet",
        level="required" if tables else "off",
        is_on=is_installed,
        reason="" if is_installed else reason,
        remedy="" if is_installed else "pip install 'dflash-supervisor[data]', or use JSONL",
    )


def _wandb(config: TrainConfig, *, mode: str, has_key: bool) -> Capability:
    is_off, is_installed = mode == "disabled", has_module("wandb")
    reason = "wandb.mode is disabled" if is_off else f"mode {mode}"
    if not is_off and not is_installed:
        reason = "module wandb cannot be imported"
    elif mode == "online" and not has_key:
        reason += ", no WANDB_API_KEY in the environment"
    return Capability(
        name="wandb",
        level="off" if is_off else config.telemetry.wandb,
        is_on=not is_off and is_installed,
        reason=reason,
        remedy="set --wandb-project or --wandb-mode" if is_off else "" if is_installed else "install wandb",
    )
