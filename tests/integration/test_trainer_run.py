"""Whole training runs on the tiny target: learning, resuming, failing, and what they leave behind."""

import json
import os
import signal
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_samples, tiny_target, write_tiny_corpus
from tests.support.trainer_runs import (
    await_end_of_workers,
    metrics_lines,
    read_status,
    run_here,
    settings_for,
)
from trainer import assembly
from trainer import train as train_module
from trainer.checkpoint.store import verify
from trainer.drafter.exported import load_drafter
from trainer.drafter.worker import DrafterWorker
from trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DependencyError,
    NonFiniteError,
    PipelineError,
    StalledError,
    WorkerDiedError,
)
from trainer.eval import online
from trainer.lifecycle.heartbeat import StatusFile
from trainer.lifecycle.runfolder import hold_output
from trainer.pipeline.workers import Board
from trainer.target.capture import Target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def visits(monkeypatch):
    """Record of every micro-batch: pack, anchors, noise amplitude and seed, learning rate of its step."""
    seen = []
    real_sums, real_step = train_module_worker("microbatch_sums"), train_module_worker("MasterAdamW").step

    def sums(drafter, ends, pack, anchors, labels, **options):
        seen.append(
            {
                "pack": (pack.epoch, pack.pack_id),
                "anchors": anchors.position_A.tolist(),
                "sigma": options["noise_sigma"],
                "noise_seed": options["noise_seed"],
            }
        )
        return real_sums(drafter, ends, pack, anchors, labels, **options)

    def step(self, lr):
        seen.append({"lr": lr})
        real_step(self, lr)

    monkeypatch.setattr("trainer.drafter.worker.microbatch_sums", sums)
    monkeypatch.setattr("trainer.optim.adamw.MasterAdamW.step", step)
    return seen


def train_module_worker(name):
    from trainer.drafter import worker

    return getattr(worker, name)


def state_tensors(out, step, lineage="lineage-0000"):
    return load_file(out / lineage / "state" / f"step-{step:08d}" / "tensors.safetensors")


def stop_after(monkeypatch, step):
    """Ask for a stop through the board when a step is done, as the monitor would."""
    real = DrafterWorker.train_step

    def train_step(self):
        went_on = real(self)
        if self.step >= step:
            self._board.stop.set()
        return went_on

    monkeypatch.setattr(DrafterWorker, "train_step", train_step)


def test_run_trains_saves_exports_and_reports(tiny, out, capsys):
    code = run_here(settings_for(*tiny, out, checkpoint__every=4, checkpoint__keep_best=0, optim__lr=0.003))

    status = read_status(out / "run")
    lines = metrics_lines(out / "run")
    assert code == 0
    assert (status["phase"], status["step"], status["total_steps"]) == ("done", 18, 18)
    assert status["last_checkpoint"]["step"] == 18
    assert lines[-1]["step"] == 18
    assert lines[-1]["train"]["loss"] < lines[0]["train"]["loss"]
    for kind in ("state", "export"):
        steps = sorted(entry.name for entry in (out / "lineage-0000" / kind).iterdir())
        assert steps == ["step-00000012", "step-00000016", "step-00000018"]
        for name in steps:
            verify(out / "lineage-0000" / kind / name)
    drafter = load_drafter(out / "lineage-0000" / "export" / "step-00000018")
    assert drafter.config.block_size == 4


def test_golden_26_target_embedding_and_head_are_never_changed(tiny, out, monkeypatch):
    targets = []
    real = assembly.load_target

    def load(*args, **options):
        target = real(*args, **options)
        targets.append((target, {n: p.detach().clone() for n, p in target._model.named_parameters()}))
        return target

    monkeypatch.setattr(assembly, "load_target", load)

    assert run_here(settings_for(*tiny, out)) == 0

    target, before = targets[0]
    for name, parameter in target._model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None, name


def test_golden_36_ordered_resume_repeats_the_uninterrupted_run_bit_for_bit(
    tiny, tmp_path, visits, monkeypatch
):
    """Fifty steps after the resume, over epoch borders that fall inside of accumulated steps."""
    common = {"queue__ordered": True, "optim__grad_accum": 2, "optim__epochs": 13}
    assert run_here(settings_for(*tiny, tmp_path / "whole", **common)) == 0
    whole, total = list(visits), 59
    visits.clear()

    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        run_here(settings_for(*tiny, tmp_path / "parts", **common))
    assert read_status(tmp_path / "parts" / "run")["last_checkpoint"]["step"] == 9
    first = list(visits)
    visits.clear()
    assert run_here(settings_for(*tiny, tmp_path / "parts", **common)) == 0

    assert len(first) == 3 * 9
    assert total - 9 == 50
    assert first + visits == whole
    left, right = state_tensors(tmp_path / "whole", total), state_tensors(tmp_path / "parts", total)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_golden_36_free_running_resume_visits_every_pack_once(tiny, out, visits, monkeypatch):
    common = {"optim__grad_accum": 2, "optim__epochs": 2}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        run_here(settings_for(*tiny, out, **common))
    done = 6
    first = [visit["pack"] for visit in visits if "pack" in visit][:done]
    visits.clear()

    assert run_here(settings_for(*tiny, out, **common)) == 0

    second = [visit["pack"] for visit in visits if "pack" in visit]
    assert sorted(first + second) == [(epoch, pack) for epoch in range(2) for pack in range(9)]


