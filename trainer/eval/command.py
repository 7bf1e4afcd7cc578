"""The `eval` command: real speculative decoding of held-out prompts with an exported drafter.

Called by `trainer.__main__`. Checks what was asked for, loads target and drafter, lets `eval.measure`
decode, and writes what `eval.report` makes of it: a table, JSON, Markdown, a figure. Must not train.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from trainer.arguments import DEFAULT_MAX_NEW_TOKENS
from trainer.checkpoint.export import CONFIG_NAME, read_config, read_target_meta
from trainer.checkpoint.export_faults import key_faults
from trainer.data.cpu_products import pack_linears
from trainer.data.encoded_prompts import encode_some
from trainer.data.prompts import Prompt, read_prompts
from trainer.drafter.exported import load_drafter
from trainer.drafter.model import Drafter
from trainer.errors import EXIT_FINISHED, ConfigError
from trainer.eval.markdown import TITLE, render_markdown
from trainer.eval.measure import MeasurePlan, measure, spread
from trainer.eval.plot import draw_report, is_own_figure, require_matplotlib
from trainer.eval.report import build_report, render_table
from trainer.eval.verify import Sampling
from trainer.lifecycle.results import ResultFile, check_results, is_record, write_result
from trainer.lifecycle.runfolder import describe_code
from trainer.pipeline.devices import dtype_name, pick_dtype
from trainer.target.capture import Target
from trainer.target.identity import is_other_target
from trainer.target.loader import load_target

_LOG = logging.getLogger(__name__)

BATCH_SIZES = {"cpu": 8, "cuda": 32}
"""Prompts decoded at once. A GPU's small forwards cost the same whatever their number of rows; on a CPU the
weights are read once for all."""
COMPARED_PROMPTS = 12
"""Prompts that are also decoded plainly: the slow half of the measurement, and a ratio needs no more."""
SPEED_ROUNDS = 2
SPEED_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """What is measured, how, and where the record goes."""

    target_model: Path
    """directory of the target, with tokenizer"""
    drafter: Path
    """directory of an exported drafter"""
    prompts: Path
    """JSONL file of prompts, see `data.prompts`"""
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    """length limit per prompt"""
    block_sizes: Sequence[int] = ()
    """positions per block; empty takes the drafter's own"""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`"""
    dtype: str = "auto"
    """a name of `pipeline.devices.pick_dtype`"""
    max_prompts: int | None = None
    """prompts used, in turn from every domain; None for all"""
    batch_size: int | None = None
    """prompts decoded at once; None for `BATCH_SIZES`"""
    sampling: Sampling | None = None
    """None is greedy"""
    with_speed: bool = True
    """also compare with plain decoding, greedy, one prompt at a time"""
    thinking: str = "template"
    """`on`, `off`, or `template` for what the chat template does by itself"""
    json_path: Path | None = None
    """where the full record goes, None for nowhere"""
    markdown_path: Path | None = None
    """the same as tables for people"""
    plot_path: Path | None = None
    """the same as a figure (PNG)"""


def run_eval(args: argparse.Namespace) -> int:
    """Run the `eval` command; the table goes to standard output."""
    report = evaluate(
        EvalRequest(
            target_model=args.target_model,
            drafter=args.drafter,
            prompts=args.prompts,
            max_new_tokens=args.max_new_tokens,
            block_sizes=parse_block_sizes(args.block_size),
            device=args.device,
            dtype=args.dtype,
            max_prompts=args.max_prompts,
            batch_size=args.batch_size,
            sampling=sampling_of(args),
            with_speed=not args.no_speed,
            thinking=args.thinking,
            json_path=args.json,
            markdown_path=args.markdown,
            plot_path=args.plot,
        )
    )
    sys.stdout.write(render_table(report))
    return EXIT_FINISHED


def evaluate(request: EvalRequest) -> dict[str, Any]:
    """Measure a drafter against its target, and write the files that were asked for.

    Returns:
        The record.

    Raises:
        ConfigError: drafter and target do not belong together, or the device does not exist.
        CheckpointError: the drafter does not load.
        DataError: no usable prompt.
        DependencyError: a figure is wanted and matplotlib is missing.
    """
    place = _check_device(request.device)
    _check_numbers(
        max_new_tokens=request.max_new_tokens,
        max_prompts=request.max_prompts,
        batch_size=request.batch_size,
    )
    if request.plot_path is not None:
        require_matplotlib()
    check_results(_result_files(request))
    # Speculative output equals plain output exactly only in fp32; serving runs in bf16, on GPUs always.
    dtype = pick_dtype(request.dtype, place.type)
    prompt_file = read_prompts(request.prompts)
    _LOG.info("eval: loading the drafter %s", request.drafter)
    drafter = load_drafter(request.drafter, device=place, dtype=dtype)
    target = load_target(request.target_model, device=place, dtype=dtype)
    _check_pair(target, drafter)
    if place.type == "cpu":
        _LOG.info("eval: laying the weights out for this processor")
        target.pack()
        pack_linears(drafter)
    trained_size = drafter.config.block_size
    plan = _plan(request, place, trained_size)
    warnings = [*_size_warnings(plan.block_sizes, trained_size), *_config_warnings(request)]
    for warning in warnings:
        _LOG.warning("%s", warning)
    chosen = _choose(prompt_file.prompts, request.max_prompts)
    prompts = encode_some(target.tokenizer, chosen, request.thinking)
    blocks = measure(target, drafter, prompts, plan)
    setting = {
        "target_model": str(request.target_model),
        "drafter": str(request.drafter),
        "prompts": str(request.prompts),
        "skipped_prompts": dict(prompt_file.skipped + prompts.skipped),
        "trained_block_size": trained_size,
        **plan.as_dict(),
        **_describe_process(place, dtype),
        "warnings": warnings,
    }
    report = build_report(blocks, setting=setting, trained_block_size=trained_size)
    _write_report(report, request)
    return report


