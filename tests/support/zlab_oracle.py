"""Our exports beside z-lab's own `dflash` package: it loads them, decodes, and the figures are compared.

    python -m tests.support.zlab_oracle --target DIR --drafter DIR --prompts FILE.jsonl [--max-new-tokens N]

prints both acceptance lengths and leaves with 1 when they differ by more than 0.02 or a text differs from
plain decoding. The package lives in a folder of its own below `.cache` and only a subprocess ever sees it: in
our environment its console script and module would stand beside ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.data.chat import encode_prompt
from trainer.data.pretrained import get_tokenizer, load_config, supports_sdpa
from trainer.data.prompts import read_prompts
from trainer.drafter.exported import load_drafter
from trainer.eval.speculative import speculative_generate
from trainer.target.loader import load_target

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "dflash==0.1.0"
SHA256 = "b3fe38d9413efc30a952c8b38b34f1dcc696ba6d7b865acbf540a34cc53afaa2"
FOLDER = REPOSITORY / ".cache" / "zlab-dflash-0.1.0"
ALLOWED_DIFFERENCE = 0.02
INSTALL_LIMIT_S = 300
DECODE_LIMIT_S = 7200


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What both made of the same prompts."""

    oracle: dict[str, Any]
    """the worker's record"""
    ours: list[dict[str, Any]]
    """per prompt: token_ids, accept_counts (last block whole), plain_ids"""

    @property
    def our_length(self) -> float:
        """Mean over prompts of each prompt's mean, last block whole: what `eval` prints."""
        return _mean_of_means([entry["accept_counts"] for entry in self.ours])

    @property
    def our_cut_length(self) -> float:
        """The same, with the last block cut at stop token or limit as the oracle counts it."""
        return _mean_of_means([cut_counts(entry) for entry in self.ours])

    @property
    def oracle_length(self) -> float:
        """The oracle's own figure."""
        return _mean_of_means([entry["accept_counts"] for entry in self.oracle["prompts"]])

    @property
    def different_texts(self) -> list[int]:
        """Prompts where oracle, speculative and plain decoding do not say the same."""
        return [
            index
            for index, (own, its) in enumerate(zip(self.ours, self.oracle["prompts"], strict=True))
            if not own["token_ids"] == own["plain_ids"] == its["token_ids"]
        ]


def cut_counts(entry: dict[str, Any]) -> list[int]:
    """Tokens kept per verify: the prefill gives the first token, the last block ends where the text does."""
    counts = list(entry["accept_counts"])
    if counts:
        counts[-1] = len(entry["token_ids"]) - 1 - sum(counts[:-1])
    return counts


def install_package(folder: Path = FOLDER) -> Path:
    """Fetch the package once, by name and digest; returns the folder for PYTHONPATH.

    Raises:
        RuntimeError: the package index cannot be reached, or gives another file.
    """
    if (folder / "dflash" / "model.py").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        words = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        words += ["--target", f"{scratch}/site", "--requirement", str(wanted)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words],
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"the oracle {PACKAGE} cannot be installed: is the package index reachable? "
                f"pip said: {done.stderr.strip()[-500:]}"
            )
        try:
            Path(scratch, "site").rename(folder)
        except OSError:
            # another test process was first
            if not (folder / "dflash" / "model.py").is_file():
                raise
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both are to decode greedily, in fp32: in bf16 blocks and single steps part at ties.

    `prompts` are token ids; `stop_ids` None takes the target's; `mask_token_id` is for a target whose
    tokenizer cannot say one, the drafter's is what counts.
    """

    target_dir: Path
    drafter_dir: Path
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    block_size: int | None = None
    stop_ids: Collection[int] | None = None
    device: str = "cpu"
    mask_token_id: int | None = None


def compare(cases: Sequence[Case], *, package: Path) -> list[Comparison]:
    """Decode every case with both; the oracle runs in one subprocess, `package` is `install_package`'s."""
    prepared = [_decode(case) for case in cases]
    records = _ask([request for request, _ in prepared], package)
    return [Comparison(oracle=record, ours=ours) for record, (_, ours) in zip(records, prepared, strict=True)]


def _decode(case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Decode a case with ours; returns the oracle's request and our results."""
    device, max_new_tokens, block_size = case.device, case.max_new_tokens, case.block_size
    dtype = torch.float32
    target = load_target(case.target_dir, device=device, dtype=dtype, mask_token_id=case.mask_token_id)
    drafter = load_drafter(case.drafter_dir, device=device, dtype=dtype)
    stops = sorted(target.info.stop_ids if case.stop_ids is None else case.stop_ids)
    ours = []
    for ids in case.prompts:
        own, plain = (
            speculative_generate(
                target, kind, ids, max_new_tokens=max_new_tokens, eos_ids=stops, block_size=block_size
            )
            for kind in (drafter, None)
        )
        ours.append(
            {"token_ids": own.token_ids, "accept_counts": own.accept_counts, "plain_ids": plain.token_ids}
        )
    request = {
        "target": str(case.target_dir.resolve()),
        "drafter": str(case.drafter_dir.resolve()),
        "prompts": [list(ids) for ids in case.prompts],
        "max_new_tokens": max_new_tokens,
        "stop_ids": stops,
        "block_size": block_size,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": "sdpa" if supports_sdpa(load_config(case.target_dir)) else "eager",
    }
    return request, ours


def _ask(requests: list[dict[str, Any]], package: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        question, answer = Path(scratch) / "request.json", Path(scratch) / "result.json"
        question.write_text(json.dumps(requests))
        environ = os.environ | {"PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("zlab_worker.py")), str(question), str(answer)],
            env=environ,
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=DECODE_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the oracle failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
        records: list[dict[str, Any]] = json.loads(answer.read_text())
    return records


def _mean_of_means(counts: Sequence[Sequence[int]]) -> float:
    return statistics.mean(statistics.mean(one) for one in counts if one)


def main() -> int:
    """Compare on a prompt file and print the figures; 1 when they part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--max-prompts", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--block-size", type=int, metavar="B")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    tokenizer = get_tokenizer(args.target, needs_chat_template=True)
    prompts = read_prompts(args.prompts).prompts[: args.max_prompts]
    case = Case(
        target_dir=args.target,
        drafter_dir=args.drafter,
        prompts=[encode_prompt(tokenizer, prompt.messages) for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        block_size=args.block_size,
        device=args.device,
    )
    [found] = compare([case], package=install_package())
    sys.stdout.write(render(found))
    is_same = abs(found.our_cut_length - found.oracle_length) <= ALLOWED_DIFFERENCE
    return 0 if is_same and not found.different_texts else 1


def render(found: Comparison) -> str:
    """Lay the comparison out for people."""
    oracle = found.oracle
    trouble = {name: oracle[name] for name in ("missing", "unexpected", "mismatched") if oracle[name]}
    return (
        f"oracle                 {PACKAGE}, {oracle['tensors']} tensors loaded, {trouble or 'none missing'}\n"
        f"prompts                {len(found.ours)}, texts that differ: {len(found.different_texts)}\n"
        f"acceptance length      {found.our_length:.4f} ours, as eval counts (last block whole)\n"
        f"                       {found.our_cut_length:.4f} ours, last block cut as the oracle counts\n"
        f"                       {found.oracle_length:.4f} oracle\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
