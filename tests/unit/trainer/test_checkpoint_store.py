"""Checkpoints: whole or absent, found by hash, pruned by age; states compared field by field."""

import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.lineage import choose_start
from trainer.checkpoint.state import ConsumedPacks, TrainState, compare, read_state, write_state
from trainer.checkpoint.store import MANIFEST, CheckpointStore, list_lineages, verify
from trainer.errors import CheckpointError

SAVER = """
import os, sys
from pathlib import Path
from trainer.checkpoint.store import CheckpointStore

folder, first, count, size = Path(sys.argv[1]), *map(int, sys.argv[2:5])

def fill(path):
    path.mkdir()
    for name in ("a.bin", "b.bin"):
        (path / name).write_bytes(os.urandom(size))

store = CheckpointStore(folder)
store.prepare()
for step in range(first, first + count):
    store.save("export", step, fill)
    store.save("state", step, fill)
    print(step, flush=True)
"""


def saver(folder, *, first=0, count=1, size=100):
    words = [str(folder), str(first), str(count), str(size)]
    return subprocess.Popen(
        [sys.executable, "-c", SAVER, *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def fill_with(text):
    def fill(path):
        path.mkdir()
        (path / "weights.bin").write_text(text * 50)
        (path / "state.json").write_text("{}")

    return fill


def state_of(step):
    state = TrainState(step=step, tokens=0, meta={}, tensors={"master.w": torch.arange(40.0) + step})
    return functools.partial(write_state, state)


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "out" / "lineage-0000")
    store.prepare()
    return store


def test_saved_folder_verifies_and_is_listed_in_its_manifest(store):
    path = store.save("state", 12, fill_with("x"))

    verify(path)
    assert path.name == "step-00000012"
    assert store.find_newest().path == path
    assert sorted(entry.name for entry in path.iterdir()) == [MANIFEST, "state.json", "weights.bin"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def flip_bit(path, name="weights.bin"):
    data = bytearray((path / name).read_bytes())
    data[17] ^= 1
    (path / name).write_bytes(data)


def truncate(path):
    (path / "weights.bin").write_bytes((path / "weights.bin").read_bytes()[:-1])


def lose_file(path):
    (path / "weights.bin").unlink()


def lose_manifest(path):
    (path / MANIFEST).unlink()


def break_manifest(path):
    (path / MANIFEST).write_text((path / MANIFEST).read_text()[:-20])


def empty_manifest(path):
    (path / MANIFEST).write_text('{"v": 1, "files": {}}')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_bit, "does not match its SHA-256"),
        (truncate, "has 49 bytes, the manifest says 50"),
        (lose_file, "is missing"),
        (lose_manifest, "was never finished"),
        (break_manifest, "cannot be read"),
        (empty_manifest, "lists no files"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_checkpoint_is_passed_over_with_its_reason(store, damage, reason):
    good = store.save("state", 10, fill_with("x"))
    damage(store.save("state", 20, fill_with("y")))

    found = store.find_newest()

    assert found.path == good
    assert len(found.skipped) == 1
    assert reason in found.skipped[0]
    assert "step-00000020" in found.skipped[0]


def test_resume_is_refused_when_nothing_verifies(store, tmp_path):
    flip_bit(store.save("state", 20, fill_with("y")))

    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* --resume scratch"):
        choose_start(tmp_path / "out", "latest")


def test_sigkill_at_random_moments_never_leaves_a_half_checkpoint(tmp_path):
    folder, rng = tmp_path / "lineage-0000", random.Random(7)
    newest = 0
    for attempt in range(6):
        process = saver(folder, first=1000 * attempt, count=900, size=200_000)
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        process.stdout.close()

        store = CheckpointStore(folder)
        for kind in ("state", "export"):
            for step in store.steps(kind):
                verify(store.path(kind, step))
        assert store.find_newest().step >= max(newest, 1000 * attempt)
        newest = store.find_newest().step
        store.prune(1)


def test_full_disk_is_one_clear_error_and_keeps_what_was_there(store):
    good = store.save("state", 1, fill_with("x"))

    def no_space(path):
        path.mkdir()
        (path / "weights.bin").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are untouched"):
        store.save("state", 2, no_space)

    assert store.find_newest().path == good
    assert [entry.name for entry in good.parent.iterdir()] == [good.name]


def test_disk_that_fills_while_tensors_are_written_is_the_same_clear_error(store):
    good = store.save("state", 1, fill_with("x"))
    state = TrainState(step=2, tokens=0, meta={}, tensors={"master.w": torch.ones(1 << 20)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written.*earlier checkpoints are untouched"):
            store.save("state", 2, functools.partial(write_state, state))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [entry.name for entry in good.parent.iterdir()] == [good.name]


def test_surplus_that_cannot_be_removed_is_reported_and_does_not_end_the_run(store, monkeypatch, caplog):
    for step in (1, 2):
        store.save("state", step, fill_with("x"))

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)

    assert store.prune(1) == []
    assert "cannot be removed" in caplog.text
    assert store.steps("state") == [1, 2]


def test_pruning_keeps_the_newest_and_never_the_only_good_one(store):
    for step in range(1, 6):
        store.save("state", step, fill_with("x"))
        store.save("export", step, fill_with("x"))
    for step in (3, 4, 5):
        flip_bit(store.path("state", step))

    store.prune(2)

    assert store.steps("state") == [2, 4, 5]
    assert store.steps("export") == [4, 5]
    assert store.find_newest().step == 2


def test_pruning_spares_the_protected_and_reads_no_file_when_the_newest_was_just_verified(store):
    for step in range(1, 7):
        store.save("state", step, fill_with("x"))
    flip_bit(store.path("state", 6))

    removed = store.prune(2, protect={1, 3}, verified=6)

    assert store.steps("state") == [1, 3, 5, 6]
    assert sorted(path.name for path in removed) == ["step-00000002", "step-00000004"]


def test_folder_that_was_set_aside_goes_with_its_step(store):
    flip_bit(store.save("state", 5, fill_with("x")))
    store.save("state", 5, fill_with("y"))
    aside = store.path("state", 5).with_name("step-00000005.replaced-1")
    store.save("state", 6, fill_with("x"))

    store.prune(2, verified=6)
    assert aside.is_dir()
    store.save("state", 7, fill_with("x"))
    store.prune(2, verified=7)

    assert store.steps("state") == [6, 7]
    assert not aside.exists()


def test_damaged_folder_in_the_way_is_kept_aside(store):
    flip_bit(store.save("state", 5, fill_with("x")))

    store.save("state", 5, fill_with("y"))

    assert store.find_newest().step == 5
    assert (store.path("state", 5).parent / "step-00000005.replaced-1").is_dir()


def test_scratch_opens_a_new_lineage_and_latest_stays_in_the_newest(store, tmp_path):
    out = tmp_path / "out"
    path = store.save("state", 5, state_of(5))

    assert choose_start(out, "latest").state_dir == path
    scratch = choose_start(out, "scratch")
    assert (scratch.lineage, scratch.state_dir) == ("lineage-0001", None)
    CheckpointStore(out / scratch.lineage).prepare()
    again = choose_start(out, "latest")
    assert (again.lineage, again.state_dir) == ("lineage-0001", None)
    assert list_lineages(out) == ["lineage-0000", "lineage-0001"]
    assert path.is_dir()


def test_first_run_starts_the_first_lineage(tmp_path):
    start = choose_start(tmp_path / "none", "latest")

    assert (start.lineage, start.state_dir) == ("lineage-0000", None)


def test_resuming_from_a_path_branches_only_where_newer_steps_exist(store, tmp_path):
    out = tmp_path / "out"
    older, newer = store.save("state", 5, state_of(5)), store.save("state", 9, state_of(9))

    assert choose_start(out, str(newer)).lineage == "lineage-0000"
    branch = choose_start(out, str(older))
    assert (branch.lineage, branch.state_dir) == ("lineage-0001", older)
    flip_bit(older, "tensors.safetensors")
    with pytest.raises(CheckpointError, match="SHA-256"):
        choose_start(out, str(older))


def test_state_round_trip(tmp_path):
    state = TrainState(step=3, tokens=99, meta={"config": {"a": 1}}, tensors={"x": torch.arange(3)})

    write_state(state, tmp_path / "s")
    back = read_state(tmp_path / "s")

    assert (back.step, back.tokens, back.meta) == (3, 99, {"config": {"a": 1}})
    assert torch.equal(back.tensors["x"], torch.arange(3))


def test_newer_state_version_is_refused(tmp_path):
    write_state(TrainState(step=1, tokens=0, meta={}, tensors={"x": torch.zeros(1)}), tmp_path / "s")
    record = tmp_path / "s" / "state.json"
    record.write_text(record.read_text().replace('"v": 1', '"v": 2'))

    with pytest.raises(CheckpointError, match="has version 2, this trainer reads 1"):
        read_state(tmp_path / "s")


@given(packs=st.integers(1, 40), data=st.data())
@settings(max_examples=30, deadline=None)
def test_consumed_bitmaps_round_trip(packs, data):
    chosen = data.draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, packs - 1))))
    consumed = ConsumedPacks(packs, 3)
    for epoch, pack in chosen:
        consumed.add(epoch, pack)

    back = ConsumedPacks(packs, 3)
    back.load(consumed.tensors())

    assert back.count() == len(chosen)
    assert all(back.has(e, p) == ((e, p) in chosen) for e in range(3) for p in range(packs))


