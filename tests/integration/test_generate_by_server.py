"""`generate --base-url` against a real HTTP server that is busy, broken, slow or gone."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from tests.support.chat_server import Act, ChatServer, chat_server
from tests.support.ports import reserved_port
from tests.support.tiny import VOCAB, tiny_target, tiny_tokenizer
from tests.support.trainer_runs import await_until
from trainer.arguments import add_generate_arguments, add_prepare_arguments
from trainer.data import openai_client
from trainer.data.corpus import Corpus
from trainer.data.generate import run_generate
from trainer.data.openai_client import ChatClient, NoAnswerError, parse_base_url
from trainer.data.prepare import run_prepare
from trainer.errors import ConfigError, DataError, StalledError

KEY = "key-of-the-test-0123"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def short_waits_and_no_key(monkeypatch):
    monkeypatch.setattr(openai_client, "FIRST_WAIT_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def write_prompts(folder: Path, count: int = 12) -> None:
    rows = [{"id": f"p{n}", "domain": "d", "prompt": f"question {n}"} for n in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def words(server: ChatServer | str, folder: Path, *extra: str) -> list[str]:
    url = server if isinstance(server, str) else server.url
    files = ["--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "out.jsonl")]
    return ["--base-url", url, "--model", "tiny", *files, "--max-new-tokens", "7", *extra]


def run(server: ChatServer | str, folder: Path, *extra: str) -> list[dict]:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    assert run_generate(parser.parse_args(words(server, folder, "--concurrency", "4", *extra))) == 0
    return rows_of(folder)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def assert_each_once(rows: list[dict], count: int = 12) -> None:
    assert sorted(row["id"] for row in rows) == sorted(f"p{n}" for n in range(count))
    for row in rows:
        question, answer = row["messages"]
        assert answer == {"role": "assistant", "content": f"re: {question['content']}"}
        assert question["content"] == f"question {row['id'][1:]}"


def client_of(server: ChatServer, **fields) -> ChatClient:
    settings = {"model": "tiny", "max_new_tokens": 7, "attempt_s": 10.0, "max_tries": 3} | fields
    return ChatClient(endpoint=parse_base_url(server.url), **settings)


def test_every_prompt_is_completed_once_and_asked_for_greedily(tmp_path, capsys):
    write_prompts(tmp_path)
    with chat_server(lambda number, body: Act()) as server:
        rows = run(server, tmp_path)

    assert_each_once(rows)
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert set(server.paths) == {"/v1/chat/completions"}
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in server.requests} == {
        ("tiny", 0, 7)
    }
    assert not any("chat_template_kwargs" in body for body in server.requests)
    summary = json.loads(capsys.readouterr().out)
    assert (summary["written"], summary["tokens"], summary["failed"]) == (12, 36, 0)


def test_busy_broken_and_cut_answers_are_tried_again(tmp_path):
    write_prompts(tmp_path)
    faults = {
        1: Act(status=429, headers={"Retry-After": "0"}),
        2: Act(status=500, text="boom"),
        3: Act(fault="reset"),
        4: Act(fault="cut"),
        5: Act(status=503, text=""),
        6: Act(text="<html>not json</html>"),
        7: Act(text='{"choices": []}'),
        8: Act(status=429),
    }
    with chat_server(lambda number, body: faults.get(number, Act())) as server:
        rows = run(server, tmp_path)

    assert_each_once(rows)
    assert len(server.requests) == 12 + len(faults)
    asked = Counter(body["messages"][-1]["content"] for body in server.requests)
    assert len(asked) == 12


def test_answers_out_of_order_reach_their_own_prompts(tmp_path):
    write_prompts(tmp_path)
    later = threading.Event()

    def plan(number: int, body: dict) -> Act:
        if number == 8:
            later.set()
        return Act(wait_for=later if number <= 3 else None)

    with chat_server(plan) as server:
        rows = run(server, tmp_path)

    assert_each_once(rows)
    assert rows[0]["messages"][0]["content"] not in [
        body["messages"][0]["content"] for body in server.requests[:3]
    ]


@pytest.mark.parametrize("fault", ["hang", "dribble"])
def test_an_answer_that_does_not_end_is_given_up_at_its_deadline(fault):
    with chat_server(lambda number, body: Act(fault=fault if number == 1 else "")) as server:
        client = client_of(server, attempt_s=1.0, max_tries=30)
        answer = client.complete([{"role": "user", "content": "x"}])

    assert answer.message["content"] == "re: x"
    # two on a quick machine; a stalled one may miss the deadline again and asks once more
    assert len(server.requests) >= 2


def test_a_server_that_only_dribbles_is_no_answer():
    with chat_server(lambda number, body: Act(fault="dribble")) as server:
        client = client_of(server, attempt_s=0.5, max_tries=2)

        with pytest.raises(NoAnswerError, match=r"no whole answer within 0\.5 s"):
            client.complete([{"role": "user", "content": "x"}])
    # an attempt that ran out of time before it was sent has left no request
    assert len(server.requests) <= 2


def test_retry_after_is_honoured_within_bounds():
    with chat_server(lambda number, body: Act()) as server:
        client = client_of(server)
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=5000), usegmt=True)

    asked = [openai_client._retry_after_s({"retry-after": text}) for text in ("7", "1.5", date, "soon", "-3")]

    assert asked[:2] == [7.0, 1.5]
    assert 4000 < asked[2] <= 5000
    assert asked[3:] == [0.0, 0.0]
    assert 7.0 <= client._wait_s(0, 7.0) < 7.1
    assert client._wait_s(0, 99_999.0) == openai_client.LONGEST_WAIT_S


def test_waits_grow_are_jittered_and_bounded(monkeypatch):
    monkeypatch.setattr(openai_client, "FIRST_WAIT_S", 1.0)
    with chat_server(lambda number, body: Act()) as server:
        client = client_of(server)

    for attempt, full in [(0, 1.0), (3, 8.0), (40, openai_client.LONGEST_WAIT_S)]:
        waits = [client._wait_s(attempt, 0.0) for _ in range(50)]
        assert min(waits) >= full / 2
        assert max(waits) <= full
        assert len(set(waits)) > 10


def test_retry_after_delays_the_next_attempt():
    times = []

    def plan(number: int, body: dict) -> Act:
        times.append(time.monotonic())
        return Act(status=429, headers={"Retry-After": "1"}) if number == 1 else Act()

    with chat_server(plan) as server:
        client_of(server).complete([{"role": "user", "content": "x"}])

    assert times[1] - times[0] >= 1.0


def test_cut_off_answers_are_kept_and_counted(tmp_path, capsys):
    write_prompts(tmp_path)
    with chat_server(lambda number, body: Act(finish_reason="length" if number == 2 else "stop")) as server:
        rows = run(server, tmp_path)

    assert Counter(row["finish_reason"] for row in rows) == {"stop": 11, "length": 1}
    assert json.loads(capsys.readouterr().out)["cut_off"] == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("thinking", ["on", "off"])
def test_thinking_is_asked_for_recorded_and_kept(tmp_path, thinking, name):
    write_prompts(tmp_path, 2)
    said = {"role": "assistant", "content": "4", name: "two and two"}
    with chat_server(lambda number, body: Act(message=said)) as server:
        rows = run(server, tmp_path, "--thinking", thinking)

    is_on = thinking == "on"
    assert [body["chat_template_kwargs"] for body in server.requests] == [{"enable_thinking": is_on}] * 2
    assert [row["thinking"] for row in rows] == [is_on] * 2
    assert rows[0]["messages"][-1] == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "two and two",
    }
    assert json.loads((tmp_path / "out.jsonl.settings.json").read_text())["thinking"] == thinking


def test_tools_go_to_the_server_and_calls_come_back(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {"id": "t", "messages": [{"role": "user", "content": "1+1"}], "tools": [tool]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    with chat_server(lambda number, body: Act(message=said, finish_reason="tool_calls")) as server:
        rows = run(server, tmp_path)

    assert server.requests[0]["tools"] == [tool]
    assert rows[0]["tools"] == [tool]
    assert rows[0]["messages"][-1] == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_prepare_reads_what_a_server_said(tmp_path):
    write_prompts(tmp_path)
    target = tiny_target(tmp_path)
    with chat_server(lambda number, body: Act(finish_reason="length" if number == 1 else "stop")) as server:
        rows = run(server, tmp_path)
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)
    files = ["--input", str(tmp_path / "out.jsonl"), "--output", str(tmp_path / "data")]

    run_prepare(parser.parse_args(["--target-model", str(target), *files]))

    tokenizer = tiny_tokenizer()
    corpus = Corpus.open(tmp_path / "data", max_seq_len=512, vocab_size=VOCAB)
    spoken = sorted(tokenizer.decode(sample.input_ids_T[sample.loss_mask_T]) for sample in corpus)
    ends = {"stop": "<|im_end|>", "length": ""}
    assert spoken == sorted(row["messages"][-1]["content"] + ends[row["finish_reason"]] for row in rows)


def test_a_refused_prompt_is_counted_and_the_others_go_on(tmp_path, capsys):
    write_prompts(tmp_path)

    def plan(number: int, body: dict) -> Act:
        is_long = body["messages"][-1]["content"] == "question 5"
        return Act(status=400, text='{"error": "too long"}') if is_long else Act()

    with chat_server(plan) as server:
        rows = run(server, tmp_path)

    assert sorted(row["id"] for row in rows) == sorted(f"p{n}" for n in range(12) if n != 5)
    assert json.loads(capsys.readouterr().out)["refused"] == {"HTTP 400": 1}
    assert len(server.requests) == 12


def test_a_server_that_refuses_all_prompts_is_an_error(tmp_path):
    write_prompts(tmp_path)
    with (
        chat_server(lambda number, body: Act(status=422, text="no")) as server,
        pytest.raises(DataError, match="the server refused all 12 prompts: HTTP 422: no"),
    ):
        run(server, tmp_path)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (Act(status=401, text=f"bad key {KEY}"), r"HTTP 401: bad key \*\*\*; check OPENAI_API_KEY"),
        (Act(status=404, text="no such model"), "HTTP 404: no such model; check --base-url and --model"),
        (Act(status=302, headers={"Location": "http://127.0.0.1:9/"}, text=""), "HTTP 302"),
    ],
    ids=["key", "model", "redirect"],
)
def test_what_no_request_survives_ends_the_command_at_once(tmp_path, act, message, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    write_prompts(tmp_path)
    with (
        chat_server(lambda number, body: act) as server,
        pytest.raises(ConfigError, match=message),
    ):
        run(server, tmp_path)
    assert len(server.requests) <= 4, "one of each thread"


def test_the_key_is_sent_and_appears_nowhere_else(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    write_prompts(tmp_path)
    faults = {1: Act(status=500, text=f"your key {KEY} is fine")}
    with (
        chat_server(lambda number, body: faults.get(number, Act())) as server,
        caplog.at_level(logging.DEBUG),
    ):
        run(server, tmp_path, "--max-tries", "2")

    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    out, err = capsys.readouterr()
    assert KEY not in written + caplog.text + out + err + repr(client_of(server, api_key=KEY))


def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    write_prompts(tmp_path)

    with pytest.raises(ConfigError, match="holds characters that no header can carry") as caught:
        run("http://127.0.0.1:9/v1", tmp_path)
    assert KEY not in str(caught.value)


def test_a_server_that_is_gone_ends_the_command_and_it_goes_on_later(tmp_path, capsys):
    write_prompts(tmp_path)

    def plan(number: int, body: dict) -> Act:
        if number <= 3:
            return Act()
        # gone only when the three are written: failures in a row end the command
        await_until(lambda: (tmp_path / "out.jsonl").read_bytes().count(b"\n") >= 3)
        return Act(fault="reset")

    with (
        chat_server(plan) as server,
        pytest.raises(StalledError, match=r"does not answer, 8 prompts failed in a row: connection failed"),
    ):
        run(server, tmp_path, "--max-tries", "2")
    assert json.loads(capsys.readouterr().out)["written"] == 3

    with chat_server(lambda number, body: Act()) as server:
        rows = run(server, tmp_path)

    assert_each_once(rows)
    assert len(server.requests) == 9


def test_a_prompt_that_always_fails_does_not_keep_the_others_back(tmp_path):
    write_prompts(tmp_path)

    def plan(number: int, body: dict) -> Act:
        return Act(status=500) if body["messages"][-1]["content"] == "question 2" else Act()

    with chat_server(plan) as server, pytest.raises(StalledError, match="1 of 12 prompts got no answer"):
        run(server, tmp_path, "--max-tries", "2", "--concurrency", "1")
    assert len(rows_of(tmp_path)) == 11


def test_single_prompts_without_an_answer_fail_the_command_in_the_end(tmp_path):
    write_prompts(tmp_path)

    def plan(number: int, body: dict) -> Act:
        return Act(status=500) if body["messages"][-1]["content"] == "question 2" else Act()

    with (
        chat_server(plan) as server,
        pytest.raises(StalledError, match=r"1 of 12 prompts got no answer, the last: HTTP 500"),
    ):
        run(server, tmp_path, "--max-tries", "2")
    assert len(rows_of(tmp_path)) == 11


def test_nobody_listening_is_told_with_its_cause(tmp_path):
    write_prompts(tmp_path, 1)

    with (
        reserved_port() as port,
        pytest.raises(StalledError, match="1 of 1 prompts got no answer, the last: connection failed"),
    ):
        run(f"http://127.0.0.1:{port}/v1", tmp_path, "--max-tries", "2")


def test_killed_in_the_middle_each_prompt_is_there_once_after_going_on(tmp_path):
    """The process is killed while requests are under way and its output grows."""
    write_prompts(tmp_path, 40)
    gate = threading.Event()
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    with chat_server(lambda number, body: Act(wait_for=gate if number > 12 else None)) as server:
        command = [
            sys.executable,
            "-m",
            "trainer",
            "generate",
            *words(server, tmp_path, "--concurrency", "4"),
        ]
        first = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        try:
            output = tmp_path / "out.jsonl"
            await_until(lambda: len(server.requests) >= 14 and output.stat().st_size > 0, 240.0)
        finally:
            first.kill()
            first.communicate()
        gate.set()
        with (tmp_path / "out.jsonl").open("a") as torn:
            torn.write('{"id":"p39","mess')
        before = len((tmp_path / "out.jsonl").read_text().splitlines()) - 1

        second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=240)

    assert second.returncode == 0, second.stderr.decode()
    assert 0 < before < 40
    assert json.loads(second.stdout)["already_there"] == before
    assert_each_once(rows_of(tmp_path), 40)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target-model", "x"), "--base-url leaves the target to the server"),
        (("--concurrency", "0"), "--concurrency must be above 0: 0"),
        (("--request-timeout", "0"), r"--request-timeout must be above 0: 0\.0"),
        (("--max-tries", "0"), "--max-tries must be above 0: 0"),
        (("--base-url", "host:1"), "--base-url must look like http://host:port/v1: host:1"),
        (("--base-url", "http://h:99999/v1"), "--base-url is no address: Port out of range"),
        (("--base-url", "http://u:secret@h/v1"), "--base-url must not carry a user or password"),
        (("--base-url", "http://h/v1?x=1"), "--base-url must look like"),
    ],
)
def test_server_flags_that_cannot_work_are_refused(tmp_path, flags, message):
    write_prompts(tmp_path)

    with pytest.raises(ConfigError, match=message) as caught:
        run("http://127.0.0.1:9/v1", tmp_path, *flags)
    assert "secret" not in str(caught.value)


def test_other_server_settings_on_the_same_output_are_refused(tmp_path):
    write_prompts(tmp_path, 1)
    with chat_server(lambda number, body: Act()) as server:
        run(server, tmp_path)

        with pytest.raises(ConfigError, match=r"made with other settings \(thinking\)"):
            run(server, tmp_path, "--thinking", "off")
