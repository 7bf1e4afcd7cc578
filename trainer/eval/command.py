"""The `eval` command: real speculative decoding of held-out prompts with an exported drafter.

Called by `trainer.__main__`. Loads target and drafter, decodes every prompt greedily, some of them also
without the drafter for the speedup, and hands the results to `eval.report`. Must not train.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.arguments import DEFAULT_MAX_NEW_TOKENS
from trainer.data.chat import encode_prompt
from trainer.data.prompts import Prompt, read_prompts
from trainer.drafter.exported import load_drafter
from trainer.drafter.model import Drafter
from trainer.errors import EXIT_FINISHED, ConfigError
from trainer.eval.report import MeasuredPrompt, build_report, render_table
from trainer.eval.speculative import speculative_generate
from trainer.target.capture import Target
from trainer.target.loader import load_target

_LOG = logging.getLogger(__name__)

COMPARED_PROMPTS = 8
"""Prompts that are also decoded plainly: the slow half of the measurement, and a ratio needs no more."""

_WARM_UP_TOKENS = 4


def run_eval(args: argparse.Namespace) -> int:
    """Run the `eval` command; the table goes to standard output."""
    report = evaluate(
        target_model=args.target_model,
        drafter=args.drafter,
        prompts=args.prompts,
        max_new_tokens=args.max_new_tokens,
        block_size=args.block_size,
        device=args.device,
        json_path=args.json,
    )
    sys.stdout.write(render_table(report))
    return EXIT_FINISHED


def evaluate(
    *,
    target_model: Path,
    drafter: Path,
    prompts: Path,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    block_size: int | None = None,
    device: str = "cpu",
    json_path: Path | None = None,
) -> dict[str, Any]:
    """Measure a drafter against its target.

    Args:
        target_model: directory of the target, with tokenizer.
        drafter: directory of an exported drafter.
        prompts: JSONL file of prompts, see `data.prompts`.
        max_new_tokens: length limit per prompt.
        block_size: positions per block if not the drafter's own.
        device: `cpu`, `cuda` or `cuda:N`.
        json_path: where the full record goes, None for nowhere.

    Returns:
        The record.

    Raises:
        ConfigError: drafter and target do not belong together, or the device does not exist.
        CheckpointError: the drafter does not load.
        DataError: no usable prompt.
    """
    place = _check_device(device)
    for name, value in (("--max-new-tokens", max_new_tokens), ("--block-size", block_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    # Speculative output equals plain output exactly only in fp32; on GPUs serving runs in bf16, and so do we.
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    prompt_file = read_prompts(prompts)
    model = load_drafter(drafter, device=place, dtype=dtype)
    target = load_target(target_model, device=place, dtype=dtype)
    _check_pair(target, model)
    size = model.config.block_size if block_size is None else block_size
    measured = measure_prompts(
        target, model, prompt_file.prompts, max_new_tokens=max_new_tokens, block_size=size
    )
    setting = {
        "target_model": str(target_model),
        "drafter": str(drafter),
        "prompts": str(prompts),
        "skipped_prompts": dict(prompt_file.skipped),
        "max_new_tokens": max_new_tokens,
        "device": str(place),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    report = build_report(measured, block_size=size, setting=setting)
    if json_path is not None:
        _write_json(report, json_path)
    return report


def measure_prompts(
    target: Target, drafter: Drafter, prompts: Sequence[Prompt], *, max_new_tokens: int, block_size: int
) -> list[MeasuredPrompt]:
    """Decode every prompt with the drafter, and a few spread over all domains without it."""
    if target.tokenizer is None:
        raise ConfigError(f"target has no tokenizer: {target.info.path}; put its tokenizer files there")
    encoded = [encode_prompt(target.tokenizer, prompt.messages) for prompt in prompts]
    compared = set(_spread(prompts, COMPARED_PROMPTS))
    stop_ids = target.info.stop_ids
    # The first forward of each kind pays for allocations and kernel choice; keep that out of the times.
    for warm in (drafter, None):
        speculative_generate(
            target, warm, encoded[0], max_new_tokens=_WARM_UP_TOKENS, eos_ids=(), block_size=block_size
        )
    measured: list[MeasuredPrompt] = []
    began_s = time.monotonic()
    for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        result = speculative_generate(
            target, drafter, ids, max_new_tokens=max_new_tokens, eos_ids=stop_ids, block_size=block_size
        )
        plain = None
        if index in compared:
            plain = speculative_generate(target, None, ids, max_new_tokens=max_new_tokens, eos_ids=stop_ids)
        measured.append(
            MeasuredPrompt(
                id=prompt.id, domain=prompt.domain, prompt_tokens=len(ids), speculative=result, plain=plain
            )
        )
        _LOG.info(
            "eval prompt %d of %d: acceptance length %s, %.0f s so far",
            index + 1,
            len(prompts),
            "unknown" if result.acceptance_length is None else f"{result.acceptance_length:.2f}",
            time.monotonic() - began_s,
        )
    return measured


def _spread(prompts: Sequence[Prompt], count: int) -> list[int]:
    """Choose prompts in turn from every domain, in file order."""
    by_domain: dict[str | None, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_domain.setdefault(prompt.domain, []).append(index)
    chosen: list[int] = []
    for turn in range(len(prompts)):
        chosen += [indices[turn] for indices in by_domain.values() if turn < len(indices)]
    return chosen[:count]


def _check_pair(target: Target, drafter: Drafter) -> None:
    config, info = drafter.config, target.info
    ours = (config.num_target_layers, config.hidden_size, config.vocab_size)
    theirs = (info.num_layers, info.hidden_size, info.vocab_size)
    if ours != theirs:
        raise ConfigError(
            "drafter was trained for another target: it expects layers, hidden size and vocabulary "
            f"{ours}, {info.path} has {theirs}"
        )


def _check_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device: {name}; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device does not exist: {name}; this machine has {torch.cuda.device_count()} CUDA devices"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unsupported device: {name}; use cpu, cuda or cuda:N")
    return device


def _write_json(report: dict[str, Any], path: Path) -> None:
    """Write whole or not at all."""
    scratch = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(report, indent=2) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write --json {path}: {error}") from error
