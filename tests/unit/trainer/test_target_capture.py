"""Hidden states and stepping of the frozen target, against transformers' own outputs."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import save_family
from tests.support.tiny import HIDDEN, LAYERS, VOCAB, tiny_target
from trainer.errors import ConfigError, DataError
from trainer.target.decode_cache import TargetCache
from trainer.target.loader import load_target

LAYER_IDS = (1, 5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("capture"))


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory, device="cpu", dtype=torch.float32)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def test_golden_03_feature_is_the_residual_stream_after_its_layer(directory, target):
    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    hooked = {}
    for layer in LAYER_IDS:
        reference.model.layers[layer].register_forward_hook(
            lambda _m, _i, output, layer=layer: hooked.__setitem__(layer, output)
        )
    ids = random_ids(2, 17)
    with torch.no_grad():
        expected = reference.model(input_ids=ids, output_hidden_states=True, use_cache=False)

    features, last = target.hidden_states(ids, None, LAYER_IDS, with_last_hidden=True)

    assert features.shape == (2, 17, len(LAYER_IDS), HIDDEN)
    for index, layer in enumerate(LAYER_IDS):
        assert torch.equal(features[:, :, index], hooked[layer])
        assert torch.equal(features[:, :, index], expected.hidden_states[layer + 1])
    assert torch.equal(last, expected.last_hidden_state)


def test_features_follow_the_order_of_the_layer_ids(target):
    ids = random_ids(1, 9)

    forward, _ = target.hidden_states(ids, None, (1, 5))
    backward, _ = target.hidden_states(ids, None, (5, 1))

    assert torch.equal(forward.flip(2), backward)


def test_layers_behind_the_last_tapped_one_are_not_run(target):
    ran = []
    handles = [
        layer.register_forward_hook(lambda *_args, index=index: ran.append(index))
        for index, layer in enumerate(target._body.layers)
    ]
    ids = random_ids(1, 5)

    stopped, last = target.hidden_states(ids, None, (0, 2))
    ran_when_stopped = list(ran)
    ran.clear()
    whole, _ = target.hidden_states(ids, None, (0, 2), with_last_hidden=True)
    for handle in handles:
        handle.remove()

    assert last is None
    # The tap ends the pass inside layer 2's own hook, before later hooks of that layer are reached.
    assert set(ran_when_stopped) <= {0, 1, 2}
    assert set(ran) == set(range(LAYERS))
    assert torch.equal(stopped, whole)


def test_no_hook_outlives_a_call_even_when_it_fails(target):
    with pytest.raises(IndexError):
        target.hidden_states(torch.tensor([[VOCAB + 5]]), None, LAYER_IDS)

    assert not any(layer._forward_hooks for layer in target._body.layers)


def test_golden_12_right_padding_and_batching_leave_valid_rows_unchanged(target):
    long, short = random_ids(1, 21, seed=1), random_ids(1, 12, seed=2)
    padded = torch.cat([short, torch.zeros(1, 9, dtype=torch.int64)], dim=1)
    batch = torch.cat([long, padded])
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[1, 12:] = False

    together, _ = target.hidden_states(batch, mask, LAYER_IDS)
    first, _ = target.hidden_states(long, None, LAYER_IDS)
    second, _ = target.hidden_states(short, None, LAYER_IDS)

    torch.testing.assert_close(together[0], first[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together[1, :12], second[0], atol=1e-5, rtol=1e-5)


def test_left_padding_is_refused(target):
    mask = torch.tensor([[False, True, True]])

    with pytest.raises(DataError, match="not right-padded"):
        target.hidden_states(random_ids(1, 3), mask, LAYER_IDS)


@pytest.mark.parametrize(
    "layer_ids", [(-1,), (LAYERS - 1,), (LAYERS,), (2, 2)], ids=["negative", "last", "beyond", "twice"]
)
def test_layer_ids_that_name_no_usable_layer_are_refused(target, layer_ids):
    with pytest.raises(ConfigError, match=r"within 0\.\.6"):
        target.hidden_states(random_ids(1, 3), None, layer_ids)


def test_stepping_with_a_cache_equals_one_pass(target):
    ids = random_ids(1, 14)
    with torch.no_grad():
        expected = target._model(input_ids=ids, use_cache=False).logits[0]
    expected_features, _ = target.hidden_states(ids, None, LAYER_IDS)
    cache = target.new_cache()

    pieces = [target.step(ids[:, a:b], cache, LAYER_IDS) for a, b in ((0, 6), (6, 7), (7, 14))]

    assert cache.length == 14
    assert not cache.recomputes
    torch.testing.assert_close(torch.cat([p[0] for p in pieces]), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces]), expected_features[0], atol=1e-5, rtol=1e-5)


def test_cropped_tokens_leave_no_trace(target):
    ids = random_ids(1, 10)
    fresh, cropped = target.new_cache(), target.new_cache()
    target.step(ids[:, :6], fresh, ())
    target.step(torch.cat([ids[:, :6], random_ids(1, 7, seed=9)], dim=1), cropped, ())

    cropped.crop(6)

    assert cropped.length == 6
    torch.testing.assert_close(
        target.step(ids[:, 6:], cropped, ())[0], target.step(ids[:, 6:], fresh, ())[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("length", [-1, 4])
def test_crop_outside_the_cache_is_refused(target, length):
    cache = target.new_cache()
    target.step(random_ids(1, 3), cache, ())

    with pytest.raises(ValueError, match=f"cache of 3 tokens to {length}"):
        cache.crop(length)


@pytest.mark.parametrize("trouble", ["raises", "ignores"])
def test_cache_that_does_not_come_back_after_rejected_tokens_is_not_used(
    tmp_path, monkeypatch, caplog, trouble
):
    target = load_target(
        save_family("qwen3_5_text", tmp_path), device="cpu", dtype=torch.float32, mask_token_id=96
    )
    ids = random_ids(1, 12)
    with torch.no_grad():
        expected = target._model(input_ids=ids, use_cache=False).logits[0]
    broken = {"raises": _raise_no_copy, "ignores": lambda _self, length: None}[trouble]
    with monkeypatch.context() as patch:
        patch.setattr(TargetCache, "_put_back", broken)
        cache = target.new_cache()

    target.step(ids[:, :8], cache, (1,))
    target.step(random_ids(1, 4, seed=3), cache, (1,))
    cache.crop(8)
    logits, features = target.step(ids[:, 8:], cache, (1,))

    assert cache.recomputes
    assert features.shape == (4, 1, 64)
    torch.testing.assert_close(logits, expected[8:], atol=1e-4, rtol=1e-4)
    assert "runs the whole prefix at each step" in caplog.text


def _raise_no_copy(_self, _length):
    raise NotImplementedError("no copy")


def test_golden_26_the_target_stays_frozen_while_its_states_train_something(target):
    before = {name: value.clone() for name, value in target._model.state_dict().items()}
    layer = torch.nn.Linear(HIDDEN, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    cache = target.new_cache()

    for seed in range(3):
        features, _ = target.hidden_states(random_ids(2, 8, seed=seed), None, LAYER_IDS)
        target.step(random_ids(1, 3, seed=seed), cache, LAYER_IDS)
        (layer(features) @ torch.ones(3) @ torch.ones(len(LAYER_IDS))).sum().backward()
        optimizer.step()

    assert all(torch.equal(value, before[name]) for name, value in target._model.state_dict().items())
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in target._model.parameters()
    )
    assert not target.embed_weight_VD.requires_grad
    assert not target.head_weight_VD.requires_grad


def test_a_target_works_in_a_thread_that_did_not_load_it(target):
    ids = random_ids(1, 7)
    here, _ = target.hidden_states(ids, None, LAYER_IDS)
    there = []

    thread = threading.Thread(target=lambda: there.append(target.hidden_states(ids, None, LAYER_IDS)[0]))
    thread.start()
    thread.join(60)

    assert torch.equal(here, there[0])
    assert not there[0].requires_grad


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_logits_of_few_rows_are_those_of_the_model(directory, target, rows):
    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    ids = random_ids(1, rows, seed=rows)
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits[0]

    logits, _ = target.step(ids, target.new_cache(), ())

    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
