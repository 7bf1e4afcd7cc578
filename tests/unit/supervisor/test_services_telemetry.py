"""Telemetry, events and idempotency: nothing doubled, nulls kept, bounded, the same answer again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session, func, select

from supervisor.domain.errors import ConflictError, RequestError
from supervisor.services import events, idempotency, nodes, runs, telemetry, views
from supervisor.store.events import record_event
from supervisor.store.tables import GpuSample, MetricLine, Run
from supervisor.store.writer import Store
from tests.support.domain_builders import T0, FakeClock, make_attempt, make_run, open_store

T = T0.timestamp()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    with open_store(tmp_path, clock=clock) as opened:
        opened.write_sync(lambda session: make_attempt(session, make_run(session)))
        yield opened


def the_run(session: Session) -> Run:
    return runs.get_run(session, "slammed")


def append(store: Store, *records: dict[str, Any]) -> int:
    def write(session: Session) -> int:
        run = the_run(session)
        attempt = runs.get_attempt(session, run, 1)
        return telemetry.append_metrics(session, run_id=run.id, attempt_id=attempt.id, records=records)

    return store.write_sync(write)


def history(store: Store, **arguments: Any) -> dict[str, Any]:
    return store.read_sync(lambda session: telemetry.metric_history(session, the_run(session), **arguments))


def newest_line(store: Store) -> dict[str, Any] | None:
    """As a run's view shows it."""
    return store.read_sync(lambda session: views.run_view(session, the_run(session))["metrics"])


def test_a_line_that_comes_twice_is_stored_once(store: Store) -> None:
    lines = [{"t": T + n, "step": n, "train": {"loss": 2.0}} for n in range(3)]
    assert append(store, *lines) == 3
    assert append(store, *lines, {"t": T + 9, "step": 9}) == 1
    assert append(store, lines[0], lines[0]) == 0
    assert append(store) == 0
    assert store.read_sync(lambda s: s.exec(select(func.count()).select_from(MetricLine)).one()) == 4


def test_nan_becomes_null_with_a_mark(store: Store) -> None:
    append(store, {"t": T, "step": 1, "train": {"loss": float("nan"), "lr": 1.0}})
    newest = newest_line(store)
    assert newest is not None
    assert newest["train"] == {"loss": None, "lr": 1.0}
    assert newest["non_finite"] == ["train.loss"]
    json.dumps(newest, allow_nan=False)


def test_a_line_without_a_time_gets_one(store: Store) -> None:
    append(store, {"step": 1}, {"t": float("inf"), "step": 2})
    assert {item["t"] for item in history(store)["items"]} == {T}


def test_the_newest_line_has_an_age(store: Store, clock: FakeClock) -> None:
    append(store, {"t": T, "step": 1}, {"t": T + 1, "step": 2})
    clock.move(11)
    newest = newest_line(store)
    assert newest is not None
    assert (newest["step"], newest["age_s"]) == (2, 10)


def test_history_keeps_nulls_and_whole_records(store: Store) -> None:
    append(
        store, {"t": T, "step": 1, "train": {"loss": None}}, {"t": T + 1, "step": 2, "train": {"loss": 0.0}}
    )
    items = history(store)["items"]
    assert [item["train"]["loss"] for item in items] == [None, 0.0]
    by_name = history(store, names=["train.loss", "train.eal"])["items"]
    assert [item["train"] for item in by_name] == [{"loss": None, "eal": None}, {"loss": 0.0, "eal": None}]


def test_history_is_thinned_with_its_peaks(store: Store) -> None:
    append(
        store, *[{"t": T + n, "step": n, "train": {"loss": 50.0 if n == 333 else 1.0}} for n in range(1000)]
    )
    thin = history(store, names=["train.loss"], points=20)
    assert (len(thin["items"]), thin["lines"], thin["is_thinned"]) == (20, 1000, True)
    assert max(item["max"]["train.loss"] for item in thin["items"]) == 50.0
    assert thin["items"][-1]["step"] == 999
    part = history(store, since=T + 10, until=T + 19)
    assert [item["step"] for item in part["items"]] == list(range(10, 20))
    assert part["attempts"] == [{"number": 1, "t": T}]


def test_a_long_history_reads_a_bounded_number_of_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    append(store, *[{"t": T + n, "step": n} for n in range(300)])
    monkeypatch.setattr(telemetry, "MAX_ROWS", 50)
    thin = history(store, points=5000)
    assert 40 <= len(thin["items"]) <= 50
    assert thin["is_thinned"]


