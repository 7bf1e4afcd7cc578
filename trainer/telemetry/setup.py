"""Puts telemetry together: what is there, which sinks, and the reporter.

Called by `trainer.train` at start-up. Must not import torch; what needs torch comes in as plain facts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from trainer.config import TrainConfig
from trainer.telemetry import capabilities
from trainer.telemetry.nvml import NvmlReader
from trainer.telemetry.reporter import Reporter, Sources
from trainer.telemetry.sink import JsonlSink, Sink, WandbSink


class Telemetry:
    """Finds the optional parts at construction; `found` is the start-up report."""

    def __init__(self, config: TrainConfig, *, has_cuda: bool, has_wandb_key: bool) -> None:
        self._config = config
        nvml_wanted = config.wandb.gpu_metrics and config.telemetry.nvml != "off"
        self._nvml = NvmlReader(is_wanted=nvml_wanted)
        self._wandb_mode = config.wandb.mode or ("online" if config.wandb.project else "disabled")
        self.found = capabilities.find(
            config,
            has_cuda=has_cuda,
            nvml_reason=self._nvml.reason,
            nvml_wanted=nvml_wanted,
            wandb_mode=self._wandb_mode,
            has_wandb_key=has_wandb_key,
        )

    def open_reporter(
        self,
        run_dir: Path,
        *,
        wandb_id: str,
        tick: Callable[[], None],
        on_trouble: Callable[[str, str], None],
    ) -> Reporter:
        """Build sinks and reporter; `on_trouble` gets a capability's name and what is wrong with it."""
        config = self._config
        sinks: list[Sink] = [JsonlSink(run_dir, max_bytes=config.telemetry.metrics_max_bytes)]
        if self._wandb_mode != "disabled" and capabilities.has_module("wandb"):
            sinks.append(
                WandbSink(
                    run_dir=run_dir,
                    mode=self._wandb_mode,
                    project=config.wandb.project or "dflash",
                    run_id=wandb_id,
                    config=config.as_dict(),
                    init_timeout_s=config.wandb.init_timeout_s,
                    finish_timeout_s=config.wandb.finish_timeout_s,
                    on_trouble=functools.partial(on_trouble, "wandb"),
                )
            )
        return Reporter(
            sinks,
            Sources(gpu=self._nvml.read, reasons={"gpu": lambda: self._nvml.reason}),
            profile_interval_s=config.telemetry.profile_interval_s,
            tick=tick,
            tick_interval_s=config.telemetry.status_interval_s,
        )
