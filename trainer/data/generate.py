"""`dflash-train generate`: completions of prompts by the target itself, greedy and batched, as training data.

Called by `trainer.__main__`. The output is chat JSONL that `prepare` reads. It grows by whole batches and is
synced after each, so an interrupted command goes on where it stopped; the settings that shaped it stand
beside it in `<output>.settings.json` and a run with other settings is refused. Greedy results do not depend
on the batch size (up to rounding). Must not train anything.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.data.chat import encode_prompt
from trainer.data.pretrained import cache_argument, get_tokenizer, load_causal_lm, stop_token_ids
from trainer.data.prompts import Prompt, read_prompts
from trainer.errors import ConfigError, DataError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Completion:
    """What the target said to one prompt; `token_ids` holds the stop token when there was one."""

    token_ids: list[int]
    is_cut_off: bool


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt with its token ids."""

    prompt: Prompt
    input_ids: list[int]


def run_generate(args: argparse.Namespace) -> int:
    """Carry out `generate`; returns the exit code.

    Raises:
        ConfigError: flags, model or an output of other settings.
        DataError: no usable prompt.
    """
    for name in ("max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1: {getattr(args, name)}")
    file = read_prompts(args.prompts)
    tokenizer = get_tokenizer(args.target_model, needs_chat_template=True)
    settings = _settings(args, tokenizer)
    with _locked_output(args.output, settings) as stream:
        done = _ids_in(args.output)
        pending = [prompt for prompt in file.prompts if prompt.id not in done]
        written = 0
        if pending:
            model = load_causal_lm(args.target_model, device=_device(args.device), dtype=DTYPES[args.dtype])
            written = _complete_all(args, model, tokenizer, pending, stream)
    summary = {
        "output": str(args.output),
        "written": written,
        "already_there": len(file.prompts) - len(pending),
        "too_long": len(pending) - written,
        "skipped": dict(file.skipped),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


def _complete_all(
    args: argparse.Namespace, model: Any, tokenizer: Any, pending: Sequence[Prompt], stream: TextIO
) -> int:
    limit = model.config.get_text_config().max_position_embeddings - args.max_new_tokens
    encoded = [EncodedPrompt(prompt, encode_prompt(tokenizer, prompt.messages)) for prompt in pending]
    fitting = [entry for entry in encoded if len(entry.input_ids) <= limit]
    if len(fitting) < len(encoded):
        log.warning("skipping %d prompts longer than %d tokens", len(encoded) - len(fitting), limit)
    if not fitting:
        raise DataError(f"every prompt is longer than the target allows with its completion: {limit} tokens")
    # Neighbours of similar length share a batch, so little of it is padding.
    fitting.sort(key=lambda entry: len(entry.input_ids))
    stops = stop_token_ids(args.target_model, tokenizer)
    started, tokens = time.monotonic(), 0
    for first in range(0, len(fitting), args.batch_size):
        batch = fitting[first : first + args.batch_size]
        completions = complete_batch(
            model, [entry.input_ids for entry in batch], max_new_tokens=args.max_new_tokens, stop_ids=stops
        )
        for entry, completion in zip(batch, completions, strict=True):
            row = _row(tokenizer, entry, completion, stops)
            stream.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            tokens += len(completion.token_ids)
        stream.flush()
        os.fsync(stream.fileno())
        rate = tokens / max(time.monotonic() - started, 1e-9)
        log.info("completed %d of %d prompts, %.1f tokens/s", first + len(batch), len(fitting), rate)
    return len(fitting)


@torch.inference_mode()
def complete_batch(
    model: Any, prompts: Sequence[list[int]], *, max_new_tokens: int, stop_ids: frozenset[int]
) -> list[Completion]:
    """Continue several prompts greedily; finished ones leave the batch, so they cost nothing further.

    Args:
        model: a causal language model of transformers.
        prompts: token ids, none empty; padded on the left here.
        max_new_tokens: most tokens per completion.
        stop_ids: ids that end a completion.

    Returns:
        One completion per prompt, in order.
    """
    device = model.get_input_embeddings().weight.device
    ids, mask = _left_padded(prompts, device)
    cache = DynamicCache(config=model.config)
    cached = {cache_argument(model): cache, "use_cache": True}
    produced: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **cached
        ).logits
        chosen = logits[:, -1].argmax(-1)
        keep = []
        # host sync: every token is needed here to know which sequences have ended.
        for row, (index, token) in enumerate(zip(alive, chosen.tolist(), strict=True)):
            produced[index].append(token)
            if token not in stop_ids:
                keep.append(row)
        if not keep:
            break
        if len(keep) < len(alive):
            rows = torch.tensor(keep, device=device)
            cache.batch_select_indices(rows)
            chosen, mask, alive = chosen[rows], mask[rows], [alive[row] for row in keep]
        ids = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
    return [Completion(tokens, is_cut_off=tokens[-1] not in stop_ids) for tokens in produced]


def _left_padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _row(
    tokenizer: Any, entry: EncodedPrompt, completion: Completion, stops: frozenset[int]
) -> dict[str, Any]:
    spoken = [token for token in completion.token_ids if token not in stops]
    answer = {"role": "assistant", "content": tokenizer.decode(spoken)}
    return {
        "id": entry.prompt.id,
        "domain": entry.prompt.domain,
        "messages": [*entry.prompt.messages, answer],
        "finish_reason": "length" if completion.is_cut_off else "stop",
        # The text alone is not enough: tokenizing it again does not always give what the target said.
        "completion_ids": completion.token_ids,
    }


def _settings(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    config = json.loads((args.target_model / "config.json").read_text())
    return {
        "target": {
            key: config.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        },
        "chat_template": tokenizer.chat_template,
        "decoding": "greedy",
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
    }


@contextmanager
def _locked_output(output: Path, settings: dict[str, Any]) -> Iterator[TextIO]:
    """Open the output for appending, alone, after a check that it was made with the same settings."""
    record = output.with_name(output.name + ".settings.json")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        opened = output.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output cannot be written: {output} ({error.strerror or error}); name a file"
        ) from error
    with opened as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another generate writes to this output: {output}") from error
        _check_settings(output, record, settings)
        _drop_torn_line(output)
        stream.seek(0, os.SEEK_END)
        yield stream


def _check_settings(output: Path, record: Path, settings: dict[str, Any]) -> None:
    if record.is_file():
        known = json.loads(record.read_text())
        keys = settings.keys() | known.keys()
        different = sorted(key for key in keys if known.get(key) != settings.get(key))
        if different:
            raise ConfigError(
                f"{output} was made with other settings ({', '.join(different)}): "
                "repeat them or choose another --output"
            )
        return
    if output.stat().st_size:
        raise ConfigError(f"{output} exists and {record.name} does not: choose another --output")
    temporary = record.with_name(record.name + ".tmp")
    temporary.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    temporary.replace(record)


def _drop_torn_line(output: Path) -> None:
    """Cut off what a crash left behind the last whole line."""
    with output.open("r+b") as stream:
        content = stream.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.warning("dropping an unfinished line at the end of %s", output)
            stream.truncate(whole)


def _ids_in(output: Path) -> set[str]:
    with output.open(encoding="utf-8") as stream:
        return {str(json.loads(line)["id"]) for line in stream}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device is unknown: {name}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device is not there: {name}; {torch.cuda.device_count()} CUDA devices visible")
    return device