@pytest.mark.parametrize(
    "arguments", [{"points": 0}, {"points": 99_999}, {"names": ["x"] * 101}, {"since": 2.0, "until": 1.0}]
)
def test_an_unbounded_question_is_refused(store: Store, arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        history(store, **arguments)


def sample(store: Store, **fields: Any) -> None:
    store.write_sync(
        lambda session: telemetry.append_gpu_sample(
            session, node_id=nodes.get_node(session, "local").id, sample=fields
        )
    )


def snapshot(store: Store) -> dict[str, Any]:
    return store.read_sync(lambda session: telemetry.gpu_snapshot(session, nodes.get_node(session, "local")))


def test_a_snapshot_says_ok_stale_or_unavailable_and_why(store: Store, clock: FakeClock) -> None:
    assert snapshot(store)["reason"] == "NoSample"
    sample(store, t=T, gpus=[{"index": 0, "util_ratio": 0.5, "power_w": float("nan")}])
    clock.move(2)
    now = snapshot(store)
    assert (now["status"], now["age_s"], now["gpus"][0]["power_w"]) == ("ok", 2, None)
    clock.move(60)
    assert (snapshot(store)["status"], snapshot(store)["reason"]) == ("stale", "Stale")
    sample(store, t=T + 60, gpus=[], reason="MissingDependency", message="no pynvml")
    gone = snapshot(store)
    assert (gone["status"], gone["reason"], gone["message"]) == (
        "unavailable",
        "MissingDependency",
        "no pynvml",
    )


def test_gpu_history_is_by_index_and_field(store: Store) -> None:
    for n in range(4):
        sample(store, t=T + n, gpus=[{"index": 1, "util_ratio": n / 10}, {"index": 0}])
    found = store.read_sync(
        lambda session: telemetry.gpu_history(
            session, nodes.get_node(session, "local"), fields=["util_ratio"], points=10
        )
    )
    assert found["names"] == ["0.util_ratio", "1.util_ratio"]
    assert [item["values"]["1.util_ratio"] for item in found["points"]] == [0.0, 0.1, 0.2, 0.3]
    assert {item["values"]["0.util_ratio"] for item in found["points"]} == {None}


def test_old_telemetry_goes_and_old_samples_are_thinned(store: Store, clock: FakeClock) -> None:
    for n in range(130):
        sample(store, t=T + n, gpus=[])
    append(store, {"t": T, "step": 1}, {"t": T + 90_000, "step": 2})
    clock.move(100_000)

    def prune(session: Session) -> tuple[int, int]:
        day = timedelta(days=1)
        return (
            telemetry.prune_gpu_samples(session, keep_raw=day, keep=10 * day),
            telemetry.prune_metrics(session, keep=day),
        )

    assert store.write_sync(prune) == (128, 1)
    assert (
        store.read_sync(lambda session: session.exec(select(func.count()).select_from(GpuSample)).one()) == 2
    )
    clock.move(1_000_000)
    assert store.write_sync(prune)[0] == 2


# --- events --------------------------------------------------------------------------------------------


def test_events_are_paged_both_ways_and_filtered(store: Store, clock: FakeClock) -> None:
    def tell(session: Session) -> list[int]:
        found = [
            record_event(
                session, actor="a", subject=f"run/{n % 2}", reason="R", message=str(n), run_id=str(n % 2)
            )
            for n in range(6)
        ]
        return [event.id or 0 for event in found]

    ids = store.write_sync(tell)
    newest = store.read_sync(lambda session: events.list_events(session, limit=2))
    assert [event.id for event in newest] == [ids[5], ids[4]]
    older = store.read_sync(lambda session: events.list_events(session, before_id=ids[4], limit=2))
    assert [event.id for event in older] == [ids[3], ids[2]]
    onward = store.read_sync(lambda session: events.list_events(session, after_id=ids[1], limit=2))
    assert [event.id for event in onward] == [ids[2], ids[3]]
    odd = store.read_sync(lambda session: events.list_events(session, run_id="1"))
    assert [event.message for event in odd] == ["5", "3", "1"]
    assert store.read_sync(events.newest_event_id) == ids[5]
    with pytest.raises(RequestError, match="limit"):
        store.read_sync(lambda session: events.list_events(session, limit=201))
    clock.move(100)
    store.write_sync(
        lambda session: record_event(session, actor="a", subject="s", reason="R", message="last")
    )
    assert store.write_sync(lambda session: events.prune_events(session, keep=timedelta(seconds=50))) > 0
    assert store.read_sync(events.oldest_event_id) == ids[5] + 1


# --- idempotency ---------------------------------------------------------------------------------------

PRINT = idempotency.request_fingerprint("POST", "/v1/runs/a/start", {"resume": None})


def begin(store: Store, key: str = "k", fingerprint: str = PRINT, actor: str = "t") -> Any:
    return store.write_sync(
        lambda session: idempotency.begin(session, actor=actor, key=key, fingerprint=fingerprint)
    )


def test_the_same_key_gives_the_first_answer_again(store: Store) -> None:
    assert begin(store) is None
    with pytest.raises(ConflictError) as running:
        begin(store)
    assert running.value.reason == "StillRunning"
    store.write_sync(
        lambda session: idempotency.finish(
            session, actor="t", key="k", status=202, body={"id": "op1"}, headers={"Location": "/x"}
        )
    )
    again = begin(store)
    assert (again.status, again.body, again.headers) == (202, {"id": "op1"}, {"Location": "/x"})


def test_another_body_under_the_same_key_is_refused_and_another_actor_is_not(store: Store) -> None:
    begin(store)
    other = idempotency.request_fingerprint("POST", "/v1/runs/a/start", {"resume": "scratch"})
    with pytest.raises(RequestError) as reused:
        begin(store, fingerprint=other)
    assert reused.value.reason == "IdempotencyKeyReused"
    assert begin(store, fingerprint=other, actor="someone else") is None


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb"])
def test_a_key_must_be_a_key(store: Store, key: str) -> None:
    with pytest.raises(RequestError, match="idempotency key"):
        begin(store, key=key)


def test_keys_end_after_a_day_or_with_a_failed_request(store: Store, clock: FakeClock) -> None:
    begin(store)
    store.write_sync(lambda session: idempotency.release(session, actor="t", key="k"))
    assert begin(store) is None
    assert store.write_sync(idempotency.abandon_running) == 1
    assert begin(store) is None
    clock.move(25 * 3600)
    assert begin(store) is None
    clock.move(25 * 3600)
    assert store.write_sync(idempotency.prune_keys) == 1


def test_a_fingerprint_ignores_the_order_of_keys() -> None:
    first = idempotency.request_fingerprint("post", "/x", {"a": 1, "b": 2})
    assert first == idempotency.request_fingerprint("POST", "/x", {"b": 2, "a": 1})
    assert first != idempotency.request_fingerprint("POST", "/y", {"b": 2, "a": 1})
