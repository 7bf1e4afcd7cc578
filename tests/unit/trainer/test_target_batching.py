"""The check at the start: targets whose batches differ from single sequences are refused, others are not."""

from __future__ import annotations

import pytest
import torch

from tests.support.families import MASK_ID, save_family
from tests.support.tiny import tiny_samples, tiny_target, write_tiny_corpus
from tests.support.trainer_runs import read_status, run_here, settings_for
from trainer.data.corpus import Corpus
from trainer.errors import ConfigError
from trainer.target.batching import TOLERANCES, check_batching
from trainer.target.capture import Target
from trainer.target.loader import load_target

LAYER_IDS = (1, 5)


def mix_rows(states):
    return states + 0.05 * states.mean(dim=0, keepdim=True)


def look_at_padding(states):
    return states + 0.05 * states.mean(dim=1, keepdim=True)


def carry_over(states):
    return states + 0.05 * torch.cat([torch.zeros_like(states[:1]), states[:-1]])


def break_down(states):
    return states * float("nan") if states.shape[0] > 1 else states


LEAKS = {f.__name__: f for f in (mix_rows, look_at_padding, carry_over, break_down)}


def leaky(target: Target, layer: int, leak) -> Target:
    """The target with one layer that does something to its states."""
    module = target._body.layers[layer]
    forward = module.forward

    def changed(*args, **kwargs):
        out = forward(*args, **kwargs)
        return (leak(out[0]), *out[1:]) if isinstance(out, tuple) else leak(out)

    module.forward = changed
    return target


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return open_corpus(tmp_path_factory.mktemp("corpus"), tiny_samples(12))


def open_corpus(folder, rows) -> Corpus:
    return Corpus.open(write_tiny_corpus(folder, rows), max_seq_len=64, vocab_size=97)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_5_text"])
def test_a_sound_target_passes_in_every_dtype(tmp_path, corpus, name: str, dtype: torch.dtype) -> None:
    target = load_target(save_family(name, tmp_path), device="cpu", dtype=dtype, mask_token_id=MASK_ID)

    check = check_batching(target, corpus, LAYER_IDS)

    assert set(check.by_layer) == set(LAYER_IDS)
    assert check.worst[1] <= check.tolerance / 2, check
    assert len(set(check.lengths)) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leak", LEAKS)
def test_a_target_that_leaks_is_refused_with_layer_difference_and_tolerance(
    tmp_path, corpus, leak: str, dtype: torch.dtype
) -> None:
    target = load_target(tiny_target(tmp_path), device="cpu", dtype=dtype)
    strength = 1 if dtype == torch.float32 else 20
    leaky(target, 4, lambda states: states + strength * (LEAKS[leak](states) - states))

    with pytest.raises(ConfigError) as refused:
        check_batching(target, corpus, LAYER_IDS)

    text = str(refused.value)
    assert "layer 5 differs by" in text
    assert f"tolerance {TOLERANCES[dtype]:g} for {str(dtype).removeprefix('torch.')}" in text
    assert "data.max_batch_size = 1" in text
    assert "\n" not in text


def test_layers_in_front_of_the_leak_are_not_blamed(tmp_path, corpus) -> None:
    target = leaky(load_target(tiny_target(tmp_path), device="cpu", dtype=torch.float32), 4, mix_rows)

    check_batching(target, corpus, (1, 3))


@pytest.mark.parametrize("count", [1, 2])
def test_a_corpus_of_one_or_two_samples_is_enough_to_see_a_leak(tmp_path, count: int) -> None:
    corpus = open_corpus(tmp_path / "data", tiny_samples(count, min_length=20))
    target = leaky(load_target(tiny_target(tmp_path), device="cpu", dtype=torch.float32), 2, look_at_padding)

    with pytest.raises(ConfigError, match="in a batch than alone"):
        check_batching(target, corpus, LAYER_IDS)


def test_a_run_on_a_leaking_target_ends_while_loading(tmp_path, monkeypatch) -> None:
    model, data = tiny_target(tmp_path), write_tiny_corpus(tmp_path / "data")
    monkeypatch.setattr(
        "trainer.assembly.load_target",
        lambda *args, **kwargs: leaky(load_target(*args, **kwargs), 1, mix_rows),
    )

    with pytest.raises(ConfigError, match="in a batch than alone"):
        run_here(settings_for(model, data, tmp_path / "out"))

    status = read_status(tmp_path / "out" / "run")
    assert status["phase"] == "loading"
    assert "in a batch than alone" in status["message"]
