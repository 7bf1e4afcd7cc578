"""The copy of a training state from a GPU; its CPU twin is in `tests/unit/trainer/test_saver.py`."""

import pytest
import torch

from trainer.checkpoint.snapshot import HostSnapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch calls its own check for synchronization a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


def test_snapshot_is_pinned_equal_and_unharmed_by_the_next_step():
    source = {
        "master.w": torch.randn(512, 1024, device="cuda"),
        "step.w": torch.tensor(7.0, device="cuda"),
        "on.host": torch.arange(5),
    }
    before = {name: tensor.cpu().clone() for name, tensor in source.items()}
    snapshot = HostSnapshot()

    taken = snapshot.take(source)
    source["master.w"].add_(1.0)
    torch.cuda.synchronize()

    assert taken["master.w"].is_pinned()
    assert all(torch.equal(taken[name], before[name]) for name in before)
    again = snapshot.take(source)
    assert again["master.w"].data_ptr() == taken["master.w"].data_ptr()
    assert torch.equal(again["master.w"], before["master.w"] + 1.0)


def test_snapshot_of_pinned_buffers_makes_no_hidden_sync():
    source = {"w": torch.randn(64, 64, device="cuda")}
    snapshot = HostSnapshot()
    snapshot.take(source)

    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = snapshot.take(source)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.equal(taken["w"], source["w"].cpu())
