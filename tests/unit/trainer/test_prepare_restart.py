"""`prepare` under kill -9, twice at once, and on many rows: nothing twice, nothing half, nothing held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support import killed_prepare
from tests.support.tiny import tiny_target
from trainer.data import prepare as prepare_module
from trainer.data import staging as staging_module
from trainer.data.corpus import Corpus
from trainer.data.prepare import run_prepare
from trainer.data.pretrained import get_tokenizer, stop_token_ids
from trainer.data.staging import PARTIAL_DIR, Staging, locked_output
from trainer.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("restart"))


@pytest.fixture(autouse=True)
def small_commits(monkeypatch, model_dir):
    tokenizer = get_tokenizer(model_dir)
    stops = stop_token_ids(model_dir, tokenizer)
    monkeypatch.setattr(prepare_module, "COMMIT_TOKENS", killed_prepare.COMMIT_TOKENS)
    # Reading the tokenizer again and again would be most of the time spent here.
    monkeypatch.setattr(prepare_module, "get_tokenizer", lambda *_, **__: tokenizer)
    monkeypatch.setattr(prepare_module, "stop_token_ids", lambda *_: stops)


def write_chats(path, count, *, answer="yes it is"):
    with path.open("w") as stream:
        for number in range(count):
            turns = [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": answer},
            ]
            stream.write(json.dumps({"id": f"r{number}", "messages": turns}) + "\n")
            if number % 5 == 0:
                # A duplicate and a bad row, so that digests and counts have to survive as well.
                stream.write(json.dumps({"id": f"again{number}", "messages": turns}) + "\n{oops\n\n")


def content_of(output):
    """Everything that a reader finds: rows by part, prompts, report."""
    rows = {
        part: [
            row
            for file in sorted(folder.glob(f"{part}-*.parquet"))
            for row in pq.read_table(file).to_pylist()
        ]
        for part, folder in (("train", output), ("held_out", output / "held_out"))
    }
    prompts = (output / "held_out" / "prompts.jsonl").read_text()
    return rows, prompts, json.loads((output / "report.json").read_text())


def names_in(output):
    return sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())


def test_a_run_killed_at_any_change_of_the_file_system_ends_like_an_undisturbed_one(model_dir, tmp_path):
    source = tmp_path / "chats.jsonl"
    write_chats(source, 12)
    whole = tmp_path / "whole"
    run_prepare(killed_prepare.arguments(model_dir, source, whole))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.killed_prepare",
            str(model_dir),
            str(source),
            str(tmp_path / "killed"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    killed = int(done.stdout.split()[-1])
    assert killed > 30
    moving = 0
    for change in range(1, killed + 1):
        output = tmp_path / "killed" / str(change)
        leaves_no_half_set(output)
        was_moving, _ = Staging(output, {}).finish_interrupted()
        if was_moving:
            moving += 1
            assert content_of(output) == content_of(whole), change
        run_prepare(killed_prepare.arguments(model_dir, source, output))
        assert content_of(output) == content_of(whole), change
        assert names_in(output) == names_in(whole), change
    assert moving > 5


def leaves_no_half_set(output):
    """A reader gets the whole set, or an error."""
    try:
        corpus = Corpus.open(output, max_seq_len=128, vocab_size=97)
    except DataError as error:
        message = str(error)
    else:
        message = ""
        assert len(corpus) == json.loads((output / "report.json").read_text())["train"]
    assert not message or any(
        text in message for text in ("run it again", "does not exist", "directly in the data directory")
    )


def interrupt_after(monkeypatch, commits):
    """Let the n-th commit be the last thing that happens."""
    original = Staging.commit
    left = [commits]

    def commit(self):
        original(self)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "commit", commit)


def run_interrupted(monkeypatch, arguments):
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            run_prepare(arguments)


def test_work_goes_on_where_it_stopped(model_dir, tmp_path, monkeypatch, caplog):
    source = tmp_path / "chats.jsonl"
    write_chats(source, 40)
    arguments = killed_prepare.arguments(model_dir, source, tmp_path / "out")
    run_interrupted(monkeypatch, arguments)
    parsed = []
    original = prepare_module.parse_conversation
    monkeypatch.setattr(prepare_module, "parse_conversation", lambda row: parsed.append(row) or original(row))

    with caplog.at_level("INFO"):
        run_prepare(arguments)

    rows, _, report = content_of(tmp_path / "out")
    assert 0 < len(parsed) < 40
    assert "going on behind row" in caplog.text
    identities = [row["id"] for part in rows.values() for row in part]
    assert sorted(identities) == sorted(f"r{n}" for n in range(40))
    assert (report["rows"], report["kept"], report["dropped"]["duplicate"]["count"]) == (56, 40, 8)


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[]", b"{}"])
def test_a_note_that_cannot_be_read_is_told_and_nothing_is_thrown_away(
    model_dir, tmp_path, monkeypatch, damage
):
    source, output = tmp_path / "chats.jsonl", tmp_path / "out"
    write_chats(source, 40)
    arguments = killed_prepare.arguments(model_dir, source, output)
    run_interrupted(monkeypatch, arguments)
    (output / PARTIAL_DIR / "state.json").write_bytes(damage)
    before = names_in(output)

    for read in (lambda: run_prepare(arguments), lambda: staging_module.find_interrupted(output)):
        with pytest.raises(DataError, match="note of an interrupted prepare"):
            read()

    assert names_in(output) == before


@pytest.mark.parametrize("change", ["input", "flag"])
def test_work_on_another_input_or_with_other_flags_is_begun_anew(model_dir, tmp_path, monkeypatch, change):
    source = tmp_path / "chats.jsonl"
    write_chats(source, 40)
    arguments = killed_prepare.arguments(model_dir, source, tmp_path / "out")
    run_interrupted(monkeypatch, arguments)
    if change == "input":
        write_chats(source, 30, answer="no it is not")
    else:
        arguments.max_seq_len = 64

    run_prepare(arguments)

    count = 30 if change == "input" else 40
    rows, _, report = content_of(tmp_path / "out")
    assert report["kept"] == count == sum(len(part) for part in rows.values())
    assert not (tmp_path / "out" / PARTIAL_DIR).exists()


def test_a_set_that_was_there_stays_until_the_new_one_is_complete(model_dir, tmp_path, monkeypatch):
    source = tmp_path / "chats.jsonl"
    write_chats(source, 20)
    arguments = killed_prepare.arguments(model_dir, source, tmp_path / "out")
    run_prepare(arguments)
    before = content_of(tmp_path / "out")
    write_chats(source, 40)
    run_interrupted(monkeypatch, arguments)

    assert content_of(tmp_path / "out") == before
    run_prepare(arguments)
    assert content_of(tmp_path / "out")[2]["kept"] == 40


def test_a_move_that_was_cut_off_is_finished_without_reading_the_input_again(
    model_dir, tmp_path, monkeypatch, capsys
):
    source = tmp_path / "chats.jsonl"
    write_chats(source, 10)
    arguments = killed_prepare.arguments(model_dir, source, tmp_path / "out")
    run_prepare(arguments)
    whole, printed = content_of(tmp_path / "out"), capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(staging_module, "_move", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_prepare(arguments)
    monkeypatch.setattr(prepare_module, "read_rows", lambda *_, **__: pytest.fail("input was read again"))

    run_prepare(arguments)

    assert content_of(tmp_path / "out") == whole
    assert capsys.readouterr().out == printed


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_second_prepare_on_the_same_output_is_refused(model_dir, tmp_path):
    source = tmp_path / "chats.jsonl"
    write_chats(source, 5)

    with (
        locked_output(tmp_path / "out"),
        pytest.raises(ConfigError, match="another prepare writes to this output"),
    ):
        run_prepare(killed_prepare.arguments(model_dir, source, tmp_path / "out"))


def test_an_output_that_cannot_be_written_is_named(model_dir, tmp_path, monkeypatch):
    source = tmp_path / "chats.jsonl"
    write_chats(source, 5)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging_module, "sync_path", full)
    with pytest.raises(DataError, match=r"cannot write to --output: .*out: No space left on device"):
        run_prepare(killed_prepare.arguments(model_dir, source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_number_of_rows(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(staging_module, "ROWS_PER_GROUP", 20)
    monkeypatch.setattr(prepare_module, "COMMIT_TOKENS", 20_000)
    answer = "a long answer " * 40
    peaks = []
    for count in (60, 100, 700):
        source = tmp_path / f"{count}.jsonl"
        write_chats(source, count, answer=answer)
        tracemalloc.start()
        run_prepare(killed_prepare.arguments(model_dir, source, tmp_path / str(count)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    # 600 rows more: their texts alone are 360 kB, their tokens (one a character) as Python lists 3 MB.
    assert peaks[2] - peaks[1] < 150_000, peaks
