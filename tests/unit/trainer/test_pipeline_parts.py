"""Small parts of the pipeline: sampler and feeder, sample cache, timers, devices, records."""

import os
from types import SimpleNamespace

import pytest
import torch

from trainer.config import DevicesConfig, TrainConfig
from trainer.data.sampler import Feeder, PackSampler, bucket_counts
from trainer.errors import ConfigError
from trainer.pipeline import devices
from trainer.pipeline.messages import HiddenStates
from trainer.pipeline.queues import FeedQueue, HiddenStatesQueue
from trainer.pipeline.records import batch_record, profile_record, queue_record, worker_records
from trainer.pipeline.timers import DeferredScalars, StageTimers, WorkerStats, cuda_memory
from trainer.pipeline.transfer import CpuSender, carve
from trainer.pipeline.workers import Board
from trainer.target.cache import SampleCache
from trainer.telemetry.fields import FIELDS


def make_sampler(**changes):
    values = {
        "lengths": [3, 9, 4, 12, 7, 2, 16, 5],
        "edges": (4, 8, 16),
        "epochs": 3,
        "seed": 1,
        "token_budget": 16,
        "max_batch_size": 4,
    }
    return PackSampler(**(values | changes))


def test_remaining_packs_leave_out_what_was_consumed_and_whole_epochs():
    sampler = make_sampler()
    packs = len(sampler.plan(0))

    left = list(sampler.remaining(lambda epoch, pack: epoch == 0 or (epoch == 1 and pack != 2)))

    assert [[(item.epoch, item.pack_id) for item in items] for items in left] == [
        [(1, 2)],
        [(2, pack) for pack in range(packs)],
    ]


def test_largest_pack_of_each_bucket_comes_largest_first():
    sampler = make_sampler()

    items = sampler.largest_per_bucket()

    assert [item.bucket for item in items] == [2, 1, 0]
    for item in items:
        peers = [other for other in sampler.plan(0) if other.bucket == item.bucket]
        assert sum(sampler.lengths[s] for s in item.sample_ids) == max(
            sum(sampler.lengths[s] for s in other.sample_ids) for other in peers
        )


def test_feeder_deals_everything_and_announces_each_epoch():
    board, announced = Board(stall_s=60.0), []
    feed = FeedQueue(1_000, board)
    sampler = make_sampler()

    Feeder(sampler, feed, is_consumed=lambda *_: False, open_epoch=announced.append, board=board).run()

    dealt = []
    while (item := feed.get()) is not None:
        dealt.append(item)
    assert dealt == [item for epoch in range(3) for item in sampler.plan(epoch)]
    assert announced == [bucket_counts(sampler.plan(epoch), 3) for epoch in range(3)]


def test_feeder_ends_when_the_run_stops():
    board = Board(stall_s=60.0)
    feed = FeedQueue(1_000, board)
    board.stop.set()

    Feeder(make_sampler(), feed, is_consumed=lambda *_: False, open_epoch=lambda _: None, board=board).run()

    assert feed.get() is None


def test_cache_gives_packs_back_in_the_asked_order():
    cache = SampleCache(10_000)
    hidden = torch.arange(2 * 5 * 3, dtype=torch.float32).view(5, 2, 3)
    last = torch.arange(5 * 3, dtype=torch.float32).view(5, 3)
    cache.add_pack([7, 9], [2, 3], HiddenStates(features=hidden, last_hidden=last))

    found = cache.find_pack([9, 7])
    assert torch.equal(found.features, torch.cat([hidden[2:], hidden[:2]]))
    assert torch.equal(found.last_hidden, torch.cat([last[2:], last[:2]]))
    assert cache.find_pack([7, 8]) is None


def test_cache_never_grows_above_its_limit():
    cache = SampleCache(100)
    for sample in range(10):
        cache.add_pack([sample], [2], HiddenStates(features=torch.zeros(2, 1, 4)))

    assert cache.nbytes == 96
    assert cache.find_pack([2]) is not None
    assert cache.find_pack([3]) is None


def test_cached_sample_does_not_share_memory_with_the_pack():
    cache = SampleCache(10_000)
    hidden = torch.zeros(2, 1, 4)
    cache.add_pack([0], [2], HiddenStates(features=hidden))
    hidden += 1

    assert cache.find_pack([0]).features.sum() == 0