def _plan(request: EvalRequest, place: torch.device, trained_size: int) -> MeasurePlan:
    return MeasurePlan(
        block_sizes=list(dict.fromkeys(request.block_sizes)) or [trained_size],
        max_new_tokens=request.max_new_tokens,
        batch_size=request.batch_size or BATCH_SIZES[place.type],
        sampling=request.sampling,
        compared_prompts=COMPARED_PROMPTS if request.with_speed else 0,
        speed_rounds=SPEED_ROUNDS,
        speed_tokens=min(request.max_new_tokens, SPEED_TOKENS),
        thinking=request.thinking,
    )


def _write_report(report: dict[str, Any], request: EvalRequest) -> None:
    record_path, figure_path, page_path = request.json_path, request.plot_path, request.markdown_path
    if record_path is not None:
        write_result("--json", record_path, lambda path: path.write_text(json.dumps(report, indent=2) + "\n"))
    if figure_path is not None:
        write_result("--plot", figure_path, lambda path: draw_report(report, path))
    if page_path is not None:
        text = render_markdown(report, plot=_relative(figure_path, page_path))
        write_result("--markdown", page_path, lambda path: path.write_text(text))


def _result_files(request: EvalRequest) -> list[ResultFile]:
    """Return the files that were asked for, each with what an earlier one of its kind looks like."""
    kinds = (
        ("--json", request.json_path, is_record(("figure", "setting", "block_sizes"))),
        ("--markdown", request.markdown_path, lambda content: content.startswith(f"# {TITLE} ".encode())),
        (
            "--plot",
            request.plot_path,
            is_own_figure,
        ),
    )
    return [ResultFile(flag=flag, path=path, is_own=own) for flag, path, own in kinds if path is not None]


def _describe_process(place: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return what the figures depend on beside the settings: device, versions, command."""
    return {
        "device": str(place),
        "device_name": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "dtype": dtype_name(dtype),
        "threads": torch.get_num_threads(),
        "command": sys.argv[1:],
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": describe_code(),
    }


def parse_block_sizes(text: str | None) -> tuple[int, ...]:
    """Read `--block-size`: whole numbers separated by commas, at least 1 each.

    Raises:
        ConfigError: anything else.
    """
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= 1 for word in words):
        raise ConfigError(
            f"--block-size takes whole numbers of at least 1, separated by commas: {text!r}; such as 4,8,16"
        )
    return tuple(int(word) for word in words)


def sampling_of(args: argparse.Namespace) -> Sampling | None:
    """Read the sampling flags; temperature 0 is greedy, which the others cannot go with.

    Raises:
        ConfigError: a value out of range, or `--top-p`, `--top-k`, `--scheme` without a temperature.
    """
    given = {name: getattr(args, name) for name in ("top_p", "top_k", "scheme", "seed")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if not args.temperature:
        if chosen:
            flag = f"--{next(iter(chosen)).replace('_', '-')}"
            raise ConfigError(f"{flag} needs --temperature above 0: without one decoding is greedy")
        return None
    return Sampling(temperature=args.temperature, **chosen)


def _choose(prompts: Sequence[Prompt], count: int | None) -> Sequence[Prompt]:
    """Take some prompts so that every domain keeps its share; file order stays."""
    return prompts if count is None else [prompts[index] for index in sorted(spread(prompts, count))]


def _check_numbers(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def _size_warnings(sizes: Sequence[int], trained: int) -> list[str]:
    """Say what was asked of the drafter that it was not trained for."""
    return [
        f"block size {size} is larger than the trained one of {trained}: offsets behind it were never trained"
        for size in sizes
        if size > trained
    ]


def _config_warnings(request: EvalRequest) -> list[str]:
    """Say what serving engines will not find, and that the drafter is of another target of this shape."""
    drafter = request.drafter
    notes = [
        f"{drafter / CONFIG_NAME} lacks what engines read, {fault}; export --drafter writes it whole"
        for fault in key_faults(read_config(drafter))
    ]
    if is_other_target(read_target_meta(drafter), request.target_model):
        notes.append(
            f"{drafter} was trained for other weights than those of {request.target_model}: expect a low "
            "acceptance length, or name the target that it was trained for"
        )
    return notes


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


def _relative(plot: Path | None, markdown: Path) -> str | None:
    """Path of the figure as the Markdown file has to name it."""
    return None if plot is None else os.path.relpath(plot.resolve(), markdown.resolve().parent)
