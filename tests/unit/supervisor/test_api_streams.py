"""Streams through a real server: order, resume, slow clients, shutdown, growing logs."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

import httpx2
import pytest

from supervisor.api import server
from supervisor.api.limits import STREAMS_PER_TOKEN
from supervisor.client import ApiError, Client
from supervisor.services import runs
from supervisor.store.events import record_event
from tests.support.api_app import (
    build_api,
    end_attempt,
    live_server,
    seed_attempt,
    seed_node,
    seed_run,
)

WAIT_S = 60.0


@pytest.fixture
def api(tmp_path):
    built = build_api(tmp_path / "state")
    seed_node(built.state)
    seed_run(built.state)
    yield built
    built.state.store.close()


@pytest.fixture
def live(api):
    with live_server(api) as live:
        yield live


class Stream:
    """One raw event stream; frames are read only when asked for."""

    def __init__(self, live, path, *, last_id=None, scope="read"):
        headers = {"Authorization": f"Bearer {live.api.tokens[scope]}", "Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = str(last_id)
        self._client = httpx2.Client(base_url=live.url, timeout=WAIT_S)
        self._manager = self._client.stream("GET", path, headers=headers)
        self.response = self._manager.__enter__()
        self._lines = self.response.iter_lines()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._manager.__exit__(None, None, None)
        self._client.close()

    def frame(self):
        """Next frame as a dict of its fields; a comment has the key ''."""
        fields = {}
        for line in self._lines:
            if not line:
                return fields
            name, _, value = line.partition(":")
            fields[name] = value.strip()
        return None

    def event(self):
        frame = self.frame()
        while frame is not None and "event" not in frame:
            frame = self.frame()
        return None if frame is None else (frame["event"], json.loads(frame["data"]), frame.get("id"))


def tell(api, count=1, run="slammed"):
    """Write events of a run in one transaction, as services do."""

    def write(session):
        found = runs.get_run(session, run)
        for number in range(count):
            record_event(
                session,
                actor="test",
                subject=f"run/{run}",
                reason="Tested",
                message=f"number {number}",
                run_id=found.id,
                node_id=found.node_id,
            )

    api.state.store.write_sync(write)


def newest_id(live):
    with Client(live.url, live.api.tokens["read"]) as client:
        return client.get("/v1/events", order="desc", limit=1)["items"][0]["id"]


def test_stream_begins_with_its_retry_time_and_is_never_stored_or_compressed(live):
    with Stream(live, "/v1/events") as stream:
        first = stream.frame()

        assert first["retry"] == "3000"
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["cache-control"] == "no-store"
        assert stream.response.headers["x-accel-buffering"] == "no"
        assert stream.response.headers.get("content-encoding", "identity") == "identity"


def test_events_arrive_in_order_with_their_ids(live):
    with Stream(live, "/v1/events") as stream:
        stream.frame()
        tell(live.api, 3)

        seen = [stream.event() for _ in range(3)]

    assert [kind for kind, _, _ in seen] == ["event"] * 3
    ids = [int(event_id) for _, _, event_id in seen]
    assert ids == sorted(set(ids))
    assert [event["id"] for _, event, _ in seen] == ids
    assert {event["reason"] for _, event, _ in seen} == {"Tested"}


def test_a_client_that_resumes_misses_nothing_and_sees_nothing_twice(live):
    before = newest_id(live)
    tell(live.api, 5)

    with Stream(live, "/v1/events", last_id=before + 2) as stream:
        backlog = [int(stream.event()[2]) for _ in range(3)]
        tell(live.api)
        fresh = int(stream.event()[2])

    assert backlog == [before + 3, before + 4, before + 5]
    assert fresh == before + 6


def test_more_than_one_page_is_caught_up(live):
    before = newest_id(live)
    tell(live.api, 450)

    with Stream(live, f"/v1/events?last_event_id={before}") as stream:
        ids = [int(stream.event()[2]) for _ in range(450)]

    assert ids == list(range(before + 1, before + 451))


def test_the_header_wins_over_the_query_because_a_browser_repeats_its_first_address(live):
    before = newest_id(live)
    tell(live.api, 2)

    with Stream(
        live, f"/v1/telemetry/stream?events=true&last_event_id={before}", last_id=before + 1
    ) as stream:
        assert int(stream.event()[2]) == before + 2


def test_an_id_from_another_history_gets_a_reset_with_the_snapshot(live):
    with Stream(live, "/v1/events", last_id=10**9) as stream:
        kind, data, event_id = stream.event()

    assert (kind, event_id) == ("reset", None)
    assert data["snapshot"] == "/v1/runs"


@pytest.mark.parametrize("last_id", ["x", "-1", "1.5"])
def test_ids_that_are_none_are_refused(live, last_id):
    with Stream(live, "/v1/events", last_id=last_id) as stream:
        assert stream.response.status_code == 400


def test_events_of_one_run_only(live):
    seed_run(live.api.state, "other")
    with Stream(live, "/v1/events?run=other") as stream:
        stream.frame()
        tell(live.api, 2)
        tell(live.api, 1, run="other")

        assert stream.event()[1]["subject"] == "run/other"


def test_live_data_is_sent_by_kind_with_run_and_node(live):
    with Stream(live, "/v1/telemetry/stream?run=slammed") as stream:
        stream.frame()
        live.publish("metrics", {"record": {"train": {"loss": float("nan")}}}, run="other")
        live.publish("metrics", {"record": {"train": {"loss": float("nan")}}}, run="slammed")
        live.publish("gpu", {"sample": {}}, node="elsewhere")
        live.publish("gpu", {"sample": {}}, node="local")

        first, second = stream.event(), stream.event()

    assert first == ("metrics", {"run": "slammed", "node": None, "record": {"train": {"loss": None}}}, None)
    assert (second[0], second[1]["node"]) == ("gpu", "local")


def test_live_data_alone_has_no_history_and_history_alone_no_live_data(live):
    with Stream(live, "/v1/telemetry/stream") as data, Stream(live, "/v1/events") as history:
        data.frame()
        history.frame()
        tell(live.api)
        live.publish("status", {"status": {"step": 1}}, run="slammed")
        tell(live.api)

        assert data.event()[0] == "status"
        assert [history.event()[0], history.event()[0]] == ["event", "event"]


def test_one_stream_can_carry_both(live):
    with Stream(live, "/v1/telemetry/stream?events=true") as stream:
        stream.frame()
        tell(live.api)
        assert stream.event()[0] == "event"
        live.publish("status", {"status": {}}, run="slammed")
        assert stream.event()[0] == "status"


def test_streams_of_a_token_are_limited_and_others_go_on(live):
    open_streams = [Stream(live, "/v1/events") for _ in range(STREAMS_PER_TOKEN)]
    try:
        for stream in open_streams:
            stream.frame()
        with Stream(live, "/v1/events") as refused:
            assert refused.response.status_code == 429
        with Stream(live, "/v1/events", scope="admin") as other:
            assert other.response.status_code == 200
    finally:
        for stream in open_streams:
            stream.__exit__()

    # A place comes back as soon as the server has seen the client go.
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        with Stream(live, "/v1/events") as again:
            if again.response.status_code == 200:
                return
        time.sleep(0.05)
    pytest.fail("no place came back")


def test_a_client_that_does_not_read_is_dropped_and_the_others_are_not(live):
    parts = urlsplit(live.url)
    slow = socket.create_connection((parts.hostname, parts.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.sendall(
        f"GET /v1/telemetry/stream HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Authorization: Bearer {live.api.tokens['read']}\r\n\r\n".encode()
    )
    assert slow.recv(1024).startswith(b"HTTP/1.1 200")
    hub = live.api.state.hub
    with Stream(live, "/v1/telemetry/stream") as fast:
        fast.frame()
        assert hub.subscriber_count == 2
        for number in range(6000):
            live.publish("status", {"number": number, "padding": "x" * 2000}, run="slammed")
            # The fast one reads along, as a browser does; only the slow one falls behind.
            assert fast.event()[1]["number"] == number
        assert hub.subscriber_count == 1
        live.publish("log", {"size": 1}, run="slammed")
        assert fast.event()[0] == "log"
    slow.close()


def test_shutdown_ends_every_stream_and_the_server_stops(api, monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 2 * WAIT_S)
    attempt = seed_attempt(api.state, runs_row(api), log=b"line\n")
    with live_server(api) as live:
        events = [Stream(live, "/v1/events") for _ in range(5)]
        log = httpx2.Client(base_url=live.url, timeout=WAIT_S)
        manager = log.stream(
            "GET",
            "/v1/runs/slammed/attempts/1/log?follow=true",
            headers={"Authorization": f"Bearer {api.tokens['read']}"},
        )
        following = manager.__enter__()
        pieces = following.iter_raw()
        assert next(pieces) == b"line\n"
        for stream in events:
            stream.frame()

    assert attempt.state == "ready"
    assert [stream.frame() for stream in events] == [None] * 5
    assert list(pieces) == []
    log.close()


def runs_row(api):
    return api.state.store.read_sync(lambda session: runs.get_run(session, "slammed"))


def test_a_followed_log_goes_on_to_the_last_byte_of_an_ended_attempt(live):
    attempt = seed_attempt(live.api.state, runs_row(live.api), log=b"\xff one\n")
    path = live.api.state.logs.path(attempt.id)
    seen = b""
    with Client(live.url, live.api.tokens["read"]) as client:
        for number, piece in enumerate(client.follow_log("slammed", 1, offset=0)):
            seen += piece.data
            if number == 0:
                with path.open("ab") as log:
                    log.write(b"two\n")
            elif number == 1:
                with path.open("ab") as log:
                    log.write(b"last")
                end_attempt(live.api.state, attempt)

    assert seen == b"\xff one\ntwo\nlast" == path.read_bytes()


def test_a_followed_log_begins_at_the_byte_that_was_asked_for(live):
    attempt = seed_attempt(live.api.state, runs_row(live.api), log=b"0123456789")
    end_attempt(live.api.state, attempt)

    with Client(live.url, live.api.tokens["read"]) as client:
        pieces = list(client.follow_log("slammed", 1, offset=-4))

    assert [(piece.offset, piece.data) for piece in pieces] == [(6, b"6789")]


def test_a_large_log_is_downloaded_whole(live):
    data = bytes(range(256)) * 8000
    attempt = seed_attempt(live.api.state, runs_row(live.api), log=data)

    response = httpx2.get(
        f"{live.url}/v1/runs/slammed/attempts/{attempt.number}/log",
        headers={"Authorization": f"Bearer {live.api.tokens['read']}"},
        timeout=WAIT_S,
    )

    assert response.content == data


def test_limit_and_follow_exclude_each_other(live):
    seed_attempt(live.api.state, runs_row(live.api))
    with (
        Client(live.url, live.api.tokens["read"]) as client,
        pytest.raises(ApiError, match="exclude each other"),
    ):
        client.get("/v1/runs/slammed/attempts/1/log", limit=1, follow="true")
