"""The routes over real services and a real store: intent is stored, told, answered and hinted."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from supervisor.services import telemetry
from tests.support.api_app import (
    build_api,
    end_attempt,
    run_spec,
    seed_attempt,
    seed_node,
    seed_run,
)

LOCAL = {"name": "local", "transport": "local"}


@pytest.fixture
def api(tmp_path):
    built = build_api(tmp_path / "state")
    yield built
    built.state.store.close()


@pytest.fixture
def client(api):
    with admin_client(api) as client:
        yield client


@pytest.fixture(scope="module")
def empty_client(tmp_path_factory):
    """Shared by tests that find nothing and change nothing."""
    built = build_api(tmp_path_factory.mktemp("empty"))
    with admin_client(built) as client:
        yield client
    built.state.store.close()


def admin_client(api):
    headers = {"Authorization": f"Bearer {api.tokens['admin']}"}
    return TestClient(api.app, base_url="http://127.0.0.1:8420", headers=headers)


def reasons(client, **params):
    return [event["reason"] for event in client.get("/v1/events", params=params).json()["items"]]


def test_a_node_is_added_shown_changed_and_removed(api, client):
    added = client.post("/v1/nodes", json=LOCAL | {"root": "/srv/x"})
    etag = added.headers["ETag"]
    changed = client.patch("/v1/nodes/local", json={"python": "/usr/bin/python3"}, headers={"If-Match": etag})
    shown = client.get("/v1/nodes/local")
    removed = client.delete("/v1/nodes/local", headers={"If-Match": shown.headers["ETag"]})

    assert (added.status_code, added.headers["Location"]) == (201, "/v1/nodes/local")
    assert added.json()["log_dir"] == "/srv/x/logs"
    assert changed.json()["python"] == shown.json()["python"] == "/usr/bin/python3"
    assert changed.headers["ETag"] == shown.headers["ETag"] != etag
    assert removed.status_code == 204
    assert client.get("/v1/nodes/local").status_code == 404
    assert reasons(client)[-3:] == ["NodeAdded", "NodeChanged", "NodeRemoved"]
    assert api.state.hints == [added.json()["id"]] * 2


def test_patch_and_delete_need_the_version_that_they_change(client):
    client.post("/v1/nodes", json=LOCAL)

    for send in (
        lambda headers: client.patch("/v1/nodes/local", json={}, headers=headers),
        lambda headers: client.delete("/v1/nodes/local", headers=headers),
    ):
        assert send({}).status_code == 428
        assert send({"If-Match": '"99"'}).status_code == 412


@pytest.mark.parametrize(
    "body",
    [
        {"name": "-x", "transport": "local"},
        {"name": "a/../b", "transport": "local"},
        {"name": "x" * 65, "transport": "local"},
        {"name": "x\n", "transport": "local"},
        {"name": "x", "transport": "telnet"},
        {"name": "x", "transport": "local", "roots": "/srv"},
        {"name": "x", "transport": "local", "root": "srv"},
        {"name": "x", "transport": "local", "root": "/srv\0x"},
        {"name": "x", "transport": "ssh", "host": "-oProxyCommand=x"},
        {"name": "x", "transport": "ssh", "host": "a b"},
        {"name": "x", "transport": "ssh"},
        {"name": "x", "transport": "proxmox", "host": "h", "vmid": 1},
        {"name": "x", "transport": "ssh", "host": "h", "user": "root;id"},
        [],
        None,
        "x",
    ],
    ids=lambda body: json.dumps(body)[:50],
)
def test_nodes_that_cannot_work_are_refused_and_not_stored(empty_client, body):
    response = empty_client.post("/v1/nodes", json=body)

    assert response.status_code == 422
    assert response.json()["detail"]
    assert empty_client.get("/v1/nodes").json()["items"] == []


def test_dry_run_of_a_node_stores_nothing(client):
    plan = client.post("/v1/nodes", params={"dry_run": True}, json=LOCAL)

    assert plan.json()["steps"] == ["register local on this machine"]
    assert plan.json()["host_key"] is None
    assert client.get("/v1/nodes").json()["items"] == []


def test_dry_run_refuses_what_the_request_would_refuse(api, client):
    seed_node(api.state)

    taken = client.post("/v1/nodes", params={"dry_run": True}, json=LOCAL)
    wrong = client.post("/v1/nodes", params={"dry_run": True}, json=LOCAL | {"name": "b", "vmid": 100})

    assert (taken.status_code, taken.json()["reason"]) == (409, "NameTaken")
    assert (wrong.status_code, wrong.json()["reason"]) == (400, "BadField")
    assert reasons(client).count("NodeAdded") == 1


def test_a_node_whose_host_does_not_answer_is_not_added(client):
    body = {"name": "far", "transport": "ssh", "host": "127.0.0.1", "port": 9}

    response = client.post("/v1/nodes", json=body)

    assert response.status_code == 502
    assert response.json()["reason"] == "ConnectRefused"
    assert client.get("/v1/nodes").json()["items"] == []


def test_check_and_deploy_become_operations(api, client):
    node = seed_node(api.state)

    check = client.post("/v1/nodes/local/check")
    deploy = client.post("/v1/nodes/local/deploy", json={})
    again = client.post("/v1/nodes/local/deploy", json={})

    assert check.status_code == deploy.status_code == 202
    assert check.headers["Location"] == f"/v1/operations/{check.json()['id']}"
    assert client.get(deploy.headers["Location"]).json()["kind"] == "deploy"
    assert (again.status_code, again.json()["reason"]) == (409, "DeployRunning")
    assert api.state.hints == [node.id, node.id]


def test_a_run_is_stored_changed_and_deleted(api, client):
    seed_node(api.state)

    created = client.post("/v1/runs", json=run_spec())
    same = client.post("/v1/runs", json=run_spec())
    second = client.post("/v1/runs", json=run_spec(env={"A": "1"}))
    merged = client.patch(
        "/v1/runs/slammed", json={"env": {"A": None, "B": "2"}}, headers={"If-Match": second.headers["ETag"]}
    )
    deleted = client.delete("/v1/runs/slammed", headers={"If-Match": merged.headers["ETag"]})

    assert (created.status_code, created.headers["Location"]) == (201, "/v1/runs/slammed")
    assert (same.status_code, same.json()["generation"]) == (200, 1)
    assert second.json()["generation"] == 2
    assert merged.json()["spec"]["env"] == {"B": "2"}
    assert deleted.status_code == 204


def test_a_run_with_a_typo_is_refused_with_the_nearest_key(api, client):
    seed_node(api.state)

    response = client.post("/v1/runs", json=run_spec(restrat={}))

    assert response.status_code == 422
    assert response.json()["reason"] == "InvalidRunFile"
    assert response.json()["data"]["suggestion"] == "restart"


def test_a_run_on_an_unknown_node_is_not_stored(client):
    response = client.post("/v1/runs", json=run_spec(node="nowhere"))

    assert (response.status_code, response.json()["data"]["kind"]) == (404, "node")
    assert client.get("/v1/runs").json()["items"] == []


def test_a_run_keeps_its_name(api, client):
    seed_node(api.state)
    created = client.post("/v1/runs", json=run_spec())

    response = client.patch(
        "/v1/runs/slammed", json={"name": "other"}, headers={"If-Match": created.headers["ETag"]}
    )

    assert response.status_code == 422


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000], ids=["open", "list", "text", "bytes", "deep"]
)
def test_bodies_that_are_no_object_are_refused(client, content):
    headers = {"Content-Type": "application/json"}

    assert client.post("/v1/runs", content=content, headers=headers).status_code in (400, 422)


def test_start_stop_and_restart_store_intent_and_hint(api, client):
    seed_node(api.state)
    run = seed_run(api.state)

    start = client.post("/v1/runs/slammed/start", json={"resume": "scratch"})
    again = client.post("/v1/runs/slammed/start")
    stop = client.post("/v1/runs/slammed/stop", json={"reason": "wrong data"})

    assert (start.status_code, start.json()["status"]) == (202, "pending")
    assert start.json()["params"]["resume"] == "scratch"
    assert (again.status_code, again.json()["reason"]) == (409, "AlreadyRunning")
    assert stop.json()["status"] == "done"
    assert client.get(start.headers["Location"]).json()["status"] == "superseded"
    assert client.get("/v1/runs/slammed").json()["desired"] == "stopped"
    assert api.state.hints == [run.id, run.id]


def test_a_run_without_an_earlier_pair_or_a_live_attempt_has_nothing_to_go_back_to_or_to_lose(api, client):
    seed_node(api.state)
    seed_run(api.state)

    for action, reason in (("rollback", "NoEarlierDeployment"), ("declare-lost", "NotLive")):
        refused = client.post(f"/v1/runs/slammed/{action}", json={})
        plan = client.post(f"/v1/runs/slammed/{action}", json={}, params={"dry_run": "true"})

        assert (refused.status_code, refused.json()["reason"]) == (409, reason)
        assert (plan.status_code, plan.json()["would_refuse"]["reason"]) == (200, reason)


def test_an_attempt_is_declared_lost_with_its_reason_in_the_history(api, client):
    seed_node(api.state)
    seed_attempt(api.state, seed_run(api.state))

    accepted = client.post("/v1/runs/slammed/declare-lost", json={"reason": "burnt"})
    events = client.get("/v1/events", params={"run": "slammed", "reason": "DeclareLostRequested"}).json()

    assert (accepted.status_code, accepted.json()["kind"]) == (202, "declare_lost")
    assert "burnt" in events["items"][0]["message"]


def test_the_actor_and_the_request_are_in_the_history(api, client):
    seed_node(api.state)
    seed_run(api.state)

    response = client.post("/v1/runs/slammed/start")
    event = client.get("/v1/events", params={"run": "slammed", "reason": "StartRequested"}).json()["items"][0]

    assert event["actor"].startswith("token/")
    assert event["request_id"] == response.headers["X-Request-Id"]


def test_the_log_says_where_a_write_came_from(api, client, caplog):
    seed_node(api.state)
    seed_run(api.state)
    with caplog.at_level("INFO", logger="supervisor.api.writes"):
        response = client.post("/v1/runs/slammed/start", json={})

    assert "POST /v1/runs/slammed/start by token/" in caplog.text
    assert response.headers["X-Request-Id"] in caplog.text


def test_one_key_has_one_effect_and_one_answer(api, client):
    seed_node(api.state)
    seed_run(api.state)
    headers = {"Idempotency-Key": "k1"}

    first = client.post("/v1/runs/slammed/start", json={}, headers=headers)
    second = client.post("/v1/runs/slammed/start", json={}, headers=headers)
    other = client.post("/v1/runs/slammed/start", json={"resume": "scratch"}, headers=headers)

    assert second.status_code == first.status_code == 202
    assert second.json() == first.json()
    assert second.headers["Location"] == first.headers["Location"]
    assert second.headers["Idempotency-Replayed"] == "true"
    assert (other.status_code, other.json()["reason"]) == (422, "IdempotencyKeyReused")
    assert reasons(client, run="slammed").count("StartRequested") == 1


def test_a_refused_request_leaves_its_key_free(api, client):
    seed_node(api.state)
    headers = {"Idempotency-Key": "k1"}

    missing = client.post("/v1/runs/slammed/start", json={}, headers=headers)
    seed_run(api.state)
    found = client.post("/v1/runs/slammed/start", json={}, headers=headers)

    assert (missing.status_code, found.status_code) == (404, 202)


def test_lists_are_paged_in_a_stable_order(api, client):
    seed_node(api.state)
    for name in ("c", "a", "b"):
        seed_run(api.state, name)

    first = client.get("/v1/runs", params={"limit": 2}).json()
    rest = client.get("/v1/runs", params={"limit": 2, "cursor": first["next_cursor"]}).json()

    assert [run["name"] for run in first["items"] + rest["items"]] == ["a", "b", "c"]
    assert rest["next_cursor"] is None
    assert client.get("/v1/runs", params={"limit": 201}).status_code == 422


def test_attempts_and_events_are_paged_by_number(api, client):
    seed_node(api.state)
    run = seed_run(api.state)
    for _ in range(3):
        end_attempt(api.state, seed_attempt(api.state, run))

    first = client.get("/v1/runs/slammed/attempts", params={"limit": 2}).json()
    rest = client.get("/v1/runs/slammed/attempts", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    newest = client.get("/v1/events", params={"order": "desc", "limit": 1}).json()
    older = client.get(
        "/v1/events", params={"order": "desc", "limit": 1, "cursor": newest["next_cursor"]}
    ).json()

    assert [item["number"] for item in first["items"] + rest["items"]] == [3, 2, 1]
    assert newest["items"][0]["id"] == older["items"][0]["id"] + 1


def test_logs_are_read_by_byte_offset(api, client):
    seed_node(api.state)
    data = bytes(range(256)) * 8
    seed_attempt(api.state, seed_run(api.state), log=data)
    path = "/v1/runs/slammed/attempts/1/log"

    piece = client.get(path, params={"offset": 10, "limit": 20})
    tail = client.get(path, params={"offset": -5, "limit": 100})
    beyond = client.get(path, params={"offset": 10**9, "limit": 100})
    whole = client.get(path)
    size = client.get(path, params={"limit": 0})

    assert piece.content == data[10:30]
    assert (piece.headers["X-Log-Offset"], piece.headers["X-Log-Size"]) == ("10", str(len(data)))
    assert (tail.content, tail.headers["X-Log-Offset"]) == (data[-5:], str(len(data) - 5))
    assert beyond.content == b""
    assert whole.content == data
    assert (size.content, size.headers["X-Log-Size"]) == (b"", str(len(data)))


def test_a_log_whose_node_is_away_is_a_problem_and_not_an_empty_log(api, client):
    seed_node(api.state)
    seed_attempt(api.state, seed_run(api.state), log=b"x")
    api.state.logs.is_unreachable = True

    response = client.get("/v1/runs/slammed/attempts/1/log")

    assert (response.status_code, response.json()["reason"]) == (502, "ConnectTimeout")
    assert response.json()["retryable"] is True


def test_a_log_that_never_was_is_not_found(api, client):
    seed_node(api.state)
    attempt = seed_attempt(api.state, seed_run(api.state), attempt_state="launch_failed")
    api.state.logs.path(attempt.id).unlink()

    assert client.get("/v1/runs/slammed/attempts/1/log").status_code == 404
    assert client.get("/v1/runs/slammed/attempts/2/log").status_code == 404


def test_metrics_keep_nulls_and_nan_never_breaks_an_answer(api, client):
    seed_node(api.state)
    run = seed_run(api.state)
    attempt = seed_attempt(api.state, run)
    records = [
        {"t": 100.0, "step": 1, "train": {"loss": 2.0}},
        {"t": 101.0, "step": 2, "train": {"loss": float("nan")}},
        {
            "t": 102.0,
            "step": 3,
            "train": {"loss": None},
            "queue": {"hs": 3, "buckets": [{"upto": 512, "depth": 1}]},
        },
    ]
    api.state.store.write_sync(
        lambda session: telemetry.append_metrics(
            session, run_id=run.id, attempt_id=attempt.id, records=records
        )
    )

    series = client.get("/v1/runs/slammed/metrics", params={"names": "train.loss"}).json()
    raw = client.get("/v1/runs/slammed/metrics").json()
    shown = client.get("/v1/runs/slammed").json()

    assert [item["train"]["loss"] for item in series["items"]] == [2.0, None, None]
    assert [record["step"] for record in raw["items"]] == [1, 2, 3]
    assert raw["items"][2]["queue"]["buckets"] == [{"upto": 512, "depth": 1}]
    assert shown["queue"]["hs"] == 3
    assert shown["metrics"]["train"]["loss"] is None


@pytest.mark.parametrize(
    "params", [{"since": "nan"}, {"since": 2, "until": 1}, {"points": 0}, {"points": "x"}]
)
def test_metric_ranges_that_make_no_sense_are_refused(api, client, params):
    seed_node(api.state)
    seed_run(api.state)

    assert client.get("/v1/runs/slammed/metrics", params=params).status_code in (400, 422)


def test_gpus_that_were_never_seen_are_unavailable_with_a_reason(api, client):
    seed_node(api.state)

    body = client.get("/v1/nodes/local/telemetry").json()

    assert (body["gpus"], body["status"], body["reason"]) == ([], "unavailable", "NoSample")


def test_the_history_of_gpus_comes_when_asked_for_with_its_gaps(api, client):
    node = seed_node(api.state)

    def seed(session):
        for t, gpus in ((1.0, [{"index": 0, "util_ratio": 0.5}]), (2.0, []), (9.0, [])):
            telemetry.append_gpu_sample(session, node_id=node.id, sample={"t": t, "gpus": gpus})

    api.state.store.write_sync(seed)
    newest = client.get("/v1/nodes/local/telemetry").json()
    history = client.get("/v1/nodes/local/telemetry", params={"since": 0, "until": 5}).json()["history"]

    assert newest["history"] is None
    assert [point["values"]["0.util_ratio"] for point in history["points"]] == [0.5, None]
    assert client.get("/v1/nodes/local/telemetry", params={"since": 5, "until": 0}).status_code == 422


def test_prometheus_leaves_out_what_is_not_known(api, client):
    node = seed_node(api.state)
    seed_run(api.state)
    sample = {"t": 1.0, "gpus": [{"index": 0, "util_ratio": 0.5, "power_w": None}]}
    api.state.store.write_sync(
        lambda session: telemetry.append_gpu_sample(session, node_id=node.id, sample=sample)
    )

    text = client.get("/metrics").text

    assert 'dflash_runs{phase="pending"} 1.0' in text
    assert 'dflash_gpu_utilization_ratio{gpu="0",node="local"} 0.5' in text
    assert "dflash_gpu_power_watts{" not in text
    assert "dflash_run_loss{" not in text


def test_secrets_are_stored_encrypted_and_listed_by_name_only(api, client):
    stored = client.put("/v1/secrets/WANDB_API_KEY", json={"value": "hunter2"})
    listed = client.get("/v1/secrets")

    assert stored.status_code == 204
    assert [item["name"] for item in listed.json()["items"]] == ["WANDB_API_KEY"]
    assert "hunter2" not in listed.text + client.get("/v1/events").text
    assert b"hunter2" not in api.state.store.path.read_bytes()
    assert client.delete("/v1/secrets/WANDB_API_KEY").status_code == 204
    assert client.delete("/v1/secrets/WANDB_API_KEY").status_code == 404


@pytest.mark.parametrize("name", ["lower", "PATH", "LD_PRELOAD", "A B", "A=B", "%00"])
def test_secrets_with_names_that_no_process_may_get_are_refused(empty_client, name):
    assert empty_client.put(f"/v1/secrets/{name}", json={"value": "x"}).status_code in (400, 422)


def test_compression_is_for_json_and_only_when_asked(api, client):
    seed_node(api.state)
    for number in range(30):
        seed_run(api.state, f"run-{number}")

    assert client.get("/v1/runs", headers={"Accept-Encoding": "gzip"}).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in client.get("/v1/runs", headers={"Accept-Encoding": "identity"}).headers


HOSTILE = [
    "../../etc/passwd",
    "..%2f..%2fetc",
    "'; DROP TABLE run; --",
    "$(touch canary)",
    "`id`",
    "a\u202eb",
    "\U0001f600",
    "-rf",
    "x" * 5000,
    "%00",
    "a\nb",
    "{name}",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda text: ascii(text)[:20])
@pytest.mark.parametrize(
    "path", ["/v1/runs/{}", "/v1/runs/{}/start", "/v1/nodes/{}", "/v1/operations/{}", "/v1/tokens/{}"]
)
def test_hostile_names_in_paths_are_not_found_and_nothing_else(empty_client, path, name):
    url = path.format(quote(name, safe="%"))
    for method in ("GET", "POST", "DELETE"):
        response = empty_client.request(method, url, json={} if method == "POST" else None)
        assert response.status_code in (404, 405, 422, 428), f"{method} {url}: {response.status_code}"
        assert response.headers["content-type"] == "application/problem+json"
