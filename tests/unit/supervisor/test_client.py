"""The client against a scripted server: what it repeats, what it never repeats, and how it resumes."""

from __future__ import annotations

import json

import httpx2
import pytest

from supervisor import client as client_module
from supervisor.client import ApiError, Client, DaemonUnreachableError, WaitTimeoutError

PROBLEM = {"type": "urn:dflash-supervisor:problem:conflict", "detail": "no", "reason": "Held", "hint": "wait"}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(client_module.time, "sleep", lambda _seconds: None)


class Script:
    """Answers requests in order; an exception is raised in place of an answer."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self):
        return Client("http://daemon", "t", transport=httpx2.MockTransport(self))


class Broken(httpx2.SyncByteStream):
    """A body that breaks off after its pieces."""

    is_whole = False

    def __init__(self, *pieces):
        self.pieces = pieces

    def __iter__(self):
        yield from self.pieces
        if not self.is_whole:
            raise httpx2.ReadError("connection reset")


class Whole(Broken):
    """A body that ends as it should."""

    is_whole = True


def refused():
    return httpx2.ConnectError("connection refused")


def test_reads_are_repeated_and_then_the_daemon_is_said_to_be_away():
    script = Script(refused(), httpx2.Response(200, json={"a": 1}))
    assert script.client().get("/x") == {"a": 1}

    script = Script(*[refused()] * client_module.CONNECT_TRIES)
    with pytest.raises(DaemonUnreachableError, match="http://daemon"):
        script.client().get("/x")


def test_a_repeated_post_carries_the_same_key():
    script = Script(httpx2.ReadError("reset"), httpx2.Response(202, json={"id": "op"}))

    script.client().post("/x", {"a": 1})

    first, second = (request.headers["Idempotency-Key"] for request in script.requests)
    assert first == second


def test_two_posts_have_two_keys():
    script = Script(httpx2.Response(202, json={}), httpx2.Response(202, json={}))
    with script.client() as client:
        client.post("/x")
        client.post("/x")

    assert len({request.headers["Idempotency-Key"] for request in script.requests}) == 2


def test_writes_without_a_key_are_never_repeated():
    script = Script(refused())

    with pytest.raises(DaemonUnreachableError):
        script.client().put("/x", {})

    assert len(script.requests) == 1


def test_changes_name_the_version_that_was_read():
    script = Script(httpx2.Response(200, json={}, headers={"ETag": '"7"'}), httpx2.Response(200, json={}))

    script.client().patch("/x", {"a": 1})

    assert script.requests[1].headers["If-Match"] == '"7"'


def test_problems_become_errors_with_their_facts():
    script = Script(httpx2.Response(409, json=PROBLEM | {"data": {"state": "ready"}}))

    with pytest.raises(ApiError) as failure:
        script.client().get("/x")

    error = failure.value
    assert (error.status, error.kind, error.reason, error.hint) == (409, "conflict", "Held", "wait")
    assert error.data == {"state": "ready"}


def test_answers_of_something_else_are_errors_that_name_the_address():
    script = Script(httpx2.Response(502, text="<html>bad gateway</html>"))

    with pytest.raises(ApiError, match=r"http://daemon/x.*502"):
        script.client().get("/x")


def test_lists_are_read_to_their_end_or_their_limit():
    pages = [{"items": [1, 2], "next_cursor": "c"}, {"items": [3], "next_cursor": None}]
    script = Script(*[httpx2.Response(200, json=page) for page in pages])
    assert script.client().list_all("/x") == [1, 2, 3]
    assert script.requests[1].url.params["cursor"] == "c"

    script = Script(httpx2.Response(200, json=pages[0]))
    assert script.client().list_all("/x", maximum=1) == [1]


def test_a_followed_log_resumes_at_the_next_byte():
    script = Script(
        httpx2.Response(200, headers={"X-Log-Offset": "0", "X-Log-Size": "3"}, stream=Broken(b"abc", b"d")),
        refused(),
        httpx2.Response(502, json=PROBLEM | {"retryable": True}),
        httpx2.Response(200, headers={"X-Log-Offset": "4", "X-Log-Size": "6"}, stream=Whole(b"ef")),
    )

    data = b"".join(piece.data for piece in script.client().follow_log("r", 1, offset=0))

    assert data == b"abcdef"
    assert [request.url.params["offset"] for request in script.requests] == ["0", "4", "4", "4"]


def test_a_followed_log_that_is_refused_for_good_is_an_error():
    script = Script(httpx2.Response(404, json=PROBLEM))

    with pytest.raises(ApiError):
        list(script.client().follow_log("r", 1, offset=0))


def test_events_resume_behind_the_last_one():
    def stream(*events):
        frames = "".join(
            f": c\n\nevent: event\ndata: {json.dumps({'id': number})}\nid: {number}\n\n" for number in events
        )
        return httpx2.Response(
            200, headers={"Content-Type": "text/event-stream"}, stream=Broken(frames.encode())
        )

    script = Script(stream(1, 2), refused(), stream(3))
    events = script.client().events(last_id=0)

    assert [next(events)[1]["id"] for _ in range(3)] == [1, 2, 3]
    assert [request.headers["Last-Event-ID"] for request in script.requests] == ["0", "2", "2"]


def test_a_wait_ends_with_the_operation_or_with_its_time():
    states = [{"status": "pending"}, {"status": "done"}]
    script = Script(*[httpx2.Response(200, json=state) for state in states])
    seen = []
    assert script.client().wait_operation("op", timeout_s=None, on_progress=seen.append) == states[1]
    assert seen == states

    script = Script(*[httpx2.Response(200, json=states[0]) for _ in range(3)])
    with pytest.raises(WaitTimeoutError, match="still pending"):
        script.client().wait_operation("op", timeout_s=0)


def test_names_are_quoted_in_paths():
    script = Script(httpx2.Response(200, content=b""))

    script.client().log("a/../b", "1?x", offset=0)

    assert script.requests[0].url.raw_path.startswith(b"/v1/runs/a%2F..%2Fb/attempts/1%3Fx/log")