def test_three_targets_share_the_packs_and_train_each_once(tiny, out, visits, caplog):
    caplog.set_level("INFO")

    assert run_here(settings_for(*tiny, out, devices__target_gpus="cpu,cpu,cpu")) == 0

    packs = [visit["pack"] for visit in visits if "pack" in visit]
    assert sorted(packs) == [(epoch, pack) for epoch in range(2) for pack in range(9)]
    workers = {entry["name"]: entry for entry in metrics_lines(out / "run")[-1]["workers"]}
    assert list(workers) == ["target-cpu0", "target-cpu1", "target-cpu2", "drafter-cpu"]
    assert sum(workers[f"target-cpu{place}"]["batches"] for place in range(3)) == len(packs)
    assert read_status(out / "run")["step"] == 18


def test_finished_run_has_nothing_left_to_do_on_resume(tiny, out):
    assert run_here(settings_for(*tiny, out)) == 0
    before = state_tensors(out, 18)

    assert run_here(settings_for(*tiny, out)) == 0

    assert all(torch.equal(value, state_tensors(out, 18)[name]) for name, value in before.items())


def test_damaged_newest_checkpoint_is_skipped_and_said(tiny, out, caplog):
    caplog.set_level("INFO")
    assert run_here(settings_for(*tiny, out, checkpoint__every=6)) == 0
    weights = out / "lineage-0000" / "state" / "step-00000018" / "tensors.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)

    assert run_here(settings_for(*tiny, out, checkpoint__every=6)) == 0

    assert "checkpoint skipped:" in caplog.text
    assert "step-00000018" in caplog.text
    assert "resumed from" in caplog.text
    verify(out / "lineage-0000" / "state" / "step-00000018")
    assert (out / "lineage-0000" / "state" / "step-00000018.replaced-1").is_dir()


def test_scratch_starts_over_in_a_new_lineage(tiny, out):
    assert run_here(settings_for(*tiny, out)) == 0
    assert run_here(settings_for(*tiny, out, checkpoint__resume="scratch")) == 0

    first, second = state_tensors(out, 18), state_tensors(out, 18, "lineage-0001")
    assert first.keys() == second.keys()


def test_resume_with_other_data_is_refused_by_name(tiny, out, tmp_path):
    run_here(settings_for(*tiny, out, optim__max_steps=2))
    other = write_tiny_corpus(tmp_path / "other", tiny_samples(seed=5))

    with pytest.raises(CheckpointError, match=r"data\.sha256 was .* restore these or use --resume scratch"):
        run_here(settings_for(tiny[0], other, out, optim__max_steps=4))


def test_resume_with_another_learning_rate_is_recorded(tiny, out, caplog):
    run_here(settings_for(*tiny, out, optim__max_steps=2))

    assert run_here(settings_for(*tiny, out, optim__max_steps=4, optim__lr=0.01)) == 0

    assert "resumed with a difference: optim.lr was 0.0006, is 0.01" in caplog.text
    record = json.loads((out / "run" / "resume.json").read_text())
    assert record["step"] == 2
    assert record["differences"] == [
        {"field": "optim.lr", "was": 0.0006, "is": 0.01},
        {"field": "optim.max_steps", "was": 2, "is": 4},
        {"field": "plan.total_steps", "was": 2, "is": 4},
    ]
    assert record["order"].startswith("free-running")


