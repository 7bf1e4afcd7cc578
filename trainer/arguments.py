"""The flags of `prepare`, `generate`, `eval`, `export`, `import`, and those of `plan` alone.

Called by `trainer.__main__` before it imports a command's own module, so that help and mistakes answer at
once although those modules bring torch. Must not import anything heavy, nor check a value: that is the
command's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.config import DTYPE_CHOICES, shorten, why_unusable

DEFAULT_MAX_NEW_TOKENS = 128
"""Length limit of `eval`, per prompt."""
DTYPE_NAMES = (*DTYPE_CHOICES, "bfloat16", "float32")
"""What `generate` and `eval` can load weights as."""


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `prepare`."""
    add = parser.add_argument
    add(
        "--target-model",
        type=given_path,
        required=True,
        metavar="DIR",
        help="for its tokenizer and chat template",
    )
    add(
        "--input",
        type=given_path,
        required=True,
        metavar="PATH",
        help="chats: JSONL, Parquet, Arrow, or a folder",
    )
    add(
        "--output",
        type=given_path,
        required=True,
        metavar="DIR",
        help="folder for the samples and report.json",
    )
    add(
        "--max-seq-len",
        type=int,
        default=8192,
        metavar="N",
        help="longest sample, tokens (%(default)s)",
    )
    add(
        "--held-out-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="share kept apart by a hash of the question (%(default)s)",
    )
    add(
        "--thinking",
        choices=("template", "on", "off"),
        default="template",
        help="the template's thinking switch where a row does not set it (%(default)s)",
    )


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `generate`."""
    add = parser.add_argument
    add("--target-model", type=given_path, metavar="DIR", help="target model directory; not with --base-url")
    add("--prompts", type=given_path, metavar="FILE", help="prompts, JSONL")
    add("--output", type=given_path, required=True, metavar="FILE", help="chat JSONL; continued if it exists")
    add("--max-new-tokens", type=int, default=512, metavar="N", help="longest completion (%(default)s)")
    add("--batch-size", type=int, metavar="B", help="prompts at once (32, on CUDA 256)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    add(
        "--dtype",
        choices=DTYPE_NAMES,
        default="float32",
        help="of weights (%(default)s); auto = bf16 on a GPU, fast = bf16 wherever it is faster, else fp32",
    )
    add(
        "--thinking",
        choices=("template", "on", "off"),
        default="template",
        help="the chat template's thinking switch (%(default)s: as it is without one)",
    )
    add_sampling_arguments(parser)
    add_server_arguments(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `generate` by which a server completes the prompts."""
    text = "Any server with OpenAI's chat completions; its key is read from OPENAI_API_KEY."
    add = parser.add_argument_group("completions by a server", text).add_argument
    add("--base-url", metavar="URL", help="such as http://host:8000/v1")
    add("--model", metavar="NAME", help="the target's name there")
    add("--concurrency", type=int, default=16, metavar="N", help="requests at once (%(default)s)")
    add(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one attempt, all of it (%(default)s)",
    )
    add("--max-tries", type=int, default=6, metavar="N", help="attempts per prompt (%(default)s)")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `generate` by which the target invents its own prompts."""
    add = parser.add_argument_group("prompts from the target itself").add_argument
    add("--sample-prompts", type=int, metavar="N", help="draw N prompts from the target, then complete them")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (%(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of the draws (%(default)s)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest of this mass (%(default)s)",
    )
    add("--prompt-max-tokens", type=int, default=256, metavar="N", help="longest prompt drawn (%(default)s)")


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `eval`."""
    add = parser.add_argument
    add(
        "--target-model", required=True, type=given_path, metavar="DIR", help="the target, with its tokenizer"
    )
    add("--drafter", required=True, type=given_path, metavar="DIR", help="an exported drafter")
    add("--prompts", required=True, type=given_path, metavar="FILE.jsonl", help="held-out prompts")
    add(
        "--max-new-tokens",
        type=int,
        default=DEFAULT_MAX_NEW_TOKENS,
        metavar="N",
        help=f"length limit per prompt (default {DEFAULT_MAX_NEW_TOKENS})",
    )
    add(
        "--block-size",
        metavar="B[,B...]",
        help="positions per block, several to compare them (default: the drafter's own)",
    )
    add(
        "--max-prompts", type=int, metavar="N", help="use N prompts, in turn from every domain (default: all)"
    )
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    add(
        "--dtype",
        choices=DTYPE_NAMES,
        default="auto",
        help="of weights: auto = bf16 on a GPU, fp32 on the CPU, where texts are compared exactly; "
        "fast = bf16 wherever it is faster (default auto)",
    )
    add("--batch-size", type=int, metavar="N", help="prompts at once (default: 8 on the CPU, 32 on a GPU)")
    add("--temperature", type=float, default=0.0, metavar="T", help="sample at T (default 0: greedy)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="keep the likeliest tokens up to this probability (default 1)",
    )
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default 0: all)")
    add(
        "--scheme",
        choices=("deterministic", "rejection"),
        help="how sampled drafts are verified (default deterministic)",
    )
    add("--seed", type=int, metavar="N", help="seed of the sampling (default 0)")
    add(
        "--thinking",
        choices=("template", "on", "off"),
        default="template",
        help="whether the target thinks, where its template can tell (default: the template's own choice)",
    )
    add("--no-speed", action="store_true", help="leave out the comparison with plain decoding")
    add("--json", type=given_path, metavar="FILE", help="write the full record there")
    add("--markdown", type=given_path, metavar="FILE", help="write it as tables for people")
    add("--plot", type=given_path, metavar="FILE.png", help="write it as a figure (needs matplotlib)")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags that `plan` has on top of those of `train`."""
    add = parser.add_argument
    add("--json", type=given_path, metavar="FILE", help="write the full record there")
    add("--no-measure", action="store_true", help="load no weights: memory only, and a split by counted work")
    add("--gpus", type=positive, metavar="N", help="divide N GPUs (default: as many as torch sees)")
    add(
        "--gpu-memory-gib",
        type=float,
        metavar="G",
        help="memory of each GPU (default: of the present ones)",
    )


def given_path(text: str) -> Path:
    """Read a path that a file system can hold.

    Raises:
        argparse.ArgumentTypeError: it is empty, or the system refuses to look for it.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, the current folder is .")
    reason = why_unusable(text)
    if reason:
        raise argparse.ArgumentTypeError(f"the path is unusable: {shorten(text)} ({reason})")
    return Path(text)


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `export`."""
    add = parser.add_argument
    add(
        "--check",
        type=given_path,
        metavar="DIR",
        help="only verify that engines will load it as it was trained",
    )
    add("--target-model", type=given_path, metavar="DIR", help="with --check: also compare with this target")
    add("--drafter", type=given_path, metavar="DIR", help="an exported or published drafter to write again")
    add(
        "--output",
        type=given_path,
        metavar="DIR",
        help="write it there, with every key that some engine reads",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace an export that stands at --output; nothing else is ever replaced",
    )


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `import`."""
    add = parser.add_argument
    add("--drafter", required=True, type=given_path, metavar="DIR", help="a published or exported drafter")
    add(
        "--target-model",
        required=True,
        type=given_path,
        metavar="DIR",
        help="the target that it was trained for",
    )
    add(
        "--output",
        required=True,
        type=given_path,
        metavar="DIR",
        help="the run's output folder; a new lineage",
    )
