"""Fast kernels that a target would use and what happens without them.

Called by `trainer.train` at start-up, before any weight is read: the findings go to the start-up report
beside the other optional parts. Reads the target's config only. Must not load kernels: transformers picks
them up by itself where they are importable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.data.pretrained import load_config, quantization_of, supports_sdpa
from trainer.telemetry.capabilities import Capability, has_module

LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    name: str
    module: str
    package: str
    without: str


_LINEAR_PACKAGES = (
    _Package(
        name="flash_linear_attention",
        module="fla",
        package="flash-linear-attention",
        without="the recurrence runs in plain torch, several times slower",
    ),
    _Package(
        name="causal_conv1d",
        module="causal_conv1d",
        package="causal-conv1d",
        without="the convolution runs in plain torch, slower",
    ),
)


def find_kernels(
    config: TrainConfig, *, is_importable: Callable[[str], bool] = has_module
) -> list[Capability]:
    """Say of each kernel that this target could use whether it is there.

    Args:
        config: of the run; `target.fast_kernels` is the level of what is missing.
        is_importable: tells whether a module is installed.

    Raises:
        ConfigError: the target's config cannot be read.
    """
    settings = load_config(Path(config.paths.target_model))
    on_cuda = any(device != "cpu" for device in config.devices.targets())
    level = config.target.fast_kernels
    found = [_attention(config, settings, level=level if on_cuda else "off")]
    if LINEAR in (getattr(settings.get_text_config(), "layer_types", None) or ()):
        found += [
            _package(package, level=level if on_cuda else "off", on_cuda=on_cuda, here=is_importable)
            for package in _LINEAR_PACKAGES
        ]
    if quantization_of(settings) == "mxfp4":
        found.append(_mxfp4(settings, level=level))
    return found


def _attention(config: TrainConfig, settings: Any, *, level: str) -> Capability:
    name = "target_attention"
    if config.target.attention != "sdpa":
        return Capability(name=name, level="off", is_on=False, reason="target.attention is eager")
    if supports_sdpa(settings):
        return Capability(
            name=name, level=level, is_on=True, reason="sdpa, with torch's flash attention on CUDA"
        )
    return Capability(
        name=name,
        level=level,
        is_on=False,
        reason=f"transformers has no sdpa for {settings.model_type}: eager attention, whose memory grows "
        "with the square of the length",
        remedy="lower --max-seq-len or --token-budget if memory runs out",
    )


def _package(package: _Package, *, level: str, on_cuda: bool, here: Callable[[str], bool]) -> Capability:
    if on_cuda and here(package.module):
        return Capability(name=package.name, level=level, is_on=True, reason="")
    reason = f"module {package.module} cannot be imported: {package.without}"
    return Capability(
        name=package.name,
        level=level,
        is_on=False,
        reason=reason if on_cuda else f"CPU devices chosen: {package.without}",
        remedy=f"install {package.package} beside this torch" if on_cuda else "",
    )


def _mxfp4(settings: Any, *, level: str) -> Capability:
    return Capability(
        name="mxfp4",
        # weights are right either way, only larger: not a reason to refuse
        level="wanted" if level == "required" else level,
        is_on=False,
        reason=f"4-bit weights of {settings.model_type} are expanded to 16 bits, four times their size",
        remedy="have room for the expanded weights on host and device",
    )