def test_pack_is_consumed_once():
    consumed = ConsumedPacks(4, 1)
    consumed.add(0, 2)

    with pytest.raises(CheckpointError, match="pack 2 of epoch 0 was consumed twice"):
        consumed.add(0, 2)


def test_bitmap_of_another_plan_is_refused():
    consumed = ConsumedPacks(20, 3)
    consumed.add(2, 1)

    with pytest.raises(CheckpointError, match="raise --epochs"):
        ConsumedPacks(20, 2).load(consumed.tensors())


def identity(**changes):
    base = {
        "config": {
            "data": {"token_budget": 8},
            "drafter": {"block_size": 4},
            "optim": {"lr": 0.1, "seed": 1, "grad_accum": 2, "epochs": 3},
            "paths": {"output_dir": "/a"},
            "telemetry": {"log_every": 1},
        },
        "data": {"sha256": "d"},
        "target": {"config_sha256": "t"},
        "world": {"targets": ["cpu"]},
        "dtypes": {"targets": ["bfloat16"]},
        "versions": {"torch": "1"},
        "code": {"git_sha": "c"},
    }
    for path, value in changes.items():
        node = base
        *tables, key = path.split("__")
        for table in tables:
            node = node[table]
        node[key] = value
    return base


@pytest.mark.parametrize(
    "change",
    [
        {"data__sha256": "e"},
        {"target__config_sha256": "u"},
        {"config__data__token_budget": 9},
        {"config__drafter__block_size": 8},
        {"config__optim__seed": 2},
        {"config__optim__grad_accum": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_difference_that_breaks_a_resume_is_refused_by_name(change):
    path, value = next(iter(change.items()))

    with pytest.raises(CheckpointError) as caught:
        compare(identity(), identity(**change))

    assert f"{path.split('__')[-2]}.{path.split('__')[-1]} was" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"config__optim__lr": 0.2},
        {"config__optim__epochs": 4},
        {"config__drafter__split_fc_layers": True},
        {"world__targets": ["cuda:0"]},
        {"dtypes__targets": ["float32"]},
        {"versions__torch": "2"},
        {"code__git_sha": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_allowed_difference_is_recorded_field_by_field(change):
    found = compare(identity(), identity(**change))

    path, value = next(iter(change.items()))
    assert [(d.field, d.now) for d in found] == [(path.removeprefix("config__").replace("__", "."), value)]


def test_key_that_is_newer_than_the_state_had_the_effect_of_its_default():
    as_before = {"config__drafter__sliding_layers": [], "config__data__max_batch_size": 64}

    assert compare(identity(), identity(**as_before)) == []
    with pytest.raises(CheckpointError, match=r"drafter\.sliding_layers was \[\], is \[1\]"):
        compare(identity(), identity(config__drafter__sliding_layers=[1]))


def test_place_and_telemetry_do_not_matter():
    changes = {"config__paths__output_dir": "/b", "config__telemetry__log_every": 5}

    assert compare(identity(), identity(**changes)) == []
