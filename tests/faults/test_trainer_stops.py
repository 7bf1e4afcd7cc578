"""A stop at any moment: by signal and by file, in every phase, with a real trainer process."""

import json
import signal

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_forks import trainer_forks
from tests.support.trainer_runs import await_status, read_status, settings_for
from trainer.checkpoint.store import CheckpointStore, verify

LONG = {"optim__epochs": 20_000, "telemetry__status_interval_s": 0.1}

SLOW_IMPORT = """
import sys, time
import trainer.__main__ as entry

def slow(name):
    time.sleep(600)

entry.importlib = type("Slow", (), {"import_module": staticmethod(slow)})
"""

SLOW_LOADING = """
import time
from trainer import assembly

def slow(*args, **options):
    for _ in range(60_000):
        time.sleep(0.01)

assembly.load_target = slow
"""

COMPILING = """
import time
from trainer import train

def compiling(self, targets, drafters):
    self._status.set_phase("compiling", "planted")
    for _ in range(60_000):
        time.sleep(0.01)

train.Trainer._warm_up = compiling
"""

SLOW_SAVE = """
import time
from trainer.checkpoint import saver

real = saver.write_state

def slow(state, folder):
    time.sleep(0.4)
    real(state, folder)

saver.write_state = slow
"""

PHASES = {
    "init": ({}, SLOW_IMPORT, False),
    "loading": ({}, SLOW_LOADING, False),
    "compiling": ({}, COMPILING, False),
    "filling": ({"queue__hs_min_ready": 100_000, "queue__hs_max_depth": 100_000}, "", True),
    "training": ({}, "", True),
    "evaluating": ({"eval__every": 1, "eval__max_new_tokens": 200}, "", True),
    "checkpointing": ({"checkpoint__every": 1}, SLOW_SAVE, True),
    "draining": ({}, SLOW_SAVE, True),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    rows = [json.dumps({"id": str(n), "prompt": f"say {n}"}) for n in range(20)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return tiny_target(folder), write_tiny_corpus(folder / "data"), folder / "prompts.jsonl"


@pytest.fixture(scope="module")
def forks():
    with trainer_forks() as server:
        yield server


@pytest.fixture
def start(forks, tiny, tmp_path):
    """Start a run; ends whatever is left of it."""
    started = []

    def begin(plant="", **changes):
        model, data, prompts = tiny
        if "eval__every" in changes:
            changes |= {"eval__prompts": prompts, "eval__max_prompts": 20}
        settings = settings_for(model, data, tmp_path / "out", **(LONG | changes))
        process = forks.start(settings, tmp_path / "log", plant=plant, DFLASH_RUN_DIR=str(tmp_path / "run"))
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(180)


def ask_by_file(tmp_path, **fields):
    body = {"v": 1, "id": "op-7", "reason": "test", "actor": "me", "requested_at": 0, "deadline_s": 60}
    (tmp_path / "run" / "control").mkdir(parents=True, exist_ok=True)
    whole = tmp_path / "run" / "control" / "stop.tmp"
    whole.write_text(json.dumps(body | {"save": True} | fields))
    whole.rename(tmp_path / "run" / "control" / "stop.json")


def in_phase(name):
    return lambda status: status["phase"] == name


def lineage(tmp_path):
    return CheckpointStore(tmp_path / "out" / "lineage-0000")


def reach(process, tmp_path, phase):
    if phase == "draining":
        await_status(process, tmp_path / "run", lambda status: status["step"] >= 1)
        ask_by_file(tmp_path)
        await_status(process, tmp_path / "run", lambda status: status["stop"] is not None)
    else:
        await_status(process, tmp_path / "run", in_phase(phase))


@pytest.mark.parametrize("way", ["signal", "file"])
@pytest.mark.parametrize(("phase", "case"), PHASES.items(), ids=PHASES.keys())
def test_stop_in_any_phase_ends_with_exit_9_and_what_is_saved_verifies(start, tmp_path, phase, case, way):
    changes, plant, saves = case
    process = start(plant, **changes)
    reach(process, tmp_path, phase)

    if way == "file":
        ask_by_file(tmp_path)
    # while libraries load nobody reads the file: the signal that goes with it ends the start
    if way == "signal" or phase == "init":
        process.send_signal(signal.SIGTERM)

    assert process.wait(180) == 9, (tmp_path / "log").read_text()
    status = read_status(tmp_path / "run")
    if phase != "init":
        assert (status["phase"], status["message"]) == ("done", "stopped on request")
        assert status["stop"]["id"] == (
            None if (way, phase) == ("signal", phase) and phase != "draining" else "op-7"
        )
    if saves:
        newest = lineage(tmp_path).find_newest()
        assert newest.skipped == ()
        assert newest.step == status["step"] == status["last_checkpoint"]["step"]
        verify(lineage(tmp_path).path("export", newest.step))
        assert not list((tmp_path / "out").glob("lineage-*/*/.tmp-*"))
    else:
        assert lineage(tmp_path).steps("state") == []


def test_t3_second_sigterm_while_saving_abandons_and_nothing_half_is_visible(start, tmp_path):
    process = start(SLOW_SAVE.replace("0.4", "600"), checkpoint__every=3)
    await_status(process, tmp_path / "run", lambda status: status["step"] >= 2)
    process.send_signal(signal.SIGTERM)
    await_status(process, tmp_path / "run", lambda status: status["stop"] is not None)

    process.send_signal(signal.SIGTERM)

    assert process.wait(180) == 9
    assert read_status(tmp_path / "run")["stop"]["why"] == "second signal: save abandoned"
    assert lineage(tmp_path).steps("state") == []


def test_t3_stop_that_runs_out_of_time_while_saving_is_abandoned_by_itself(start, tmp_path):
    process = start(SLOW_SAVE.replace("0.4", "600"))
    await_status(process, tmp_path / "run", lambda status: status["step"] >= 2)

    ask_by_file(tmp_path, deadline_s=0.3)

    assert process.wait(180) == 9
    status = read_status(tmp_path / "run")
    assert status["stop"]["id"] == "op-7"
    assert status["stop"]["why"] == "deadline: save abandoned"
    assert lineage(tmp_path).steps("state") == []


def test_stop_by_file_without_save_leaves_no_checkpoint(start, tmp_path):
    process = start()
    await_status(process, tmp_path / "run", lambda status: status["step"] >= 2)

    ask_by_file(tmp_path, save=False)

    assert process.wait(180) == 9
    assert read_status(tmp_path / "run")["last_checkpoint"] is None
    assert lineage(tmp_path).steps("state") == []


KILL_AT = """
import os, random, signal
from trainer.train import Trainer

moments = random.Random({seed})
at, how = moments.randint(1, 9), moments.choice(["kill", "kill", "stop"])
real, count = Trainer._hooks, []

def hooks(self, parts, lines):
    import dataclasses
    made = real(self, parts, lines)
    log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def consumed(epoch, pack):
        made.consumed(epoch, pack)
        os.write(log, f"{segment} {{epoch}} {{pack}} {{self._worker.step}}\\n".encode())

    def after_step(step):
        made.after_step(step)
        count.append(step)
        if len(count) == at:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)

    return dataclasses.replace(made, consumed=consumed, after_step=after_step)

Trainer._hooks = hooks
"""


@pytest.mark.parametrize("seed", range(2))
def test_packs_are_consumed_once_per_epoch_over_random_kills_stops_and_resumes(forks, tiny, tmp_path, seed):
    """kill -9 loses the steps since the last checkpoint; they are done again, and none counts twice."""
    log, out = tmp_path / "consumed", tmp_path / "out"
    settings = settings_for(
        *tiny[:2], out, optim__epochs=3, optim__grad_accum=2, checkpoint__every=2, checkpoint__keep=2
    )
    codes = []
    for segment in range(40):
        plant = KILL_AT.format(seed=100 * seed + segment, log=str(log), segment=segment)
        process = forks.start(settings, tmp_path / "log", plant=plant)
        codes.append(process.wait(180))
        assert codes[-1] in (0, 9, -signal.SIGKILL), (tmp_path / "log").read_text()
        if codes[-1] == 0:
            break

    assert codes[-1] == 0
    assert len(codes) >= 3
    rows = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    # of each step only the last time it was done is in the final weights
    last = {step: segment for segment, _, _, step in rows}
    counted = [(epoch, pack) for segment, epoch, pack, step in rows if last[step] == segment]
    assert sorted(counted) == [(epoch, pack) for epoch in range(3) for pack in range(9)]
    assert lineage(tmp_path).find_newest().step == max(last)
