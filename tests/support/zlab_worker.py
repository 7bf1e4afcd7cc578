"""Decodes prompts with z-lab's own `dflash` package; run as a script, with that package on PYTHONPATH.

Takes a file with a list of requests (target, drafter, prompts as token ids, limits) and writes one with a
record for each, both JSON.
Knows nothing of ours, so that what it says is independent. Started by `tests.support.zlab_oracle` only.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from dflash import model as zlab
from transformers import AutoModelForCausalLM


def main(request_path: str, result_path: str) -> None:
    requests = json.loads(Path(request_path).read_text())
    Path(result_path).write_text(json.dumps([answer(request) for request in requests]))


def answer(request):
    device, dtype = request["device"], getattr(torch, request["dtype"])
    if device == "cpu":
        # the package times with CUDA events only
        zlab._cuda_time = time.perf_counter
    torch.manual_seed(0)
    drafter, loading = zlab.DFlashDraftModel.from_pretrained(
        request["drafter"], dtype=dtype, local_files_only=True, output_loading_info=True
    )
    target = AutoModelForCausalLM.from_pretrained(
        request["target"], dtype=dtype, local_files_only=True, attn_implementation=request["attention"]
    )
    drafter, target = drafter.eval().to(device), target.eval().to(device)
    results = []
    for ids in request["prompts"]:
        out = zlab.dflash_generate(
            drafter,
            target,
            torch.tensor([ids], device=device),
            max_new_tokens=request["max_new_tokens"],
            stop_token_ids=request["stop_ids"] or None,
            block_size=request["block_size"],
            return_stats=True,
        )
        results.append(
            {"token_ids": out.output_ids[0, len(ids) :].tolist(), "accept_counts": out.acceptance_lengths}
        )
        sys.stderr.write(f"oracle: prompt {len(results)} of {len(request['prompts'])}\n")
    return {
        "missing": sorted(loading["missing_keys"]),
        "unexpected": sorted(loading["unexpected_keys"]),
        "mismatched": sorted(str(entry) for entry in loading["mismatched_keys"]),
        "tensors": len(drafter.state_dict()),
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids),
        "prompts": results,
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
