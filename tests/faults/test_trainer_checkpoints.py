"""T3 and T4: killed, stopped or out of room while saving; damaged checkpoints on resume."""

import functools
import json
import shutil
import subprocess
import sys

import pytest
import torch

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import REPOSITORY, metrics_lines, read_status, run_here, settings_for
from trainer.checkpoint import saver
from trainer.checkpoint.lineage import choose_start
from trainer.checkpoint.state import TrainState, read_state, write_state
from trainer.checkpoint.store import MANIFEST, CheckpointStore, verify
from trainer.errors import CheckpointError

KILLER = """
import functools, json, os, resource, signal, sys
from pathlib import Path

import torch

from tests.support.tiny_drafter import make_drafter
from trainer.checkpoint.export import export_drafter
from trainer.checkpoint.lineage import choose_start
from trainer.checkpoint.state import TrainState, read_state, write_state
from trainer.checkpoint.store import KINDS, CheckpointStore, verify

# small, so that most byte offsets lie in the state that follows the export
tiny = dict(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
drafter = make_drafter(**tiny)
out = Path(sys.argv[1])
limits = json.loads(sys.argv[2])
watched = ("open", "os.", "shutil.", "fsync")


def save(step):
    store = CheckpointStore(out / "lineage-0000")
    tensors = {"master.w": torch.full((4096,), float(step)), "consumed.epoch-0000": torch.zeros(3)}
    state = TrainState(step=step, tokens=step, meta={"pad": "x" * 500}, tensors=tensors)
    store.save("export", step, lambda path: export_drafter(drafter, {}, path))
    store.save("state", step, functools.partial(write_state, state))
    store.prune(2, verified=step)


def die_at_event(number):
    # every call that reaches the file system: open, mkdir, rename, remove, scandir, fsync ...
    count = [0]

    def tick(name, *_args):
        if name.startswith(watched):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    real = os.fsync
    os.fsync = lambda handle: (tick("fsync"), real(handle), tick("fsync"))[1]
    sys.addaudithook(tick)


def die_at_byte(number):
    # the kernel ends the process when any file would grow beyond this byte, whoever writes it
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))


def attempt(step, die):
    pid = os.fork()
    if not pid:
        die()
        save(step)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def look():
    store = CheckpointStore(out / "lineage-0000")
    half = []
    for kind in KINDS:
        for step in store.steps(kind):
            try:
                verify(store.path(kind, step))
            except Exception as error:
                half.append(str(error))
    start = choose_start(out, "latest")
    state = read_state(start.state_dir)
    good = state.step == state.tokens and bool((state.tensors["master.w"] == float(state.step)).all())
    return state.step, half + list(start.skipped), good


def report(kind, number, step, code):
    newest, half, good = look()
    store = CheckpointStore(out / "lineage-0000")
    store.prepare()
    left = [str(path) for path in out.rglob(".*")]
    line = {"kind": kind, "at": number, "step": step, "code": code, "newest": newest}
    print(json.dumps(line | {"half": half, "good": good, "left": left}), flush=True)


CheckpointStore(out / "lineage-0000").prepare()
step = 1
save(step)
for number in range(1, limits["events"]):
    code = attempt(step + 1, lambda: die_at_event(number))
    report("event", number, step + 1, code)
    step = max(step, look()[0])
    if code == 0:
        break
for number in range(0, limits["bytes"], limits["stride"]):
    code = attempt(step + 1, lambda: die_at_byte(number))
    report("byte", number, step + 1, code)
    step = max(step, look()[0])
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


def test_t3_kill_at_each_of_more_than_100_offsets_leaves_whole_checkpoints_only(tmp_path):
    """Killed at every call that reaches the file system, and at byte offsets of what is written."""
    limits = {"events": 400, "bytes": 17_500, "stride": 350}

    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "out"), json.dumps(limits)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
    )

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    killed = [line for line in lines if line["code"] < 0]
    assert len(killed) >= 100
    assert {line["kind"] for line in killed} == {"event", "byte"}
    assert [line for line in lines if line["half"] or line["left"] or not line["good"]] == []
    for line in lines:
        # the one before, or the one that was being written: nothing is lost, nothing is made up
        assert line["newest"] in (line["step"] - 1, line["step"]), line
    # one run of events was gone through to its end, and there the new checkpoint is the newest
    assert any(line["kind"] == "event" and line["code"] == 0 for line in lines)


def test_t3_full_disk_keeps_the_older_checkpoint_and_training_goes_on(tiny, tmp_path, monkeypatch, caplog):
    out, seen = tmp_path / "out", []
    real = saver.write_state

    def no_room_for_step_6(state, folder):
        if state.step != 6:
            seen.append((state.step, dict(read_status(out / "run")["degraded"])))
            return real(state, folder)
        folder.mkdir()
        (folder / "tensors.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, "write_state", no_room_for_step_6)

    assert run_here(settings_for(*tiny, out, checkpoint__every=3, checkpoint__keep=9)) == 0

    store = CheckpointStore(out / "lineage-0000")
    assert store.steps("state") == [3, 9, 12, 15, 18]
    assert store.find_newest().skipped == ()
    assert "checkpoint of step 6 failed, training goes on" in caplog.text
    degraded = dict(seen)
    assert "No space left on device" in degraded[9]["checkpoint"]
    assert "checkpoint" not in degraded[12]
    assert metrics_lines(out / "run")[-1]["profile"]["checkpoint"]["failed"] == 1.0


def test_t3_last_save_without_room_is_an_error_and_the_older_checkpoint_stays(tiny, tmp_path, monkeypatch):
    out, real = tmp_path / "out", saver.write_state

    def no_room_at_the_end(state, folder):
        if state.step == 18:
            raise OSError(28, "No space left on device")
        return real(state, folder)

    monkeypatch.setattr(saver, "write_state", no_room_at_the_end)

    with pytest.raises(CheckpointError, match=r"No space left.*earlier checkpoints are untouched") as caught:
        run_here(settings_for(*tiny, out, checkpoint__every=6))

    assert caught.value.exit_code == 4
    assert CheckpointStore(out / "lineage-0000").find_newest().step == 12


# -- T4 ---------------------------------------------------------------------------------------------------


def state_of(step):
    tensors = {"master.w": torch.arange(64.0) + step}
    return functools.partial(write_state, TrainState(step=step, tokens=7, meta={}, tensors=tensors))


@pytest.fixture
def lineage(tmp_path):
    """Steps 10 and 20; 20 will be damaged."""
    store = CheckpointStore(tmp_path / "out" / "lineage-0000")
    store.prepare()
    for step in (10, 20):
        store.save("state", step, state_of(step))
    return store


def resume(tmp_path, lineage, *says):
    """Resume must take step 10 and say why it passed over step 20."""
    start = choose_start(tmp_path / "out", "latest")
    assert start.state_dir == lineage.path("state", 10)
    assert read_state(start.state_dir).step == 10
    assert len(start.skipped) == 1
    for part in ("step-00000020", *says):
        assert part in start.skipped[0]


def test_t4_truncated_file_falls_back_to_the_next_older(tmp_path, lineage):
    path = lineage.path("state", 20) / "tensors.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])

    resume(tmp_path, lineage, f"has {size // 2} bytes, the manifest says {size}")


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_t4_flipped_bit_falls_back_to_the_next_older(tmp_path, lineage, name, where):
    path = lineage.path("state", 20) / name
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)

    resume(tmp_path, lineage, name, "does not match its SHA-256")


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_t4_missing_file_falls_back_to_the_next_older(tmp_path, lineage, name):
    (lineage.path("state", 20) / name).unlink()

    resume(tmp_path, lineage, f"{name} is missing")


def test_t4_missing_manifest_falls_back_to_the_next_older(tmp_path, lineage):
    (lineage.path("state", 20) / MANIFEST).unlink()

    resume(tmp_path, lineage, "was never finished")


def test_t4_foreign_manifest_falls_back_to_the_next_older(tmp_path, lineage):
    shutil.copy(lineage.path("state", 10) / MANIFEST, lineage.path("state", 20) / MANIFEST)

    resume(tmp_path, lineage, "is of step 10: it belongs to another folder")


def test_t4_whole_foreign_checkpoint_under_another_step_falls_back(tmp_path, lineage):
    shutil.rmtree(lineage.path("state", 20))
    shutil.copytree(lineage.path("state", 10), lineage.path("state", 20))

    resume(tmp_path, lineage, "is of step 10")


def test_t4_manifest_that_points_outside_falls_back_to_the_next_older(tmp_path, lineage):
    path = lineage.path("state", 20) / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"]["../step-00000010/state.json"] = manifest["files"]["state.json"]
    path.write_text(json.dumps(manifest))

    resume(tmp_path, lineage, "outside of its folder")


def test_t4_empty_folder_falls_back_to_the_next_older(tmp_path, lineage):
    shutil.rmtree(lineage.path("state", 20))
    lineage.path("state", 20).mkdir()

    resume(tmp_path, lineage, "was never finished")


def test_t4_newer_format_falls_back_to_the_next_older(tmp_path, lineage):
    path = lineage.path("state", 20) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"v": 2}))

    resume(tmp_path, lineage, "has format version 2, this trainer reads 1")


def test_t4_newer_state_inside_a_valid_manifest_falls_back_to_the_next_older(tmp_path, lineage):
    def newer(folder):
        state_of(20)(folder)
        record = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(record | {"v": 99}))

    shutil.rmtree(lineage.path("state", 20))
    lineage.save("state", 20, newer)

    resume(tmp_path, lineage, "has version 99, this trainer reads 1")


def test_t4_nothing_that_verifies_is_refused_with_every_reason(tmp_path, lineage):
    for step in (10, 20):
        (lineage.path("state", step) / "state.json").unlink()

    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* --resume scratch") as caught:
        choose_start(tmp_path / "out", "latest")

    assert "step-00000010" in str(caught.value)
    assert caught.value.exit_code == 4


def test_t4_run_resumes_from_the_older_one_and_records_what_it_skipped(tiny, tmp_path, caplog):
    out = tmp_path / "out"
    assert run_here(settings_for(*tiny, out, checkpoint__every=6, optim__max_steps=12)) == 0
    store = CheckpointStore(out / "lineage-0000")
    (store.path("state", 12) / "tensors.safetensors").unlink()

    assert run_here(settings_for(*tiny, out, checkpoint__every=6, optim__max_steps=12)) == 0

    record = json.loads((out / "run" / "resume.json").read_text())
    assert record["step"] == 6
    assert "tensors.safetensors is missing" in record["skipped"][0]
    assert "checkpoint skipped:" in caplog.text
    verify(store.path("state", 12))
    assert (store.path("state", 12).parent / "step-00000012.replaced-1").is_dir()
