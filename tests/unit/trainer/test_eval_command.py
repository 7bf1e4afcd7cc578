"""The `eval` command: figures by hand, and the whole of it on a tiny target."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from tests.support.tiny_drafter import make_drafter, talkative_target
from trainer.arguments import add_eval_arguments
from trainer.checkpoint.export import export_drafter
from trainer.errors import CheckpointError, ConfigError, DataError
from trainer.eval.command import evaluate, run_eval
from trainer.eval.report import MeasuredPrompt, build_report, render_table
from trainer.eval.speculative import SpeculativeResult


def _measured(
    name: str, counts: list[int], *, domain: str | None = "a", tokens: int = 10, plain: bool = False
):
    result = SpeculativeResult(
        token_ids=list(range(1 + sum(counts))),
        accept_counts=counts,
        target_forwards=1 + len(counts),
        decode_s=float(len(counts)),
        draft_s=0.25 * len(counts),
    )
    other = None
    if plain:
        ones = [1] * sum(counts)
        other = SpeculativeResult(
            token_ids=result.token_ids,
            accept_counts=ones,
            target_forwards=1 + len(ones),
            decode_s=float(len(ones)),
        )
    return MeasuredPrompt(id=name, domain=domain, prompt_tokens=tokens, speculative=result, plain=other)


def test_figure_is_the_mean_of_prompt_means_not_of_verifies() -> None:
    measured = [_measured("x", [4, 4]), _measured("y", [1, 1, 1, 1, 1, 1]), _measured("z", [])]

    report = build_report(measured, block_size=4, setting={})

    assert report["acceptance_length"] == 2.5
    assert report["acceptance_rate"] == 0.5
    assert report["per_offset"] == [0.25, 0.25, 0.25]
    assert (report["prompts"], report["measured_prompts"], report["verifies"]) == (3, 2, 8)
    assert report["per_prompt"][2]["acceptance_length"] is None


def test_domains_and_context_lengths_have_their_own_figures() -> None:
    measured = [
        _measured("x", [4], domain="code", tokens=100),
        _measured("y", [2], domain="lists", tokens=129),
        _measured("z", [1], domain=None, tokens=10_000),
    ]

    report = build_report(measured, block_size=4, setting={})

    assert {name: group["acceptance_length"] for name, group in report["domains"].items()} == {
        "code": 4.0,
        "lists": 2.0,
        "none": 1.0,
    }
    assert [group["acceptance_length"] for group in report["context_lengths"].values()] == [1.0, 4.0, 2.0]


def test_speedup_compares_the_same_prompts_only() -> None:
    measured = [_measured("x", [4, 4], plain=True), _measured("y", [1, 1, 1])]

    timing = build_report(measured, block_size=4, setting={})["speed"]

    assert timing["compared_prompts"] == timing["identical_outputs"] == 1
    assert timing["plain_ms_per_token"] == 1000.0
    assert timing["speculative_ms_per_token"] == 250.0
    assert timing["speedup"] == 4.0
    assert timing["draft_time_ratio"] == 0.25


def test_nothing_measured_is_unknown_not_zero() -> None:
    report = build_report([_measured("x", [])], block_size=4, setting={})

    assert report["acceptance_length"] is None
    assert report["speed"]["speedup"] is None
    assert "acceptance length  unknown" in render_table(report)


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    export_drafter(make_drafter(), None, tmp_path / "drafter")
    rows = [
        {"id": f"{domain}-{n}", "domain": domain, "prompt": f"say {domain} {n} times"}
        for domain in ("code", "lists")
        for n in range(6)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, [*rows, {"domain": "code"}])) + "\n")
    return {
        "target_model": talkative_target(tmp_path),
        "drafter": tmp_path / "drafter",
        "prompts": prompts,
    }


def test_eval_measures_all_prompts_and_writes_record_and_table(inputs, tmp_path, capsys) -> None:
    parser = argparse.ArgumentParser()
    add_eval_arguments(parser)
    record = tmp_path / "out" / "eval.json"
    words = [f"--{name.replace('_', '-')}={path}" for name, path in inputs.items()]

    code = run_eval(parser.parse_args([*words, "--max-new-tokens", "12", "--json", str(record)]))

    report = json.loads(record.read_text())
    assert code == 0
    assert report["prompts"] == 12
    assert report["setting"]["skipped_prompts"] == {"no_prompt": 1}
    assert report["speed"]["compared_prompts"] == report["speed"]["identical_outputs"] == 8
    assert 1.0 <= report["acceptance_length"] < 2.0
    assert set(report["domains"]) == {"code", "lists"}
    table = capsys.readouterr().out
    assert f"acceptance length  {report['acceptance_length']:.2f}" in table
    assert "lists" in table


def test_eval_can_use_another_block_size(inputs) -> None:
    report = evaluate(**inputs, max_new_tokens=6, block_size=2)

    assert report["setting"]["block_size"] == 2
    assert len(report["per_offset"]) == 1


def test_eval_refuses_a_drafter_of_another_target(inputs, tmp_path) -> None:
    export_drafter(make_drafter(vocab_size=98), None, tmp_path / "other")

    with pytest.raises(ConfigError, match="another target"):
        evaluate(**(inputs | {"drafter": tmp_path / "other"}))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"device": "cuda:77"}, ConfigError),
        ({"device": "abacus"}, ConfigError),
        ({"device": "meta"}, ConfigError),
        ({"drafter": Path("nowhere")}, CheckpointError),
        ({"prompts": Path("nowhere.jsonl")}, DataError),
        ({"block_size": 0}, ConfigError),
    ],
)
def test_eval_refuses_what_cannot_work(inputs, change: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        evaluate(**(inputs | change))


def test_drafter_weights_are_evaluated_in_fp32_on_the_cpu(inputs) -> None:
    assert evaluate(**inputs, max_new_tokens=2)["setting"]["dtype"] == str(torch.float32).removeprefix(
        "torch."
    )
