"""Records, log reading, locks and identities of the shim, on real files and processes."""

from __future__ import annotations

import json
import math
import os
import queue
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.shim import locks, logfile
from supervisor.shim.proc import identity_of, is_alive, signal_identity, signal_number
from supervisor.shim.records import RefusedError, check_id, null_nonfinite, read_json, write_json
from supervisor.shim.request import parse_start
from supervisor.shim.watch import MAX_PIECES, READ_BYTES, FileWatcher, LineFollower


def test_record_is_replaced_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(str(path), {"v": 1})
    write_json(str(path), {"v": 2, "text": "ü\n"})

    assert read_json(str(path)) == {"v": 2, "text": "ü\n"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_failed_write_keeps_the_old_record(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(str(path), {"v": 1})

    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(str(path), {"v": math.nan})

    assert read_json(str(path)) == {"v": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000], ids=repr)
def test_broken_record_reads_as_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(data)

    assert read_json(str(path)) is None


def test_nonfinite_numbers_become_null_and_are_named() -> None:
    found: list[str] = []

    value = null_nonfinite({"train": {"loss": math.nan, "lr": 1.0}, "x": [1, -math.inf]}, "", found)

    assert value == {"train": {"loss": None, "lr": 1.0}, "x": [1, None]}
    assert found == ["train.loss", "x[1]"]


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "../a", "a\0b", "a b", "ä", "x" * 201, ".hidden"])
def test_ids_that_could_leave_their_folder_are_refused(text: str) -> None:
    with pytest.raises(RefusedError):
        check_id(text, "attempt_id")


@given(st.binary(max_size=3000), st.integers(1, 300))
def test_last_lines_are_bounded_text_for_any_bytes(data: bytes, count: int) -> None:
    with tempfile.NamedTemporaryFile() as log:
        log.write(data)
        log.flush()
        lines = logfile.last_lines(log.name, count)

    assert len(lines) <= min(count, 200)
    assert sum(map(len, lines)) <= logfile.MAX_TAIL_CHARS
    json.dumps(lines)


def test_last_lines_are_the_last_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(
        b"".join(b"line %d\n" % n for n in range(100_000)) + b"progress 1\rprogress 2\rno newline"
    )

    assert logfile.last_lines(str(log), 3) == ["progress 1", "progress 2", "no newline"]
    assert len(logfile.last_lines(str(log))) == 200
    assert logfile.last_lines(str(log), 0) == []


def test_a_single_giant_line_is_cut_with_a_note(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 5_000_000)

    lines = logfile.last_lines(str(log))

    assert len(lines) == 1
    assert len(lines[0]) < 2100
    assert "characters" in lines[0]


def test_lock_is_held_once_and_freed_with_its_descriptor(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    fd = locks.try_lock(path)
    assert fd is not None
    assert locks.try_lock(path) is None
    assert locks.is_held(path)

    os.close(fd)

    assert not locks.is_held(path)


def test_refused_launch_keeps_none_of_its_locks(tmp_path: Path) -> None:
    root = str(tmp_path)
    first = locks.take_launch_locks(root, "a1", "run-1", ["GPU-b"], share=False)

    with pytest.raises(RefusedError) as refusal:
        locks.take_launch_locks(root, "a2", "run-2", ["GPU-a", "GPU-b"], share=False)

    assert refusal.value.reason == "LockHeld"
    assert not locks.is_held(str(tmp_path / "locks" / "run-run-2"))
    assert not locks.is_held(str(tmp_path / "locks" / "gpu-GPU-a"))
    for fd in first:
        os.close(fd)


def test_identity_of_this_process_is_alive_and_a_changed_one_is_not() -> None:
    identity = identity_of(os.getpid())
    assert identity is not None

    assert is_alive(identity) is True
    assert is_alive({**identity, "start_ticks": identity["start_ticks"] + 1}) is False
    assert is_alive({**identity, "boot_id": "other"}) is False
    assert is_alive(None) is None
    assert is_alive({}) is None


def test_process_one_is_never_signalled() -> None:
    identity = identity_of(1)
    assert identity is not None

    assert signal_identity(identity, 15) is False


@pytest.mark.parametrize("name", ["", "SIGNOPE", 0, 65, -9, None, True, "SIG_IGN"])
def test_unknown_signals_are_refused(name: object) -> None:
    with pytest.raises(RefusedError):
        signal_number(name)


def test_stop_policy_defaults_are_those_of_the_run_file() -> None:
    body = {"v": 1, "attempt_id": "a", "run_id": "r", "argv": ["x"], "log_path": "/l"}

    request = parse_start(json.dumps(body).encode())

    assert request.stop == {
        "signal": "SIGTERM",
        "grace_s": 120.0,
        "extend_max_s": 900.0,
        "term_s": 30.0,
        "kill_s": 10.0,
        "verify_s": 60.0,
    }
    environment = request.environment("/run/folder")
    assert environment["DFLASH_RUN_DIR"] == "/run/folder"
    assert environment["DFLASH_RUN_TOKEN"] == request.token
    assert "SSH_CONNECTION" not in environment


def test_integers_that_no_64_bits_hold_are_null_and_named() -> None:
    found: list[str] = []

    assert null_nonfinite({"t": 10**400, "step": -(1 << 64), "n": (1 << 63) - 1, "on": True}, "", found) == {
        "t": None,
        "step": None,
        "n": (1 << 63) - 1,
        "on": True,
    }
    assert found == ["t", "step"]


def make_unreadable(path: Path, kind: str) -> None:
    """Something in the place of a record that a careless reader would wait for, or read for ever."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path.name)
    else:
        path.symlink_to("/dev/zero")


UNREADABLE = ["pipe", "folder", "link to itself", "device"]


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_file_reads_as_none(tmp_path: Path, kind: str) -> None:
    make_unreadable(tmp_path / "status.json", kind)

    assert read_json(str(tmp_path / "status.json")) is None


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_file_gives_no_lines_and_does_not_end_the_watch_of_others(
    tmp_path: Path, kind: str
) -> None:
    for name in ("bad", "good"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    make_unreadable(tmp_path / "attempts" / "bad" / "metrics.ndjson", kind)
    (tmp_path / "attempts" / "good" / "metrics.ndjson").write_text('3\n{"t": 1}\n')
    frames: queue.Queue[dict[str, object]] = queue.Queue()
    watcher = FileWatcher(str(tmp_path), frames.put)

    watcher.set_targets(["bad", "good"], with_log=False, offsets={})

    assert frames.get(timeout=60)["attempt_id"] == "good"
    watcher.set_targets([], with_log=False, offsets={})  # its lock is free: no look hangs


def test_an_attempt_that_is_let_go_is_looked_at_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileWatcher, "_run", lambda self: None)  # no look of its own
    folder = tmp_path / "attempts" / "a"
    folder.mkdir(parents=True)
    frames: queue.Queue[dict[str, object]] = queue.Queue()
    watcher = FileWatcher(str(tmp_path), frames.put)
    watcher.set_targets(["a"], with_log=False, offsets={})

    (folder / "metrics.ndjson").write_text('{"t": 1, "step": 24}\n')
    watcher.set_targets([], with_log=False, offsets={})

    assert frames.get(timeout=60)["record"] == {"t": 1, "step": 24}


def test_lines_come_a_bounded_piece_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.ndjson"
    path.write_bytes(b"x" * (MAX_PIECES + 2) * READ_BYTES + b'\n{"t": 1}\n')
    follower = LineFollower(str(path))

    assert follower.read() == []
    assert [record for record, _, _ in follower.read()] == [{"t": 1}]
    follower.close()
