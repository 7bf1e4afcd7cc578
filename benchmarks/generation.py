"""Completions by slots against plain batches, in one process: `python -m benchmarks.generation --help`.

Needs a target model, so it is no topic of `python -m benchmarks`. Prints tokens/s of both ways and the share
of prompts whose tokens are the same; on a GPU in bf16 a few differ where two tokens are equally likely.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.data.chat import encode_prompt
from trainer.data.decoding import Completion, DecodingStats, Request
from trainer.data.plain_decoding import complete_batch
from trainer.data.pretrained import get_tokenizer, load_causal_lm, stop_token_ids
from trainer.data.prompts import read_prompts
from trainer.data.target_decoding import DecodingLimits, Target


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(arguments)
    tokenizer = get_tokenizer(args.target_model, needs_chat_template=True)
    stops = stop_token_ids(args.target_model, tokenizer)
    prompts = read_prompts(args.prompts).prompts
    chosen = [prompts[index % len(prompts)] for index in range(args.count or len(prompts))]
    ids = sorted((encode_prompt(tokenizer, prompt.messages) for prompt in chosen), key=len, reverse=True)
    limits = DecodingLimits(max_new_tokens=args.max_new_tokens, stop_ids=stops, batch_size=args.batch_size)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)

    stats, slots = _by_slots(Target(args.target_model, device=device, dtype=dtype), ids, limits)
    seconds, plain = _plainly(load_causal_lm(args.target_model, device=device, dtype=dtype), ids, limits)

    said = [len(completion.token_ids) for completion in plain]
    same = statistics.mean(mine == theirs for mine, theirs in zip(slots, plain, strict=True))
    print(
        f"{len(ids)} prompts of {len(ids[-1])}-{len(ids[0])} tokens, completions of {min(said)}-{max(said)}"
    )
    print(f"plain batches of {args.batch_size}: {sum(said) / seconds:,.1f} tokens/s")
    print(
        f"{args.batch_size} slots: {stats.tokens_per_s:,.1f} tokens/s, "
        f"{100 * stats.slots_in_use_ratio:.0f} % in use"
    )
    print(f"ratio {stats.tokens_per_s * seconds / sum(said):.2f}, same tokens {100 * same:.1f} %")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    add = parser.add_argument
    add("--target-model", type=Path, required=True, metavar="DIR")
    add("--prompts", type=Path, default=Path("demo/prompts/train.jsonl"), metavar="FILE")
    add("--count", type=int, metavar="N", help="prompts; the file is repeated or cut (default: all of it)")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--batch-size", type=int, default=32, metavar="B")
    add("--device", default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(arguments)


def _by_slots(
    target: Target, ids: list[list[int]], limits: DecodingLimits
) -> tuple[DecodingStats, list[Completion]]:
    found: dict[int, Completion] = {}
    stats = target.decode(
        [Request(index, prompt) for index, prompt in enumerate(ids)],
        limits,
        lambda finished: found.update({request.key: completion for request, completion in finished}),
    )
    return stats, [found[index] for index in range(len(ids))]


def _plainly(
    model: torch.nn.Module, ids: list[list[int]], limits: DecodingLimits
) -> tuple[float, list[Completion]]:
    size = limits.batch_size or len(ids)
    started = time.monotonic()
    plain = [
        completion
        for first in range(0, len(ids), size)
        for completion in complete_batch(
            model,
            ids[first : first + size],
            max_new_tokens=limits.max_new_tokens,
            stop_ids=limits.stop_ids,
        )
    ]
    return time.monotonic() - started, plain


if __name__ == "__main__":
    raise SystemExit(main())
