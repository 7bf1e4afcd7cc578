"""`dflash-train generate`: completions of prompts by the target itself, as training data.

Called by `trainer.__main__`. Prompts come from a file or from the target (`--sample-prompts`); they are
completed greedily in this process, or by a server that speaks OpenAI's protocol (`--base-url`). The output is
chat JSONL that `prepare` reads. It grows row by row, so an interrupted command goes on where it stopped; the
settings that shaped it stand beside it and a run with other settings is refused. Greedy results do not depend
on the batch size (up to rounding). Must not train anything.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.data.completions import PROMPTS_SUFFIX, RowFile, locked_output, template_inputs
from trainer.data.decoding import Completion, DecodingStats, Request
from trainer.data.encoded_prompts import EncodedPrompts, check_thinking, encode_prompts
from trainer.data.pretrained import get_tokenizer, load_config, stop_token_ids
from trainer.data.prompts import Prompt, read_prompts
from trainer.data.self_prompts import DrawSettings, UserHeader, find_user_header, sample_prompts
from trainer.data.server_command import check_server_flags, run_by_server
from trainer.data.target_decoding import DecodingLimits, Target
from trainer.data.token_choice import Sampling
from trainer.errors import ConfigError, DataError
from trainer.pipeline.devices import dtype_name, pick_dtype

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Report:
    """What a command did; printed as one JSON line."""

    written: int = 0
    already_there: int = 0
    too_long: int = 0
    cut_off: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    stats: DecodingStats = field(default_factory=DecodingStats)

    def render(self, output: str) -> str:
        """One line of JSON."""
        return json.dumps(
            {
                "output": output,
                "written": self.written,
                "already_there": self.already_there,
                "too_long": self.too_long,
                "cut_off": self.cut_off,
                "skipped": dict(self.skipped),
                "tokens": self.stats.tokens,
                "tokens_per_s": round(self.stats.tokens_per_s, 1),
                "slots_in_use_ratio": round(self.stats.slots_in_use_ratio, 3),
            }
        )


def run_generate(args: argparse.Namespace) -> int:
    """Carry out `generate`; returns the exit code.

    Raises:
        ConfigError: flags, model or an output of other settings.
        DataError: no usable prompt.
    """
    _check_flags(args)
    if args.base_url is not None:
        return run_by_server(args)
    tokenizer = get_tokenizer(args.target_model, needs_chat_template=True)
    check_thinking(tokenizer, args.thinking)
    _check_context(args)
    file = read_prompts(args.prompts) if args.prompts is not None else None
    header = find_user_header(tokenizer) if file is None else None
    report = Report(skipped=file.skipped if file else {})
    with locked_output(args.output, _settings(args, tokenizer, header)) as rows:
        # loaded last: what is wrong with the output is said at once
        target = Target(args.target_model, device=_device(args.device), dtype=_dtype(args))
        if header is not None:
            prompts, report.skipped = _sample(args, target, tokenizer, header)
        else:
            prompts = file.prompts if file else ()
        pending = [prompt for prompt in prompts if prompt.id not in rows.ids]
        report.already_there = len(prompts) - len(pending)
        if pending:
            _complete_all(args, target, tokenizer, pending, rows, report)
    sys.stdout.write(report.render(str(args.output)) + "\n")
    return 0


def _dtype(args: argparse.Namespace) -> torch.dtype:
    return pick_dtype(args.dtype, _device(args.device).type)


def _complete_all(
    args: argparse.Namespace,
    target: Target,
    tokenizer: Any,
    pending: Sequence[Prompt],
    rows: RowFile,
    report: Report,
) -> None:
    encoded = encode_prompts(tokenizer, pending, args.thinking)
    report.skipped = Counter(report.skipped) + encoded.skipped
    limit = _context(args) - args.max_new_tokens
    requests = [Request(index, ids) for index, ids in enumerate(encoded.token_ids) if len(ids) <= limit]
    report.too_long = len(encoded.prompts) - len(requests)
    if report.too_long:
        log.warning("skipping %d prompts longer than %d tokens", report.too_long, limit)
    if not requests:
        if not report.already_there:
            raise DataError(_why_none(encoded, limit))
        return
    stops = stop_token_ids(args.target_model, tokenizer)

    def deliver(finished: list[tuple[Request, Completion]]) -> None:
        rows.write(
            [
                _row(
                    tokenizer,
                    encoded.prompts[request.key],
                    completion,
                    stops,
                    encoded.thinking[request.key],
                )
                for request, completion in finished
            ]
        )
        report.written += len(finished)
        report.cut_off += sum(completion.is_cut_off for _, completion in finished)

    limits = DecodingLimits(max_new_tokens=args.max_new_tokens, stop_ids=stops, batch_size=args.batch_size)
    at_once = f"{args.batch_size}" if args.batch_size else "as many as suit the device"
    log.info("generate: %d prompts, %s at a time, on %s", len(requests), at_once, args.device)
    report.stats = target.decode(requests, limits, deliver)


def _why_none(encoded: EncodedPrompts, limit: int) -> str:
    if not encoded.prompts:
        return encoded.why_none()
    return f"every prompt is longer than the target allows with its completion: {limit} tokens"


def _sample(
    args: argparse.Namespace, target: Target, tokenizer: Any, header: UserHeader
) -> tuple[Sequence[Prompt], Counter[str]]:
    room = _context(args) - len(header.input_ids)
    if args.prompt_max_tokens > room:
        raise ConfigError(
            f"--prompt-max-tokens is beyond the target's context: {args.prompt_max_tokens}, at most {room}"
        )
    settings = DrawSettings(
        count=args.sample_prompts,
        seed=args.seed,
        sampling=Sampling(temperature=args.temperature, top_p=args.top_p),
        max_tokens=args.prompt_max_tokens,
        batch_size=args.batch_size,
    )
    path = args.output.with_name(args.output.name + PROMPTS_SUFFIX)
    stops = stop_token_ids(args.target_model, tokenizer)
    prompts, dropped = sample_prompts(path, target, tokenizer, settings, header=header, stop_ids=stops)
    log.info("%d of %d sampled prompts are used, dropped: %s", len(prompts), settings.count, dict(dropped))
    return prompts, dropped


def _row(
    tokenizer: Any,
    prompt: Prompt,
    completion: Completion,
    stops: frozenset[int],
    thinking: bool | None,
) -> dict[str, Any]:
    spoken = [token for token in completion.token_ids if token not in stops]
    answer = {"role": "assistant", "content": tokenizer.decode(spoken)}
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "messages": [*prompt.messages, answer],
        "finish_reason": "length" if completion.is_cut_off else "stop",
        **template_inputs(prompt, thinking),
        # The text alone is not enough: tokenizing it again does not always give what the target said.
        "completion_ids": completion.token_ids,
    }


def _settings(args: argparse.Namespace, tokenizer: Any, header: UserHeader | None) -> dict[str, Any]:
    config = json.loads((args.target_model / "config.json").read_text())
    settings: dict[str, Any] = {
        "target": {
            key: config.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        },
        "chat_template": tokenizer.chat_template,
        "decoding": "greedy",
        "max_new_tokens": args.max_new_tokens,
        "dtype": dtype_name(_dtype(args)),
    }
    if args.thinking != "template":
        settings["thinking"] = args.thinking
    if header is not None:
        # Not how many: an output may be continued with more of them.
        settings["sampled_prompts"] = {
            "header": header.text,
            "seed": args.seed,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "max_tokens": args.prompt_max_tokens,
        }
    return settings


def _check_flags(args: argparse.Namespace) -> None:
    for name in ("max_new_tokens", "batch_size", "sample_prompts", "prompt_max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1: {value}")
    if not args.temperature > 0:
        raise ConfigError(f"--temperature must be above 0: {args.temperature}")
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p must be above 0 and at most 1: {args.top_p}")
    if (args.prompts is None) == (args.sample_prompts is None):
        raise ConfigError("prompts come from one place: give --prompts FILE or --sample-prompts N")
    if args.base_url is not None:
        check_server_flags(args)
    elif args.target_model is None:
        raise ConfigError("--target-model is missing: name the target's directory, or a server by --base-url")
    elif args.model is not None:
        raise ConfigError(
            f"--model names a target of a server: give --base-url too, or leave it out: {args.model}"
        )


def _check_context(args: argparse.Namespace) -> None:
    context = _context(args)
    if args.max_new_tokens >= context:
        raise ConfigError(
            f"--max-new-tokens leaves no room for a prompt: {args.max_new_tokens}, the target's context is "
            f"{context} tokens; lower it"
        )


def _context(args: argparse.Namespace) -> int:
    return int(load_config(args.target_model).get_text_config().max_position_embeddings)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device is unknown: {name}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device is not there: {name}; {torch.cuda.device_count()} CUDA devices visible")
    return device