def test_memory_error_in_a_worker_is_an_out_of_memory_exit(tiny, out, monkeypatch):
    from trainer.lifecycle.exits import exit_code, translate

    def broken(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr("trainer.target.worker.collate", broken)

    with pytest.raises(WorkerDiedError) as caught:
        run_here(settings_for(*tiny, out))

    assert exit_code(translate(caught.value)) == 6


def test_data_without_a_usable_sample_fails_before_the_target_is_loaded(tiny, out, tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "load_target", lambda *_a, **_k: pytest.fail("target was loaded"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.jsonl").write_text('{"input_ids": []}\nnot json\n')

    with pytest.raises(DataError, match="no usable sample"):
        run_here(settings_for(tiny[0], tmp_path / "bad", out))


def test_gpu_that_does_not_exist_is_one_clear_error(tiny, out):
    with pytest.raises(ConfigError, match="--target-gpus names 63, but torch sees"):
        run_here(settings_for(*tiny, out, devices__target_gpus="63"))


def test_required_part_that_is_missing_refuses_the_start_with_exit_8(tiny, out, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with pytest.raises(DependencyError, match=r"nvml \(module pynvml cannot be imported") as caught:
        run_here(settings_for(*tiny, out, telemetry__nvml="required"))

    assert caught.value.exit_code == 8


def test_wanted_part_that_is_missing_stands_in_status_and_report(tiny, out, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert run_here(settings_for(*tiny, out, optim__max_steps=1)) == 0

    assert "module pynvml cannot be imported" in read_status(out / "run")["degraded"]["nvml"]


def test_failed_periodic_save_is_reported_and_training_goes_on(tiny, out, monkeypatch, caplog):
    real = train_module.CheckpointStore.save

    def save(self, kind, step, fill):
        if step == 6:
            raise CheckpointError("disk full")
        return real(self, kind, step, fill)

    monkeypatch.setattr(train_module.CheckpointStore, "save", save)

    assert run_here(settings_for(*tiny, out, checkpoint__every=6)) == 0

    assert "checkpoint of step 6 failed, training goes on: disk full" in caplog.text
    assert read_status(out / "run")["last_checkpoint"]["step"] == 18


def test_evaluation_measures_acceptance_between_steps(tiny, out, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": f"say {n}"}) + "\n" for n in range(3)))
    changes = {"eval__every": 9, "eval__prompts": prompts, "eval__max_prompts": 2, "eval__max_new_tokens": 6}

    assert run_here(settings_for(*tiny, out, **changes)) == 0

    records = [line["eval"] for line in metrics_lines(out / "run") if "eval" in line]
    assert [record["step"] for record in records] == [9, 18]
    assert all(1.0 <= record["acceptance_length"] <= 4.0 for record in records)
    assert all(1.0 <= record["eal"] <= 4.0 for record in records)
    assert all(set(record["per_offset"]) == {"1", "2", "3"} for record in records)
    assert all(record["prompts"] <= 2 for record in records)


def test_held_out_samples_are_estimated_on_their_own_turn_and_choose_the_best_checkpoint(tiny, out, tmp_path):
    held_out = write_tiny_corpus(tmp_path / "held_out", tiny_samples(6, seed=9))
    changes = {"eval__held_out_data": f'"{held_out}"', "eval__held_out_every": 6, "checkpoint__every": 6}

    assert run_here(settings_for(*tiny, out, **changes)) == 0

    records = [line["eval"] for line in metrics_lines(out / "run") if "eval" in line]
    assert [record["step"] for record in records] == [6, 12, 18]
    assert all(record["held_out_eal"] == record["eal"] >= 1.0 for record in records)
    assert len({record["held_out_eal_blocks"] for record in records}) == 1
    assert all("acceptance_length" not in record for record in records)
    scores = json.loads((out / "lineage-0000" / "scores.json").read_text())
    assert "held_out_eal" in json.dumps(scores)


def test_stop_does_not_wait_for_the_rest_of_an_evaluation(tiny, out, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": f"say {n}"}) + "\n" for n in range(5)))
    decoded, draining = [], threading.Event()
    real, real_drain = online.decode_prompts, StatusFile.drain

    def drain(self, message):
        real_drain(self, message)
        draining.set()

    def generate(*args, **options):
        decoded.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert draining.wait(120)
        return real(*args, **options)

    monkeypatch.setattr(online, "decode_prompts", generate)
    monkeypatch.setattr(StatusFile, "drain", drain)

    assert run_here(settings_for(*tiny, out, eval__every=2, eval__prompts=prompts, optim__epochs=50)) == 9

    assert len(decoded) == 1
    assert "given up for a stop" in caplog.text
    assert read_status(out / "run")["last_checkpoint"]["step"] == 2


def test_cached_hidden_states_spare_the_target_after_the_first_epoch(tiny, out, monkeypatch):
    calls = []
    real = Target.hidden_states

    def counting(self, *args, **options):
        if threading.current_thread().name.startswith("target"):  # the start-up check is none of the workers
            calls.append(1)
        return real(self, *args, **options)

    monkeypatch.setattr(Target, "hidden_states", counting)

    assert run_here(settings_for(*tiny, out, optim__epochs=4, target__cache_features_bytes=10**9)) == 0

    assert len(calls) == 9
    assert read_status(out / "run")["step"] == 36


def test_run_folder_holds_configuration_versions_and_capabilities(tiny, out, tmp_path):
    run_dir = tmp_path / "attempt"

    assert run_here(settings_for(*tiny, out, optim__max_steps=1), DFLASH_RUN_DIR=str(run_dir)) == 0

    record = json.loads((run_dir / "config.json").read_text())
    startup = json.loads((run_dir / "startup.json").read_text())
    assert record["config"]["drafter"]["block_size"] == 4
    assert len(record["config_hash"]) == 64
    assert record["sources"]["drafter.block_size"] == "--set"
    assert (
        record["code"]["versions"]["torch"] == torch.__version__.split("+")[0]
        or record["code"]["versions"]["torch"]
    )
    names = {entry["name"]: entry for entry in startup["capabilities"]}
    assert not names["cuda"]["is_on"]
    assert names["nvml"]["is_on"] or names["nvml"]["reason"]
    assert not (out / "run").exists()


def test_second_trainer_on_the_same_output_is_refused_naming_the_first(tiny, out):
    with (
        hold_output(out),
        pytest.raises(ConfigError, match=rf"in use by another trainer: .* \(pid {os.getpid()}\)"),
    ):
        run_here(settings_for(*tiny, out))


def test_hung_worker_is_found_by_the_stall_limit(tiny, out, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("trainer.target.worker.collate", lambda *_a, **_k: release.wait(600))
    monkeypatch.setattr(train_module, "JOIN_AFTER_FAILURE_S", 0.1)

    with pytest.raises(StalledError, match=r"nothing moved for .* queue\.stall_s") as caught:
        run_here(settings_for(*tiny, out, queue__stall_s=0.5))
    release.set()
    await_end_of_workers()

    assert caught.value.exit_code == 7
    assert "nothing moved" in read_status(out / "run")["message"]


def test_error_of_a_worker_that_fails_while_the_monitor_looks_keeps_its_exit_code(tiny, out, monkeypatch):
    real = Board.check

    def check(self):
        if threading.current_thread() is threading.main_thread():
            self.fail("drafter-cpu", NonFiniteError("five in a row"))
        real(self)

    monkeypatch.setattr(Board, "check", check)

    with pytest.raises(NonFiniteError, match="five in a row"):
        run_here(settings_for(*tiny, out, optim__epochs=2_000))


def test_stop_that_comes_while_the_last_checkpoint_is_saved_finds_a_finished_run(tiny, out, monkeypatch):
    real = train_module.CheckpointStore.save

    def save(self, kind, step, fill):
        if kind == "state":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, kind, step, fill)

    monkeypatch.setattr(train_module.CheckpointStore, "save", save)

    assert run_here(settings_for(*tiny, out, optim__max_steps=3)) == 0
    assert read_status(out / "run")["message"] == "finished"


def test_packs_that_run_out_before_the_plan_is_done_are_an_error_and_no_stop(tiny, out, monkeypatch):
    real = assembly.total_steps_after
    monkeypatch.setattr(assembly, "total_steps_after", lambda *args, **facts: real(*args, **facts) + 4)

    with pytest.raises(
        PipelineError, match=r"^the packs ran out at step (\d+) of \d+ without a stop"
    ) as caught:
        run_here(settings_for(*tiny, out, optim__epochs=1))

    assert caught.value.exit_code == 7
    assert "\n" not in str(caught.value)
    assert "the packs ran out" in read_status(out / "run")["message"]
    step = int(str(caught.value).split("step ")[1].split()[0])
    assert (out / "lineage-0000" / "state" / f"step-{step:08d}").is_dir()


def test_last_metrics_line_says_the_rate_and_noise_of_the_last_step(tiny, out, visits):
    assert run_here(settings_for(*tiny, out, optim__max_steps=3, telemetry__log_every=2)) == 0

    rates = [visit["lr"] for visit in visits if "lr" in visit]
    sigmas = [visit["sigma"] for visit in visits if "sigma" in visit]
    last = metrics_lines(out / "run")[-1]["train"]
    assert (last["lr"], last["noise_sigma"]) == (rates[-1], sigmas[-1])
    assert rates[-1] > 0


def test_exports_without_a_state_do_not_pile_up_while_the_disk_is_full(tiny, out, monkeypatch):
    real = train_module.CheckpointStore.save
    exports = []

    def save(self, kind, step, fill):
        exports.append(len(self.steps("export")))
        if kind == "state" and step < 8:
            raise CheckpointError("no space")
        return real(self, kind, step, fill)

    monkeypatch.setattr(train_module.CheckpointStore, "save", save)

    changes = {"optim__max_steps": 8, "optim__epochs": 20, "checkpoint__every": 1, "checkpoint__keep": 2}
    assert run_here(settings_for(*tiny, out, **changes)) == 0

    assert max(exports) == 3  # the two that are kept, and the one just written
