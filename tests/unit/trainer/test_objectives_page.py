"""The figures on docs/concepts/objectives.md against the code."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from trainer.drafter.objective import dpace_weights
from trainer.pipeline.messages import HiddenStates

PAGE = (Path(__file__).resolve().parents[3] / "docs/concepts/objectives.md").read_text()


def test_bytes_per_token_are_those_of_a_pack() -> None:
    rows = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)

    assert len(rows) == 2
    for _, layers, width, plain, soft in rows:
        features = torch.empty(1, int(layers), int(width), dtype=torch.bfloat16)
        last = torch.empty(1, int(width), dtype=torch.bfloat16)
        assert HiddenStates(features=features).nbytes == int(plain.replace(",", ""))
        assert HiddenStates(features=features, last_hidden=last).nbytes == int(soft.replace(",", ""))


def test_example_of_dpace_weights_is_right() -> None:
    found = re.search(
        r"probabilities ([.\d, ]+) and `α = ([.\d]+)`.*?weights are ([\d., ]+);", PAGE, re.DOTALL
    )
    assert found is not None
    q, wanted = ([float(word) for word in found[group].split(",")] for group in (1, 3))
    mask = torch.tensor([[False, True, True, True]])

    weights = dpace_weights(-torch.tensor([[1.0, *q]]).log(), mask, alpha=float(found[2]))

    torch.testing.assert_close(weights[0, 1:], torch.tensor(wanted), atol=1e-3, rtol=0)