def test_cpu_sender_delivers_the_valid_rows():
    hidden = torch.arange(2 * 3 * 1 * 2).view(2, 3, 1, 2)
    delivered = []

    last = torch.arange(2 * 3 * 2).view(2, 3, 2)
    states = HiddenStates(features=hidden, last_hidden=last)

    CpuSender().send(
        states, torch.tensor([0, 1, 3]), lambda packed, pinned: delivered.append((packed, pinned))
    )

    assert torch.equal(delivered[0][0].features, hidden.flatten(0, 1)[[0, 1, 3]])
    assert torch.equal(delivered[0][0].last_hidden, last.flatten(0, 1)[[0, 1, 3]])
    assert delivered[0][1] is None


@pytest.mark.parametrize("has_last", [False, True])
def test_captured_layers_and_last_state_share_one_buffer_without_overlap(has_last):
    padded = HiddenStates(
        features=torch.zeros(2, 3, 4, 5), last_hidden=torch.zeros(2, 3, 5) if has_last else None
    )
    buffer = torch.full((200,), -1.0)

    states, used = carve(buffer, padded, 3)
    states.features.copy_(torch.arange(60).view(3, 4, 5))
    if has_last:
        states.last_hidden.copy_(torch.arange(60, 75).view(3, 5))

    assert used.nbytes == states.nbytes == (75 if has_last else 60) * 4
    assert used.tolist() == list(range(75 if has_last else 60))
    assert (buffer[used.numel() :] == -1).all()


def test_stage_means_are_kept_until_new_ones_come():
    timers = StageTimers("cpu")
    with timers.stage("forward"):
        pass

    first = timers.take()
    assert set(first) == {"forward_ms"}
    assert timers.take() == first


def test_waiting_does_not_count_as_busy():
    stats = WorkerStats("target-cpu")
    with stats.working(), stats.waiting():
        pass
    stats.add(5)

    record = stats.take()

    assert (record["name"], record["batches"], record["tokens"]) == ("target-cpu", 1, 5)
    assert 0.0 <= record["busy_ratio"] <= 1.0


def test_deferred_scalars_keep_names_and_precision():
    scalars = DeferredScalars({"a": torch.tensor(1), "b": torch.tensor(0.25)})

    assert scalars.is_ready()
    assert scalars.read() == {"a": 1.0, "b": 0.25}


@pytest.mark.parametrize(
    ("choice", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda:1", torch.bfloat16),
        ("bf16", "cpu", torch.bfloat16),
        ("fp32", "cuda:1", torch.float32),
        ("fast", "cuda:1", torch.bfloat16),
    ],
)
def test_dtype_follows_choice_then_device(choice, device, expected):
    assert devices.pick_dtype(choice, device) == expected


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx2": True}, torch.float32),
        (None, torch.float32),
    ],
    ids=["avx512", "amx", "neither", "an older torch"],
)
def test_fast_is_bf16_only_on_processors_that_multiply_it_faster(monkeypatch, capabilities, expected):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    if capabilities is not None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)

    assert devices.pick_dtype("fast", "cpu") == expected
    assert devices.pick_dtype("auto", "cpu") == torch.float32


@pytest.mark.parametrize(
    ("choice", "device", "may_compile", "expected"),
    [
        ("auto", "cpu", True, "sdpa"),
        ("auto", "cuda:0", True, "flex"),
        ("auto", "cuda:0", False, "sdpa"),
        ("dense", "cuda:0", True, "dense"),
    ],
)
def test_attention_follows_choice_device_and_compile(choice, device, may_compile, expected):
    assert devices.pick_attention(choice, device, may_compile=may_compile) == expected


def config_for(tmp_path, **changes):
    (tmp_path / "config.json").write_text("{}")
    from trainer.config import PathsConfig

    paths = PathsConfig(target_model=str(tmp_path), data_dir=str(tmp_path), output_dir=str(tmp_path))
    return TrainConfig(paths=paths, devices=DevicesConfig(**changes))


def test_cpu_workers_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(6))

    assert devices.cpu_threads(config_for(tmp_path)) == 3
    assert devices.cpu_threads(config_for(tmp_path), is_alone=True) == 6
    assert devices.cpu_threads(config_for(tmp_path, drafter_gpus="0")) == 6
    assert devices.cpu_threads(config_for(tmp_path, cpu_threads=2), is_alone=True) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", ("target-cpu",)),
        ("cpu,cpu,cpu", ("target-cpu0", "target-cpu1", "target-cpu2")),
        ("0, 3", ("target-gpu0", "target-gpu3")),
    ],
    ids=["one", "three on the cpu", "gpus"],
)
def test_every_worker_has_a_name_of_its_own(text, expected):
    assert devices.worker_names("target", DevicesConfig(target_gpus=text).targets()) == expected


