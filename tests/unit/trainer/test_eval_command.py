"""The `eval` command: figures by hand, and the whole of it on a tiny target."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny_drafter import make_drafter, talkative_target
from trainer.arguments import add_eval_arguments
from trainer.checkpoint.export import copy_export, export_drafter, read_target_meta
from trainer.data.encoded_prompts import encode_prompts
from trainer.data.prompts import Prompt
from trainer.errors import CheckpointError, ConfigError, DataError, DependencyError
from trainer.eval import command, plot
from trainer.eval.command import EvalRequest, evaluate, parse_block_sizes, run_eval, sampling_of
from trainer.eval.markdown import render_markdown
from trainer.eval.report import MeasuredBlock, MeasuredPrompt, build_report, render_table
from trainer.eval.speculative import SpeculativeResult, speculative_generate
from trainer.eval.speed import Timed, find_divergences, speed_record
from trainer.eval.statistics import Counted, by_context_length, interval_of_mean
from trainer.lifecycle.results import check_results, write_result
from trainer.target.identity import SAMPLE_KEY, export_identity, target_fingerprint
from trainer.target.loader import load_target


def _measured(name: str, counts: list[int], *, domain: str | None = "a", tokens: int = 10) -> MeasuredPrompt:
    result = SpeculativeResult(
        token_ids=list(range(1 + sum(counts))), accept_counts=counts, target_forwards=1 + len(counts)
    )
    return MeasuredPrompt(id=name, domain=domain, prompt_tokens=tokens, speculative=result)


def _report(measured: list[MeasuredPrompt], *, size: int = 4, speed: dict | None = None, **setting) -> dict:
    block = MeasuredBlock(block_size=size, prompts=measured, seconds=2.0, speed=speed)
    return build_report([block], setting=setting)


def test_figure_is_the_mean_of_prompt_means_not_of_verifies() -> None:
    report = _report([_measured("x", [4, 4]), _measured("y", [1, 1, 1, 1, 1, 1]), _measured("z", [])])

    (block,) = report["block_sizes"]
    assert report["acceptance_length"] == block["acceptance_length"] == 2.5
    assert report["micro_acceptance_length"] == 14 / 8
    assert report["acceptance_rate"] == 0.5
    assert (report["prompts"], report["measured_prompts"], report["verifies"]) == (3, 2, 8)
    assert block["per_prompt"][2]["acceptance_length"] is None
    assert block["tokens_s"] == 17 / 2.0


def test_acceptance_by_offset_is_told_with_and_without_its_condition() -> None:
    (block,) = _report([_measured("x", [4, 4, 1]), _measured("y", [2, 1, 3, 1])])["block_sizes"]

    assert [row["verifies"] for row in block["offsets"]] == [7, 4, 3]
    assert [row["conditional"] for row in block["offsets"]] == [4 / 7, 3 / 4, 2 / 3]
    assert [row["prefix"] for row in block["offsets"]] == [4 / 7, 3 / 7, 2 / 7]
    # the mean over verifies is one plus the sum of the prefix shares
    assert block["micro_acceptance_length"] == pytest.approx(1 + sum(r["prefix"] for r in block["offsets"]))


def test_an_offset_that_was_never_reached_is_unknown() -> None:
    (block,) = _report([_measured("x", [1, 1])])["block_sizes"]

    assert [row["conditional"] for row in block["offsets"]] == [0.0, None, None]
    assert [row["prefix"] for row in block["offsets"]] == [0.0, 0.0, 0.0]


def test_domains_have_their_own_figures() -> None:
    measured = [
        _measured("x", [4], domain="code"),
        _measured("y", [2], domain="lists"),
        _measured("z", [1], domain=None),
        _measured("w", [], domain="lists"),
    ]

    (block,) = _report(measured)["block_sizes"]

    assert {name: group["acceptance_length"] for name, group in block["domains"].items()} == {
        "code": 4.0,
        "lists": 2.0,
        "none": 1.0,
    }
    assert block["domains"]["lists"]["prompts"] == 2
    assert block["domains"]["lists"]["measured_prompts"] == 1


def test_context_length_is_what_stood_before_each_verify() -> None:
    prompts = [
        Counted(prompt_tokens=126, accept_counts=[2, 3]),  # contexts of 127 and 129 tokens
        Counted(prompt_tokens=10, accept_counts=[1]),
        Counted(prompt_tokens=200_000, accept_counts=[4]),
    ]

    pieces = by_context_length(prompts)

    assert [(piece["above"], piece["upto"], piece["verifies"]) for piece in pieces] == [
        (0, 128, 2),
        (128, 256, 1),
        (131072, None, 1),
    ]
    assert [piece["acceptance_length"] for piece in pieces] == [1.5, 3.0, 4.0]
    assert [piece["prompts"] for piece in pieces] == [2, 1, 1]


def test_interval_holds_the_mean_and_narrows_with_more_prompts() -> None:
    few = [Counted(prompt_tokens=1, accept_counts=[n]) for n in (1, 2, 3, 4)]

    low, high = interval_of_mean(few)
    narrow = interval_of_mean(few * 25)

    assert low < 2.5 < high
    assert narrow[1] - narrow[0] < (high - low) / 2
    assert interval_of_mean(few) == [low, high]
    assert interval_of_mean(few[:1]) is None


def test_speedup_is_the_ratio_over_all_rounds() -> None:
    plain, fast = Timed(), Timed()
    for turn, slowness in enumerate((1.0, 3.0)):
        ones = SpeculativeResult(token_ids=[1], accept_counts=[1] * 8, decode_s=8.0 * slowness)
        fours = SpeculativeResult(
            token_ids=[1], accept_counts=[4, 4], decode_s=2.0 * slowness, draft_s=0.5 * slowness
        )
        plain.add(turn, 0, ones)
        fast.add(turn, 0, fours)

    record = speed_record(plain, fast, [])

    assert record["plain_ms_per_token"] == 2000.0
    assert record["speculative_ms_per_token"] == 500.0
    assert record["speedup"] == 4.0
    assert record["speedup_per_round"] == [4.0, 4.0]
    assert record["speedup_median"] == 4.0
    assert record["draft_time_ratio"] == 0.25
    assert (record["compared_prompts"], record["identical_outputs"]) == (1, 1)


def test_outputs_that_part_are_told_with_the_targets_own_preference(tmp_path) -> None:
    target = load_target(talkative_target(tmp_path), device="cpu", dtype=torch.float32)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
    own = [speculative_generate(target, None, ids, max_new_tokens=6, eos_ids=()).token_ids for ids in prompts]
    logits, _ = target.step(torch.tensor([[*prompts[0], *own[0][:3]]]), target.new_cache(), ())
    other = (own[0][3] + 1) % 90
    with torch.no_grad():  # a token that the head cannot tell from the target's choice
        target.head_weight_VD[91] = target.head_weight_VD[own[1][2]]
    plain, fast = Timed(outputs=dict(enumerate(own))), Timed()
    fast.outputs = {0: [*own[0][:3], other, 1, 1], 1: [*own[1][:2], 91, 1, 1, 1], 2: list(own[2])}

    parted, tied = find_divergences(target, prompts, plain, fast)

    assert (parted.prompt, parted.position, parted.is_tie) == (0, 3, False)
    assert parted.logit_gap == pytest.approx(float(logits[-1].max() - logits[-1][other]), abs=1e-4)
    assert (tied.prompt, tied.position, tied.is_tie) == (1, 2, True)
    record = speed_record(plain, fast, [parted, tied])
    assert (record["identical_outputs"], record["diverged_outputs"], record["diverged_at_a_tie"]) == (1, 2, 1)


def test_nothing_measured_is_unknown_not_zero() -> None:
    report = _report([_measured("x", [])])

    assert report["acceptance_length"] is None
    assert report["block_sizes"][0]["context_lengths"] == []
    assert "acceptance length  unknown" in render_table(report)
    assert "unknown" in render_markdown(report)


def test_headline_is_that_of_the_trained_block_size() -> None:
    blocks = [
        MeasuredBlock(block_size=size, prompts=[_measured("x", [length])], seconds=1.0, speed=None)
        for size, length in ((4, 2), (8, 5))
    ]

    assert build_report(blocks, setting={}, trained_block_size=8)["acceptance_length"] == 5.0
    assert build_report(blocks, setting={}, trained_block_size=16)["acceptance_length"] == 2.0


@pytest.mark.parametrize("text", ["", "0", "4,,8", "four", "-4", "4;8", "4.5"])
def test_block_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--block-size takes whole numbers"):
        parse_block_sizes(text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--top-p", "0.9"], "--top-p needs --temperature"),
        (["--scheme", "rejection"], "--scheme needs --temperature"),
        (["--temperature", "-1"], "temperature must be above 0"),
        (["--temperature", "nan"], "temperature must be above 0"),
        (["--temperature", "1", "--top-p", "0"], "top_p must be above 0"),
        (["--temperature", "1", "--top-p", "1.5"], "top_p must be above 0"),
        (["--temperature", "1", "--top-k", "-2"], "top_k must be at least 0"),
        (["--temperature", "1", "--seed", "-2"], "seed must be at least 0"),
    ],
)
def test_sampling_that_cannot_work_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sampling_of(_arguments(*words))


def test_temperature_zero_is_greedy() -> None:
    assert sampling_of(_arguments()) is None
    assert sampling_of(_arguments("--temperature", "0")) is None


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_eval_arguments(parser)
    return parser.parse_args(["--target-model=a", "--drafter=b", "--prompts=c", *words])


class EchoTokenizer:
    """Shows what the chat template was asked for."""

    chat_template = "{{ enable_thinking }}"

    def apply_chat_template(self, turns, **options):
        return f"{turns[-1]['content']} thinking={options.get('enable_thinking', 'unset')}"

    def __call__(self, text, **_options):
        return {"input_ids": [text]}


@pytest.mark.parametrize(("mode", "expected"), [("template", "unset"), ("on", "True"), ("off", "False")])
def test_thinking_is_what_was_asked_for_unless_a_prompt_says_otherwise(mode: str, expected: str) -> None:
    prompts = [
        Prompt("x", None, ({"role": "user", "content": "hello"},)),
        Prompt("y", None, ({"role": "user", "content": "hello"},), thinking=False),
    ]

    first, second = encode_prompts(EchoTokenizer(), prompts, mode).token_ids

    assert first[0].endswith(f"thinking={expected}")
    assert second[0].endswith("thinking=False")


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


def test_eval_measures_all_prompts_and_writes_record_page_and_figure(
    inputs, tmp_path, capsys, caplog
) -> None:
    caplog.set_level("INFO")
    parser = argparse.ArgumentParser()
    add_eval_arguments(parser)
    out = tmp_path / "out"
    words = [f"--{name.replace('_', '-')}={path}" for name, path in inputs.items()]
    files = [f"--json={out}/eval.json", f"--markdown={out}/eval.md", f"--plot={out}/figures/eval.png"]

    code = run_eval(parser.parse_args([*words, *files, "--max-new-tokens=8", "--block-size=4,2,6"]))

    report = json.loads((out / "eval.json").read_text())
    assert code == 0
    assert (report["v"], report["prompts"], report["block_size"]) == (2, 12, 4)
    assert [block["block_size"] for block in report["block_sizes"]] == [4, 2, 6]
    assert report["setting"]["skipped_prompts"] == {"no_prompt": 1}
    assert report["setting"]["code"]["versions"]["torch"]
    assert "block size 6 is larger than the trained one of 4" in report["setting"]["warnings"][0]
    for block in report["block_sizes"]:
        assert block["speed"]["compared_prompts"] == block["speed"]["identical_outputs"] == 12
        assert len(block["speed"]["speedup_per_round"]) == 2
        assert 1.0 <= block["acceptance_length"] < 2.0
        assert len(block["offsets"]) == block["block_size"] - 1
        assert set(block["domains"]) == {"code", "lists"}
    begun = [text for text in caplog.messages if "decoded" not in text and "loading" in text]
    assert begun[0] == f"eval: loading the drafter {inputs['drafter']}"
    assert begun[1].startswith(f"loading the target onto cpu: {inputs['target_model']}, ")
    assert "eval, speed: a warm-up, then plain and speculative decoding in 2 rounds" in caplog.messages
    table = capsys.readouterr().out
    assert f"acceptance length  {report['acceptance_length']:.2f}" in table
    assert "lists" in table
    page = (out / "eval.md").read_text()
    assert "(figures/eval.png)" in page
    assert "| code | 6 |" in page
    assert (out / "figures" / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["eval.json", "eval.md", "figures"]


@pytest.mark.parametrize("flag", ["json_path", "markdown_path", "plot_path"])
def test_eval_replaces_no_file_of_others(inputs, tmp_path, monkeypatch, flag: str) -> None:
    monkeypatch.setattr(command, "load_drafter", lambda *_, **__: pytest.fail("loaded before the refusal"))
    (tmp_path / "mine").write_text('{"figure": 1}')

    with pytest.raises(ConfigError, match=r"--\w+ would replace a file that this command did not write"):
        evaluate(EvalRequest(**inputs, **{flag: tmp_path / "mine"}))
    with pytest.raises(ConfigError, match="names a folder"):
        evaluate(EvalRequest(**inputs, **{flag: tmp_path}))
    with pytest.raises(ConfigError, match="mine is not a folder"):
        evaluate(EvalRequest(**inputs, **{flag: tmp_path / "mine" / "report"}))

    assert (tmp_path / "mine").read_text() == '{"figure": 1}'


def test_eval_replaces_its_own_files_and_takes_each_path_once(tmp_path) -> None:
    report = {"figure": "mean", "setting": {}, "block_sizes": []}
    contents = {"--json": json.dumps(report), "--markdown": "# Acceptance length 2.00 at block size 4"}
    for flag, content in contents.items():
        (tmp_path / flag).write_text(content)
    (tmp_path / "--plot").write_bytes(b"\x89PNG\r\n Creator dflash-train eval")
    paths = {name: tmp_path / f"--{name}" for name in ("json", "markdown", "plot")}
    request = EvalRequest(
        target_model=tmp_path,
        drafter=tmp_path,
        prompts=tmp_path,
        **{f"{name}_path": path for name, path in paths.items()},
    )

    check_results(command._result_files(request))

    with pytest.raises(ConfigError, match="--json and --plot name the same file"):
        check_results(command._result_files(dataclasses.replace(request, plot_path=paths["json"])))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_a_result_is_named_and_leaves_nothing(tmp_path, code: int) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(code, os.strerror(code))

    with pytest.raises(ConfigError, match=rf"cannot write --json .*{os.strerror(code)}; free space or name"):
        write_result("--json", tmp_path / "eval.json", fail)

    assert list(tmp_path.iterdir()) == []


def test_eval_samples_without_speed_and_repeats_itself(inputs) -> None:
    settings = inputs | {
        "max_new_tokens": 5,
        "max_prompts": 4,
        "with_speed": False,
        "sampling": sampling_of(_arguments("--temperature=1", "--scheme=rejection", "--seed=3")),
    }

    first, second = (evaluate(EvalRequest(**settings, batch_size=size)) for size in (1, None))

    assert first["prompts"] == 4
    assert {name: group["prompts"] for name, group in first["block_sizes"][0]["domains"].items()} == {
        "code": 2,
        "lists": 2,
    }
    assert first["figure"].endswith("sampled")
    assert first["setting"]["sampling"]["scheme"] == "rejection"
    assert first["block_sizes"][0]["speed"] is None
    assert [row["accept_counts"] for row in first["block_sizes"][0]["per_prompt"]] == [
        row["accept_counts"] for row in second["block_sizes"][0]["per_prompt"]
    ]


def test_a_figure_without_matplotlib_is_refused_before_anything_is_loaded(
    inputs, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(DependencyError, match=r"dflash-supervisor\[plot\]"):
        evaluate(EvalRequest(**(inputs | {"drafter": Path("nowhere")}), plot_path=tmp_path / "x.png"))


def test_a_figure_can_be_drawn_of_nothing(tmp_path) -> None:
    plot.draw_report(_report([_measured("x", [])], size=1), tmp_path / "x.png")

    assert (tmp_path / "x.png").stat().st_size > 1000


def test_eval_refuses_a_drafter_of_another_target(inputs, tmp_path) -> None:
    export_drafter(make_drafter(vocab_size=98), None, tmp_path / "other")

    with pytest.raises(ConfigError, match="another target"):
        evaluate(EvalRequest(**(inputs | {"drafter": tmp_path / "other"})))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"device": "cuda:77"}, ConfigError),
        ({"device": "abacus"}, ConfigError),
        ({"device": "meta"}, ConfigError),
        ({"drafter": Path("nowhere")}, CheckpointError),
        ({"prompts": Path("nowhere.jsonl")}, DataError),
        ({"max_prompts": 0}, ConfigError),
    ],
)
def test_eval_refuses_what_cannot_work(inputs, change: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        evaluate(EvalRequest(**(inputs | change)))


@pytest.mark.parametrize(
    ("words", "expected"), [([], "float32"), (["--dtype=bf16"], "bfloat16"), (["--dtype=float32"], "float32")]
)
def test_weights_are_evaluated_in_fp32_on_the_cpu_unless_another_dtype_is_named(
    inputs, tmp_path, words: list[str], expected: str
) -> None:
    parser = argparse.ArgumentParser()
    add_eval_arguments(parser)
    given = [f"--{name.replace('_', '-')}={path}" for name, path in inputs.items()]
    limits = ["--max-new-tokens=2", "--max-prompts=1", "--no-speed", f"--json={tmp_path / 'eval.json'}"]

    assert run_eval(parser.parse_args([*given, *limits, *words])) == 0

    assert json.loads((tmp_path / "eval.json").read_text())["setting"]["dtype"] == expected


def test_a_drafter_of_another_target_of_the_same_shape_is_told(inputs, tmp_path) -> None:
    own = target_fingerprint(inputs["target_model"], mask_token_id=3)
    for name, meta in (("own", export_identity(own)), ("other", export_identity(own | {SAMPLE_KEY: "0"}))):
        export_drafter(make_drafter(), meta, tmp_path / name)
    requests = {name: EvalRequest(**(inputs | {"drafter": tmp_path / name})) for name in ("own", "other")}
    copy_export(tmp_path / "other", tmp_path / "copy")

    assert command._config_warnings(requests["own"]) == []
    assert "trained for other weights than those of" in command._config_warnings(requests["other"])[0]
    assert command._config_warnings(EvalRequest(**inputs)) == []
    assert read_target_meta(tmp_path / "copy")[SAMPLE_KEY] == "0"
