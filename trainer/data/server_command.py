"""`generate --base-url`: the part of the command that has a server complete the prompts.

Called by `trainer.data.generate`. Connects prompts, client and output, and prints what came of it. Must not
load a model or a tokenizer: the server applies its own chat template.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from trainer.data.completions import locked_output, template_inputs
from trainer.data.encoded_prompts import thinking_of
from trainer.data.openai_client import Answer, ChatClient, parse_base_url
from trainer.data.prompts import Prompt, read_prompts
from trainer.data.server_completions import ServerReport, check_outcome, complete_by_server
from trainer.errors import ConfigError
from trainer.flags import find_server_key


def check_server_flags(args: argparse.Namespace) -> None:
    """Refuse flags that cannot work with a server; raises `ConfigError`."""
    if args.target_model is not None or args.sample_prompts is not None:
        raise ConfigError(
            "--base-url leaves the target to the server: leave out --target-model and --sample-prompts"
        )
    if args.model is None:
        raise ConfigError("--model is missing: the name by which the server knows the target")
    for name in ("concurrency", "request_timeout", "max_tries"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0: {getattr(args, name)}")


def run_by_server(args: argparse.Namespace) -> int:
    """Carry out `generate --base-url`; returns the exit code.

    Raises:
        ConfigError: the server refuses every request, or an output of other settings.
        DataError: no usable prompt, or all were refused.
        StalledError: prompts were left without an answer.
    """
    file = read_prompts(args.prompts)
    client = ChatClient(
        endpoint=parse_base_url(args.base_url),
        model=args.model,
        max_new_tokens=args.max_new_tokens,
        attempt_s=args.request_timeout,
        max_tries=args.max_tries,
        api_key=find_server_key(),
    )
    settings = {"server_model": args.model, "decoding": "greedy", "max_new_tokens": args.max_new_tokens}
    if args.thinking != "template":
        settings["thinking"] = args.thinking
    done = ServerReport()
    with locked_output(args.output, settings) as rows:
        pending = [prompt for prompt in file.prompts if prompt.id not in rows.ids]
        try:
            complete_by_server(
                client,
                pending,
                rows,
                concurrency=args.concurrency,
                thinking=lambda prompt: thinking_of(prompt, args.thinking),
                build_row=lambda prompt, answer: _server_row(
                    prompt, answer, thinking_of(prompt, args.thinking)
                ),
                report=done,
            )
        finally:
            summary = _summary(args, done, len(file.prompts) - len(pending), file.skipped)
            sys.stdout.write(json.dumps(summary) + "\n")
    check_outcome(done, len(pending))
    return 0


def _summary(
    args: argparse.Namespace, done: ServerReport, already_there: int, skipped: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "output": str(args.output),
        "written": done.written,
        "already_there": already_there,
        "cut_off": done.cut_off,
        "failed": done.failed,
        "refused": dict(done.refused),
        "skipped": dict(skipped),
        "tokens": done.tokens,
        "tokens_per_s": round(done.tokens / max(done.wall_s, 1e-9), 1),
    }


def _server_row(prompt: Prompt, answer: Answer, thinking: bool | None) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "messages": [*prompt.messages, answer.message],
        "finish_reason": answer.finish_reason,
        **template_inputs(prompt, thinking),
    }