def test_one_gpu_may_run_both_kinds_of_worker(tmp_path):
    config = config_for(tmp_path, target_gpus="0,1", drafter_gpus="1")

    assert config.devices.shared() == ("cuda:1",)
    assert config_for(tmp_path).devices.shared() == ()


def test_missing_cuda_index_is_refused_with_the_count(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    devices.check_devices(config_for(tmp_path, target_gpus="1"))
    with pytest.raises(ConfigError, match="--drafter-gpus names 2, but torch sees 2 CUDA devices"):
        devices.check_devices(config_for(tmp_path, drafter_gpus="2"))


def test_available_memory_is_plausible():
    assert 1 << 20 < devices.available_bytes() < 1 << 46


def test_queue_record_sums_up_per_bucket():
    queue = HiddenStatesQueue(
        Board(stall_s=60.0), buckets=2, min_ready=1, max_depth=4, max_bytes=99, producers=1, seed=0
    )

    record = queue_record(3, queue.snapshot(), (8, 16))

    assert (record["feed"], record["hs"], record["min_ready"], record["max_depth"]) == (3, 0, 1, 4)
    assert record["buckets"] == [{"upto": 8, "depth": 0}, {"upto": 16, "depth": 0}]


def test_batch_record_is_null_where_nothing_is_known():
    idle = SimpleNamespace(sequences=0, padded_tokens=0, valid_tokens=0, bucket_batches={})
    busy = SimpleNamespace(sequences=2, padded_tokens=10, valid_tokens=9, bucket_batches={0: 1, 1: 1})
    nothing = batch_record([idle, idle], buckets=2, token_budget=8)
    some = batch_record([busy, idle], buckets=2, token_budget=8)

    assert (nothing["padding_ratio"], nothing["bucket_entropy"]) == (None, None)
    assert some["padding_ratio"] == 0.1
    assert some["budget_fill_ratio"] == 0.625
    assert some["bucket_batches"] == [1, 1]


def timed_worker(name, device="cpu", **stages):
    timers, stats = StageTimers(device), WorkerStats(name)
    for stage, ms in stages.items():
        timers._add(stage, ms)
    return SimpleNamespace(name=name, timers=timers, stats=stats)


def test_profile_holds_every_stage_of_every_worker_and_says_why_one_is_unknown():
    targets = [timed_worker("target-gpu0", forward=10.0), timed_worker("target-gpu1", forward=30.0)]
    drafters = [timed_worker("drafter-gpu2", device="cuda:2", loss=4.0)]

    record = profile_record(targets, drafters)

    assert record["target"]["forward_ms"] == 20.0
    assert record["target-gpu1"]["forward_ms"] == 30.0
    assert record["target-gpu0"]["d2h_ms"] is None
    assert "d2h: no copy on the CPU" in record["target-gpu0"]["reason"]
    assert record["drafter-gpu2"]["loss_ms"] == 4.0
    assert "all_reduce: not run yet" in record["drafter-gpu2"]["reason"]


def test_balance_compares_workers_of_one_kind_and_is_null_while_one_has_nothing():
    targets, drafters = [timed_worker("a"), timed_worker("b")], [timed_worker("c")]
    targets[0].stats.add(30)
    targets[1].stats.add(10)

    records = {entry["name"]: entry for entry in worker_records(targets, drafters)}

    assert records["a"]["balance_ratio"] == records["b"]["balance_ratio"] == 3.0
    assert records["c"]["balance_ratio"] is None
    assert records["c"]["reason"] == "a worker of this kind has no tokens yet"


def test_allocator_figures_have_every_documented_field(monkeypatch):
    stats = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 5, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="ab-cd"))

    record = cuda_memory(["cpu", "cuda:3"])[0]

    assert {f"cuda/*/{key}" for key in record} == {field.path for field in FIELDS if field.group == "cuda"}
    assert (record["index"], record["uuid"], record["fragmentation_bytes"]) == (3, "GPU-ab-cd", 2)


def test_cleared_timers_know_nothing_of_before():
    timers = timed_worker("a", forward=1e6).timers

    timers.clear()

    assert timers.take() == {}
