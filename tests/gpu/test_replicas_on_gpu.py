"""Several drafters on CUDA devices: the same sums as on the CPU, one model, and steps that never wait.

CPU twins: `tests/unit/trainer/test_replicas.py` and `test_transfer_streams.py`,
`tests/integration/test_trainer_replicas.py` and `test_trainer_nodes.py`. Needs two GPUs.
"""

from __future__ import annotations

import random
import socket

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_samples, tiny_target, write_tiny_corpus
from tests.support.trainer_runs import launch, metrics_lines, read_status, run_here, settings_for
from trainer.drafter.worker import DrafterWorker
from trainer.optim.replicas import ReplicaGroup
from trainer.pipeline.messages import FeaturePack, PackedTokens
from trainer.pipeline.queues import HiddenStatesQueue
from trainer.pipeline.transfer import CudaReceiver, PinnedPool, QueuedPack
from trainer.pipeline.workers import Board, WorkerGroup

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs"),
    # The compiler warns about its own internals.
    pytest.mark.filterwarnings("ignore"),
]

FP32 = {"devices__target_dtype": "fp32", "devices__drafter_dtype": "fp32", "loss__attention": "sdpa"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    rows = tiny_samples(60, min_length=20, max_length=60)
    return tiny_target(folder), write_tiny_corpus(folder / "data", rows)


def masters(out):
    folder = sorted((out / "lineage-0000" / "state").glob("step-*"))[-1]
    tensors = load_file(folder / "tensors.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith("master.")}


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("replicas", sorted({2, min(4, max(2, GPUS))}))
def test_golden_20_peer_sum_is_the_plain_sum_in_order_under_random_delays(replicas):
    """Each round's tensors differ; delays make every device late in turn; nothing waits on the host."""
    rounds, shapes = 300, [(257, 65), (1024,), (3, 5, 7)]
    board = Board(stall_s=120.0)
    group = ReplicaGroup(board, [f"drafter-gpu{place}" for place in range(replicas)])
    wrong = [torch.zeros((), dtype=torch.int64, device=f"cuda:{place}") for place in range(replicas)]

    def values(turn, place):
        generator = torch.Generator().manual_seed(1000 * turn + place)
        floats = [torch.randn(shape, generator=generator) for shape in shapes]
        return [*floats, torch.randint(0, 1 << 40, (9,), generator=generator)]

    expected = []
    for turn in range(rounds):
        rows = [values(turn, place) for place in range(replicas)]
        totals = [tensor.clone() for tensor in rows[0]]
        for row in rows[1:]:
            totals = [total + tensor for total, tensor in zip(totals, row, strict=True)]
        expected.append((rows, totals))

    def work(place):
        torch.cuda.set_device(place)
        rng = random.Random(place)
        tensors = [tensor.cuda() for tensor in values(0, place)]
        inputs = [[t.pin_memory() for t in rows[place]] for rows, _ in expected]
        results = [[t.cuda() for t in totals] for _, totals in expected]
        for turn in range(rounds):
            if rng.random() < 0.3:
                torch.cuda._sleep(rng.randrange(1, 2_000_000))
            for tensor, source in zip(tensors, inputs[turn], strict=True):
                tensor.copy_(source, non_blocking=True)
            group.sum_tensors(place, tensors)
            for tensor, total in zip(tensors, results[turn], strict=True):
                wrong[place] += (tensor != total).sum()

    threads = WorkerGroup(board)
    for place in range(replicas):
        threads.add(f"drafter-gpu{place}", lambda place=place: work(place))
    threads.start()
    assert threads.join(timeout_s=300.0), threads.alive
    threads.raise_first()

    assert [int(count) for count in wrong] == [0] * replicas


def test_drafter_that_a_stop_sends_home_takes_one_that_is_mid_step_along():
    board = Board(stall_s=20.0)
    queue = HiddenStatesQueue(
        board,
        buckets=1,
        min_ready=1,
        max_depth=30,
        max_bytes=1 << 30,
        producers=1,
        consumers=2,
        seed=0,
    )
    pool, shape = PinnedPool(), (4, 2, 8)
    busy, starved = [
        CudaReceiver(
            queue,
            board=board,
            pool=pool,
            device=f"cuda:{place}",
            shape=shape,
            dtype=torch.float32,
            consumer=place,
        )
        for place in range(2)
    ]
    queue.put(waiting_pack(0, shape))
    busy.done(busy.next(stop_empties=True))

    board.stop.set()
    assert starved.next(stop_empties=True) is None
    for number in range(1, 20):  # what the targets still had under way
        queue.put(waiting_pack(number, shape))
    queue.producer_done()
    taken = 1
    while (pack := busy.next(stop_empties=False)) is not None:
        assert pack.features_TLD.device == torch.device("cuda", 0)
        busy.done(pack)
        taken += 1
    queue.close()

    assert taken < 8, "the step was to be cut short, for the other drafter brings nothing to it"
    assert board.failure is None


def waiting_pack(number, shape):
    features, length = torch.zeros(shape).pin_memory(), shape[0]
    tokens = PackedTokens(
        input_ids_T=torch.zeros(length, dtype=torch.int64),
        loss_mask_T=torch.ones(length, dtype=torch.bool),
        doc_id_T=torch.zeros(length, dtype=torch.int32),
        position_T=torch.arange(length),
    )
    pack = FeaturePack(
        epoch=0,
        pack_id=number,
        bucket=0,
        tokens=tokens,
        features_TLD=features,
        last_hidden_TD=None,
        nbytes=features.nbytes,
    )
    return QueuedPack(pack=pack, pinned=None)


@pytest.mark.parametrize("target", ["cpu", "0"], ids=["target-cpu", "target-shares-gpu0"])
def test_golden_20_two_gpus_train_as_one_with_two_micro_batches(tiny, tmp_path, target):
    common = FP32 | {"queue__ordered": True, "optim__epochs": 4, "devices__target_gpus": target}
    one = settings_for(*tiny, tmp_path / "one", **common, devices__drafter_gpus="0", optim__grad_accum=2)
    assert run_here(one) == 0

    assert run_here(settings_for(*tiny, tmp_path / "two", **common, devices__drafter_gpus="0,1")) == 0

    assert_close(masters(tmp_path / "two"), masters(tmp_path / "one"))
    names = [entry["name"] for entry in metrics_lines(tmp_path / "two" / "run")[-1]["workers"]]
    assert names[-2:] == ["drafter-gpu0", "drafter-gpu1"]


def test_compiled_drafters_on_two_gpus_keep_finite_losses(tiny, tmp_path):
    devices = {"devices__target_gpus": "0,1", "devices__drafter_gpus": "0,1", "loss__attention": "flex"}

    assert run_here(settings_for(*tiny, tmp_path / "out", optim__epochs=6, **devices)) == 0

    lines = metrics_lines(tmp_path / "out" / "run")
    assert lines[-1]["train"]["skipped"] == 0
    assert lines[-1]["train"]["loss"] < lines[0]["train"]["loss"]
    assert read_status(tmp_path / "out" / "run")["phase"] == "done"


def test_steady_step_of_two_drafters_never_waits_for_a_device(tiny, tmp_path, monkeypatch):
    watched, real = [], DrafterWorker.train_step

    def train_step(self):
        # the mode holds for the whole process; the replicas are in the same step or the one beside it
        if self._replica == 0:
            torch.cuda.set_sync_debug_mode("error" if 6 <= self.step < 20 else "default")
        if 7 <= self.step < 19:
            watched.append((self._replica, self.step))
        return real(self)

    monkeypatch.setattr(DrafterWorker, "train_step", train_step)
    devices = {"devices__drafter_gpus": "0,1", "optim__max_steps": 24, "optim__epochs": 40}
    try:
        assert run_here(settings_for(*tiny, tmp_path / "out", **devices)) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert len(watched) == 24


def test_golden_20_two_machines_with_a_gpu_each_train_as_one_with_two(tiny, tmp_path):
    """NCCL between two processes of this host."""
    common = FP32 | {"queue__ordered": True, "optim__epochs": 3}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [
        launch(
            settings_for(*tiny, tmp_path / "out", **common, devices__drafter_gpus=str(rank)),
            tmp_path / f"log-{rank}",
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            DFLASH_RUN_DIR=str(tmp_path / f"run-{rank}"),
            NCCL_NVLS_ENABLE="0",  # hosts that share their GPUs must not use multicast, and this needs none
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], "\n".join((tmp_path / f"log-{rank}").read_text() for rank in range(2))

    assert run_here(settings_for(*tiny, tmp_path / "both", **common, devices__drafter_gpus="0,1")) == 0

    assert_close(masters(tmp_path / "out"), masters(tmp_path / "both"))
