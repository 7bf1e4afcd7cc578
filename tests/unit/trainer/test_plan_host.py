"""`plan`'s host memory against real objects: packs in the queue, the cache, the pool's buffers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import settings_for
from trainer.data.buckets import bucket_edges, build_epoch_plan
from trainer.data.collate import collate
from trainer.data.corpus import Sample
from trainer.flags import resolve
from trainer.pipeline import transfer
from trainer.pipeline.messages import FeaturePack, HiddenStates
from trainer.pipeline.queues import HiddenStatesQueue
from trainer.pipeline.workers import Board
from trainer.planning.facts import outline_facts
from trainer.target.cache import SampleCache
from trainer.target.loader import load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tiny_target(folder), write_tiny_corpus(folder / "data")
    return folder


def make_config(folder, **changes):
    settings = settings_for(folder / "tiny-target-0", folder / "data", folder / "out", **changes)
    return resolve({}, overrides=settings, environ={}).config


def real_packs(folder, config, lengths):
    """The packs of the first epoch as a target worker on the CPU delivers them, each in its own tensors."""
    target = load_target(folder / "tiny-target-0", device="cpu", dtype=torch.float32)
    layers = outline_facts(config, lengths=lengths).drafter(config).target_layer_ids
    samples = [Sample(np.full(n, 5, np.int32), np.ones(n, np.bool_), None) for n in lengths]
    sender, packs = transfer.CpuSender(), []
    for item in build_epoch_plan(
        lengths,
        seed=config.optim.seed,
        epoch=0,
        token_budget=config.data.token_budget,
        max_batch_size=config.data.max_batch_size,
        edges=bucket_edges(config.data.max_seq_len),
    ):
        batch = collate([samples[sample] for sample in item.sample_ids], pad_id=0)
        features, _ = target.hidden_states(batch.input_ids_BS, batch.attention_mask_BS, layers)
        sender.send(
            HiddenStates(features=features),
            batch.valid_rows_T,
            lambda states, _pinned, tokens=batch.tokens: packs.append(FeaturePack.unplanned(tokens, states)),
        )
    return packs


def host_terms(config, lengths):
    budgets = dataclasses.replace(outline_facts(config, lengths=lengths), limits={}).budgets(config)
    host = next(budget for budget in budgets if budget.name == "host")
    return {term.name: term.nbytes for term in host.terms}


LENGTHS = [20 + 11 * n % 41 for n in range(120)]


def test_predicted_bytes_of_the_queue_are_those_of_real_packs_in_it(folder):
    config = make_config(folder, queue__hs_max_depth=24, data__token_budget=256)
    packs = real_packs(folder, config, LENGTHS)
    queue = HiddenStatesQueue(
        Board(stall_s=60.0), buckets=1, min_ready=1, max_depth=24, max_bytes=1 << 40, producers=1, seed=0
    )
    for pack in packs[:24]:
        queue.put(transfer.QueuedPack(pack=pack, pinned=None))

    term = host_terms(config, LENGTHS)["queue of hidden states"]

    assert queue.snapshot().depth == 24 > len(packs) // 2
    assert term == pytest.approx(queue.snapshot().nbytes, rel=0.1)
    assert term == pytest.approx(
        sum(pack.features_TLD.untyped_storage().nbytes() for pack in packs[:24]), rel=0.1
    )


def test_predicted_bytes_of_the_cache_are_those_of_a_full_one(folder):
    config = make_config(folder, target__cache_features_bytes=1 << 30, data__token_budget=256)
    cache = SampleCache(1 << 30)
    for number, pack in enumerate(real_packs(folder, config, LENGTHS)):
        lengths = torch.bincount(pack.tokens.doc_id_T).tolist()
        cache.add_pack([1000 * number + place for place in range(len(lengths))], lengths, pack.states)

    assert host_terms(config, LENGTHS)["cache of hidden states"] == pytest.approx(cache.nbytes, rel=0.01)


@pytest.mark.parametrize("budget", [256, 8192], ids=["below-a-mib", "above"])
def test_predicted_pinned_bytes_are_those_of_the_pools_buffers(folder, monkeypatch, budget):
    """The pool's own sizes, on pageable memory, rounded up once more as torch's pinned allocator does."""
    plain_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: plain_empty(*a, **k))
    lengths = [40] * 816
    config = make_config(
        folder, queue__hs_max_depth=4, data__token_budget=budget, devices__target_dtype="fp32"
    )
    packs, pool = real_packs(folder, config, lengths), transfer.PinnedPool()
    on_gpus = dataclasses.replace(
        config, devices=dataclasses.replace(config.devices, target_gpus="0,1", drafter_gpus="2")
    )

    def pinned(nbytes):
        return 2 ** math.ceil(math.log2(pool.acquire(nbytes).nbytes))

    terms = host_terms(on_gpus, lengths)
    largest = max(pack.nbytes for pack in packs)

    assert terms["queue of hidden states"] + terms["rounding of pinned buffers"] == pytest.approx(
        sum(pinned(pack.nbytes) for pack in packs[:4]), rel=0.1
    )
    buffers = 2 * transfer.HOST_COPIES + 1
    assert terms["copies on their way"] == pytest.approx(buffers * pinned(largest), rel=0.1)
