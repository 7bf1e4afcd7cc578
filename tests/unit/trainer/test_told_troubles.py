"""Troubles that end nothing are told: what cannot be removed, signed or asked, with its cause."""

from __future__ import annotations

import os

import torch

from trainer.config import DevicesConfig, PathsConfig, TrainConfig
from trainer.data import completions
from trainer.lifecycle.runfolder import LOCK, hold_output
from trainer.planning.facts import free_now


def refuse(*_args: object, **_options: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_empty_output_that_cannot_be_removed_is_told(tmp_path, monkeypatch, caplog) -> None:
    output = tmp_path / "out.jsonl"
    output.touch()
    monkeypatch.setattr(completions.Path, "unlink", refuse)

    completions._remove_empty(output, [output])

    assert "out.jsonl was made for nothing and cannot be removed: " in caplog.text
    assert "No space left on device" in caplog.text


def test_a_lock_that_cannot_name_its_holder_holds_and_says_so(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(os, "ftruncate", refuse)

    with hold_output(tmp_path / "out"):
        assert (tmp_path / "out" / LOCK).exists()

    assert "its lock cannot say by which process: " in caplog.text


def test_a_gpu_that_cannot_be_asked_is_unknown_with_its_cause(tmp_path, monkeypatch, caplog) -> None:
    def full(_device: str) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    (tmp_path / "config.json").write_text("{}")
    paths = PathsConfig(target_model=str(tmp_path), data_dir=str(tmp_path), output_dir=str(tmp_path / "out"))
    devices = DevicesConfig(target_gpus="0", drafter_gpus="0")

    assert free_now(TrainConfig(paths=paths, devices=devices)) == {}

    assert "what is free on cuda:0 is not known: CUDA error: out of memory" in caplog.text
    assert "more lines" not in caplog.text
