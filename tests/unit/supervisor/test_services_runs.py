"""Runs as services: intent with its event, refusals with reasons, idempotent stops, plans without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlmodel import Session, func, select

from supervisor.domain.errors import ConflictError, NotFoundError, RequestError
from supervisor.domain.restart import Ledger
from supervisor.services import nodes, runs, telemetry, views
from supervisor.store.facts import desired_of, has_new_checkpoint, history_of
from supervisor.store.queries import deployment_for_run, list_open_operations
from supervisor.store.tables import Attempt, Deployment, Event, Operation, Run
from supervisor.store.writer import Store
from tests.support.domain_builders import T0, FakeClock, make_attempt, make_run, make_spec, open_store


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    with open_store(tmp_path, clock=clock) as opened:
        opened.write_sync(make_run)
        yield opened


def change(store: Store, function: Callable[..., Any], **arguments: Any) -> Any:
    return store.write_sync(lambda session: function(session, the_run(session), **arguments))


def the_run(session: Session) -> Run:
    return runs.get_run(session, "slammed")


def look(store: Store) -> Run:
    return store.read_sync(the_run)


def events(store: Store) -> list[Event]:
    return list(store.read_sync(lambda session: session.exec(select(Event).order_by(Event.id)).all()))  # type: ignore[arg-type]


def with_attempt(store: Store, state: str, **changes: Any) -> Attempt:
    return store.write_sync(lambda session: make_attempt(session, the_run(session), state=state, **changes))


def everything(store: Store) -> list[Any]:
    def dump(session: Session) -> list[Any]:
        rows = [session.exec(select(table)).all() for table in (Run, Attempt, Operation, Event)]
        return [[row.model_dump() for row in found] for found in rows]

    return store.read_sync(dump)


def test_storing_the_same_spec_again_changes_nothing(store: Store) -> None:
    before = everything(store)
    store.write_sync(make_run)
    assert everything(store) == before


def test_a_changed_spec_is_the_next_generation(store: Store) -> None:
    store.write_sync(lambda session: make_run(session, env={"A": "1"}))
    run = look(store)
    assert (run.generation, run.spec["env"]) == (2, {"A": "1"})
    assert events(store)[-1].reason == "RunChanged"


def test_a_spec_for_an_unknown_node_is_refused(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no node is called elsewhere") as caught:
        store.write_sync(lambda session: runs.put_run(session, make_spec(node="elsewhere"), actor="t"))
    assert caught.value.hint
    assert "node ls" in caught.value.hint


def test_a_live_run_does_not_move(store: Store) -> None:
    with_attempt(store, "ready")

    def move(session: Session) -> None:
        nodes.add_node(session, name="other", transport="local", actor="t")
        runs.put_run(session, make_spec(node="other"), actor="t")

    with pytest.raises(ConflictError, match="cannot move"):
        store.write_sync(move)


def test_a_start_is_intent_operation_and_event_in_one(store: Store) -> None:
    operation = change(store, runs.request_start, actor="token/a", request_id="q1")
    run = look(store)
    assert (run.desired, run.intent, run.desired_actor) == ("running", 1, "token/a")
    assert (operation.kind, operation.status, operation.intent) == ("start", "pending", 1)
    event = events(store)[-1]
    assert (event.reason, event.actor, event.operation_id, event.request_id) == (
        "StartRequested",
        "token/a",
        operation.id,
        "q1",
    )


@pytest.mark.parametrize("state", [None, "planned", "launching", "started", "ready"])
def test_starting_a_live_run_is_refused(store: Store, state: str | None) -> None:
    change(store, runs.request_start, actor="t")
    if state:
        with_attempt(store, state)
    with pytest.raises(ConflictError) as caught:
        change(store, runs.request_start, actor="t")
    assert caught.value.reason == "AlreadyRunning"
    assert caught.value.hint
    assert "dflashctl" in caught.value.hint


def test_a_start_lifts_a_hold_and_gives_fresh_counters(store: Store) -> None:
    change(store, runs.request_start, actor="t")
    with_attempt(store, "failed")

    def hold(session: Session) -> None:
        run = the_run(session)
        run.hold = {"reason": "CrashLoop", "message": "six", "since": T0.isoformat(), "intent": 1}
        run.ledger = Ledger(streak=6, restarts=6, uncounted=(T0,)).to_json()
        run.next_start_at = T0
        session.add(run)

    store.write_sync(hold)
    assert store.read_sync(lambda session: views.run_view(session, the_run(session)))["phase"] == "held"
    change(store, runs.request_start, actor="t")
    run = look(store)
    ledger = Ledger.from_json(run.ledger)
    assert (run.hold, run.next_start_at, ledger.streak, ledger.restarts) == (None, None, 0, 0)
    assert ledger.uncounted == (T0,)


def test_a_quarantined_run_cannot_be_started_or_restarted(store: Store) -> None:
    with_attempt(store, "quarantined")
    for request in (runs.request_start, runs.request_restart):
        with pytest.raises(ConflictError, match="quarantined") as caught:
            change(store, request, actor="t")
        assert caught.value.reason == "Quarantined"


def test_stopping_a_stopped_run_is_done_at_once(store: Store) -> None:
    operation = change(store, runs.request_stop, actor="t")
    assert (operation.status, operation.result["state"]) == ("done", "stopped")
    assert look(store).intent == 0


def test_a_stop_supersedes_what_was_under_way_and_is_given_once(store: Store) -> None:
    start = change(store, runs.request_start, actor="t")
    with_attempt(store, "ready")
    first = change(store, runs.request_stop, actor="t", reason="lunch", save=False)
    second = change(store, runs.request_stop, actor="t")
    assert first.id == second.id
    run = look(store)
    assert (run.desired, run.stop_request) == ("stopped", {"save": False, "reason": "lunch"})
    ended = store.read_sync(lambda session: session.get(Operation, start.id))
    assert ended is not None
    assert ended.status == "superseded"
    assert len(store.read_sync(lambda session: list_open_operations(session, run_id=run.id))) == 1


def test_a_stop_ends_a_backoff(store: Store) -> None:
    change(store, runs.request_start, actor="t")
    with_attempt(store, "failed")
    operation = change(store, runs.request_stop, actor="t")
    assert operation.status == "done"
    assert look(store).desired == "stopped"


def test_a_start_during_a_stop_is_taken(store: Store) -> None:
    change(store, runs.request_start, actor="t")
    with_attempt(store, "stopping")
    change(store, runs.request_stop, actor="t")
    operation = change(store, runs.request_start, actor="t")
    assert operation.status == "pending"
    assert look(store).desired == "running"


def test_a_restart_carries_its_wishes(store: Store) -> None:
    change(store, runs.request_start, actor="t")
    with_attempt(store, "ready")
    change(store, runs.request_restart, actor="t", when="next_checkpoint", resume="scratch", save=False)
    desired = store.read_sync(lambda session: desired_of(session, the_run(session)))
    assert desired.restart is not None
    assert (desired.restart.intent, desired.intent) == (2, 2)
    assert (desired.restart.when, desired.restart.resume, desired.restart.save) == (
        "next_checkpoint",
        "scratch",
        False,
    )


@pytest.mark.parametrize("arguments", [{"when": "later"}, {"resume": "checkpoint"}, {"resume": "/a\0b"}])
def test_a_restart_with_a_wrong_wish_changes_nothing(store: Store, arguments: dict[str, Any]) -> None:
    before = everything(store)
    with pytest.raises(RequestError):
        change(store, runs.request_restart, actor="t", **arguments)
    assert everything(store) == before


def test_a_loss_can_be_declared_only_of_what_may_be_lost(store: Store) -> None:
    with pytest.raises(ConflictError, match="no live attempt"):
        change(store, runs.request_declare_lost, actor="t", reason="burnt")
    attempt = with_attempt(store, "ready")

    def alive(session: Session) -> None:
        run = the_run(session)
        run.conditions = [{"type": kind, "status": "true"} for kind in ("Alive", "Reachable")]
        session.add(run)

    change(store, runs.request_declare_lost, actor="t", reason="burnt")
    assert look(store).declare_lost == {
        "attempt_id": attempt.id,
        "actor": "t",
        "reason": "burnt",
        "force": False,
    }
    store.write_sync(alive)
    with pytest.raises(ConflictError, match="is alive"):
        change(store, runs.request_declare_lost, actor="t", reason="burnt")


def test_a_quarantined_attempt_that_is_seen_is_given_up_only_by_force(store: Store) -> None:
    attempt = with_attempt(store, "quarantined")

    def alive(session: Session) -> None:
        run = the_run(session)
        run.conditions = [{"type": kind, "status": "true"} for kind in ("Alive", "Reachable")]
        session.add(run)

    store.write_sync(alive)
    with pytest.raises(ConflictError, match="is alive") as refused:
        change(store, runs.request_declare_lost, actor="t", reason="stuck")
    assert "restart the container" in (refused.value.hint or "")
    change(store, runs.request_declare_lost, actor="t", reason="stuck", force=True)
    assert (look(store).declare_lost or {})["attempt_id"] == attempt.id


def deploy(session: Session, name: str, *, sequence: int) -> None:
    node = nodes.get_node(session, "local")
    session.add(Deployment(id=name, node_id=node.id, sequence=sequence, state="ready", created_at=T0))
    node.current_deployment_id = name
    session.add(node)
    session.flush()


def test_a_rollback_pins_the_pair_before_and_a_pin_of_a_revert_ends_with_a_newer_deploy(store: Store) -> None:
    with pytest.raises(ConflictError, match="never run on another"):
        change(store, runs.request_rollback, actor="t")
    for number, name in enumerate(("d1", "d2"), 1):
        store.write_sync(lambda session, name=name, number=number: deploy(session, name, sequence=number))
        with_attempt(store, "stopped", deployment_id=name)
    plan = store.read_sync(lambda session: runs.plan_rollback(session, the_run(session)))
    assert (plan["would_refuse"], "deployment d1" in plan["summary"]) == (None, True)
    operation = change(store, runs.request_rollback, actor="t")
    assert operation.kind == "rollback"

    def pair(session: Session) -> str | None:
        found = deployment_for_run(session, the_run(session))
        return found.id if found else None

    assert store.read_sync(pair) == "d1"

    def against(session: Session) -> None:
        run = the_run(session)
        run.pinned_against_id = "d2"
        session.add(run)

    store.write_sync(against)
    assert store.read_sync(pair) == "d1"
    store.write_sync(lambda session: deploy(session, "d3", sequence=3))
    assert store.read_sync(pair) == "d3"


def test_a_run_is_removed_only_when_nobody_wants_it(store: Store) -> None:
    change(store, runs.request_start, actor="t")
    with pytest.raises(ConflictError, match="waiting for its next attempt"):
        change(store, runs.delete_run, actor="t")
    with_attempt(store, "failed")
    change(store, runs.request_stop, actor="t")
    change(store, runs.delete_run, actor="t")
    left = store.read_sync(lambda session: session.exec(select(func.count()).select_from(Attempt)).one())
    assert left == 0
    assert events(store)[-1].reason == "RunRemoved"


@pytest.mark.parametrize(
    ("verdict", "refusal"),
    [("fail", None), ("succeeded", None), ("restart", "waiting for its next attempt"), ("hold", "is held")],
)
def test_a_wanted_run_is_removed_once_nothing_follows(
    store: Store, verdict: str, refusal: str | None
) -> None:
    change(store, runs.request_start, actor="t")
    ended = with_attempt(store, "launch_failed", reason="PreflightFailed")

    def judge(session: Session) -> None:
        run = the_run(session)
        run.ledger = {**run.ledger, "evaluated": ended.id, "verdict": verdict}
        session.add(run)

    store.write_sync(judge)
    if refusal:
        with pytest.raises(ConflictError, match=refusal):
            change(store, runs.delete_run, actor="t")
    else:
        change(store, runs.delete_run, actor="t")
        assert events(store)[-1].reason == "RunRemoved"


def test_attempts_are_paged_newest_first(store: Store) -> None:
    for _ in range(5):
        with_attempt(store, "failed")
    page = store.read_sync(lambda session: runs.list_attempts(session, the_run(session), limit=2))
    rest = store.read_sync(lambda session: runs.list_attempts(session, the_run(session), before=4, limit=9))
    assert [item.number for item in page] == [5, 4]
    assert [item.number for item in rest] == [3, 2, 1]
    with pytest.raises(RequestError, match="limit"):
        store.read_sync(lambda session: runs.list_attempts(session, the_run(session), limit=0))


# --- plans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, "ready", "failed"])
@pytest.mark.parametrize(
    ("plan", "arguments"),
    [
        (runs.plan_start, {}),
        (runs.plan_stop, {"save": False}),
        (runs.plan_restart, {"when": "next_checkpoint"}),
    ],
)
def test_a_plan_changes_nothing(
    store: Store, state: str | None, plan: Any, arguments: dict[str, Any]
) -> None:
    if state:
        with_attempt(store, state)
    before = everything(store)
    shown = store.read_sync(lambda session: plan(session, the_run(session), **arguments))
    assert everything(store) == before
    assert {"action", "summary", "steps", "costs", "risks", "would_refuse"} <= set(shown)


def test_a_restart_plan_knows_its_cost_from_earlier_attempts(store: Store, clock: FakeClock) -> None:
    def build(session: Session) -> None:
        run = the_run(session)
        times = {"ready_at": 7, "stopping_at": 10, "ended_at": 11}
        old = {name: T0.replace(minute=minute) for name, minute in times.items()}
        make_attempt(session, run, state="stopped", **old)
        live = make_attempt(session, run, state="ready", gpus=[{"index": 0}, {"index": 1}])
        live.last_checkpoint = {"step": 5, "path": "/c", "saved_at": T0.timestamp()}

    store.write_sync(build)
    clock.move(600)
    plan = store.read_sync(lambda session: runs.plan_restart(session, the_run(session)))
    assert plan["costs"]["lost_s"] == 600
    assert plan["costs"]["overhead_s"] == 480
    assert plan["costs"]["now_gpu_s"] == 2 * 1080
    assert plan["costs"]["recommendation"] == "next_checkpoint"
    assert [step["action"] for step in plan["steps"]][:2] == ["ask", "term"]
    assert "train_slammed3.log" in str(plan["steps"])


PROGRAM = {"source": "none", "command": {"argv": ["/opt/own"]}}


@pytest.mark.parametrize(
    ("spec", "fields", "is_refused"),
    [
        (PROGRAM, {}, True),
        (PROGRAM, {"last_checkpoint": {"step": 1, "path": "/c", "saved_at": 1.0}}, False),
        (PROGRAM, {"last_status": {"phase": "training", "checkpoint_interval_s": 60}}, False),
        ({}, {}, False),
    ],
    ids=["silent", "has saved", "will save", "trainer"],
)
def test_a_restart_never_waits_for_a_checkpoint_that_nobody_writes(
    store: Store, spec: dict[str, Any], fields: dict[str, Any], is_refused: bool
) -> None:
    store.write_sync(lambda session: make_run(session, **spec))
    with_attempt(store, "stopped", ready_at=T0, stopping_at=T0, ended_at=T0.replace(minute=9))
    with_attempt(store, "ready", ready_at=T0.replace(minute=0, hour=1), **fields)

    def plan(when: str) -> dict[str, Any]:
        return store.read_sync(lambda session: runs.plan_restart(session, the_run(session), when=when))

    assert plan("now")["would_refuse"] is None
    shown = plan("next_checkpoint")
    if not is_refused:
        assert shown["would_refuse"] is None
        assert change(store, runs.request_restart, actor="t", when="next_checkpoint").status != "failed"
        return
    assert shown["would_refuse"]["reason"] == "NoCheckpoints"
    assert (shown["costs"]["recommendation"], shown["costs"]["next_checkpoint_gpu_s"]) == ("now", None)
    before = everything(store)
    with pytest.raises(ConflictError, match="no checkpoint to wait for") as caught:
        change(store, runs.request_restart, actor="t", when="next_checkpoint")
    assert "--when now" in str(caught.value.hint)
    assert everything(store) == before
    change(store, runs.request_restart, actor="t", when="now")


def test_a_start_plan_says_what_would_be_refused(store: Store) -> None:
    change(store, runs.request_start, actor="t")
    with_attempt(store, "ready")
    plan = store.read_sync(lambda session: runs.plan_start(session, the_run(session)))
    assert plan["would_refuse"]["reason"] == "AlreadyRunning"


def risks(store: Store) -> list[str]:
    found: list[str] = store.read_sync(lambda session: runs.plan_start(session, the_run(session)))["risks"]
    return found


def test_a_plan_names_what_could_go_wrong(store: Store) -> None:
    assert "nothing has been deployed" in risks(store)[0]
    store.write_sync(lambda session: deploy(session, "d1", sequence=1))
    assert "not proved good yet" in risks(store)[0]

    def fail(session: Session) -> None:
        deployment = session.get(Deployment, "d1")
        assert deployment is not None
        deployment.is_good = False
        session.add(deployment)
        run = the_run(session)
        run.conditions = [{"type": "Reachable", "status": "false", "message": "refused"}]
        session.add(run)

    store.write_sync(fail)
    assert risks(store) == [
        "the release and environment failed before",
        "the node cannot be reached now: refused",
    ]


def test_stopping_without_saving_names_the_loss(store: Store, clock: FakeClock) -> None:
    with_attempt(
        store, "ready", last_checkpoint={"step": 1, "path": "/c", "saved_at": "2026-11-01T12:00:00+00:00"}
    )
    clock.move(90)
    plan = store.read_sync(lambda session: runs.plan_stop(session, the_run(session), save=False))
    assert plan["risks"] == ["without saving, 90 s of work since the last checkpoint are lost"]


def test_a_list_shows_each_run_in_short_and_deployments_in_full(store: Store) -> None:
    store.write_sync(lambda session: deploy(session, "d1", sequence=1))
    short = store.read_sync(lambda session: views.run_summaries(session, runs.list_runs(session)))
    assert (short[0]["name"], short[0]["deployment"]["id"], short[0]["phase"]) == ("slammed", "d1", "pending")
    assert "last_decision" not in short[0]
    node = store.read_sync(lambda session: nodes.get_node(session, "local"))
    shown = store.read_sync(
        lambda session: [
            views.deployment_view(session, found) for found in nodes.list_deployments(session, node)
        ]
    )
    assert [(item["id"], item["is_current"]) for item in shown] == [("d1", True)]


def test_a_list_shows_each_run_its_own_newest_attempt_and_line(store: Store) -> None:
    def write(session: Session) -> None:
        for name in ("a", "b"):
            run = make_run(session, name=name)
            for number, state in ((1, "failed"), (2, "ready")):
                attempt = make_attempt(session, run, state=state)
                session.flush()
                lines = [{"t": 10.0 * number + n, "step": n, "who": f"{name}{number}"} for n in (1, 2)]
                telemetry.append_metrics(session, run_id=run.id, attempt_id=attempt.id, records=lines)
        make_run(session, name="c")

    store.write_sync(write)
    queries: list[str] = []
    engine = store._read_engine
    sqlalchemy.event.listen(engine, "before_cursor_execute", lambda *args: queries.append(args[2]))

    def read(session: Session, count: int) -> tuple[list[dict[str, Any]], int]:
        queries.clear()
        return views.run_summaries(session, runs.list_runs(session)[:count]), len(queries)

    one, few = store.read_sync(lambda session: read(session, 1))
    shown, many = store.read_sync(lambda session: read(session, 3))

    by_name = {item["name"]: item for item in shown}
    assert [by_name[name]["attempt_count"] for name in "abc"] == [2, 2, 0]
    assert [by_name[name]["attempt"]["number"] for name in "ab"] == [2, 2]
    assert [(by_name[name]["metrics"]["who"], by_name[name]["metrics"]["step"]) for name in "ab"] == [
        ("a2", 2),
        ("b2", 2),
    ]
    assert by_name["c"]["attempt"] is by_name["c"]["metrics"] is None
    assert one[0]["name"] == "a"
    assert many == few, "a longer list must not need more queries"


# --- views and facts -----------------------------------------------------------------------------------


def test_a_view_shows_phase_budget_and_newest_attempt(store: Store, clock: FakeClock) -> None:
    change(store, runs.request_start, actor="t")
    with_attempt(store, "ready", last_status={"phase": "training", "step": 3}, last_status_at=T0)
    clock.move(5)
    view = store.read_sync(lambda session: views.run_view(session, the_run(session), clock))
    assert (view["phase"], view["desired"], view["attempt"]["number"]) == ("running", "running", 1)
    assert view["status_age_s"] == 5
    assert view["restarts"]["remaining"]["restarts"] == 20
    assert view["gpu"]["reason"] == "NoSample"
    assert (view["metrics"], view["queue"]) == (None, None)
    assert view["attempt"]["duration_s"] == 5


def test_the_step_of_a_program_without_a_status_record_is_shown(store: Store) -> None:
    with_attempt(store, "ready", last_step=None)
    assert store.read_sync(lambda session: views.run_view(session, the_run(session)))["status"] is None
    with_attempt(store, "ready", last_step=42)
    shown = store.read_sync(lambda session: views.run_view(session, the_run(session)))
    assert (shown["status"], shown["status_age_s"]) == ({"step": 42}, None)


def test_drift_explain_and_checkpoints_are_shown(store: Store) -> None:
    first = {"step": 1, "path": "/c/1", "saved_at": 1.0}
    with_attempt(store, "failed", last_checkpoint=first)
    with_attempt(store, "ready", last_checkpoint={**first, "step": 2, "path": "/c/2"})

    def drift(session: Session) -> None:
        run = the_run(session)
        run.drift = {"class": "capability", "changes": [{"name": "nvidia-ml-py"}], "first_seen_at": "x"}
        run.last_decision = {"reason": "InSync"}
        session.add(run)

    store.write_sync(drift)
    shown = store.read_sync(lambda session: views.drift_view(session, the_run(session)))
    assert (shown["is_drifted"], shown["class"], shown["action"]) == (
        True,
        "capability",
        "at_next_checkpoint",
    )
    explained = store.read_sync(lambda session: views.explain_view(session, the_run(session)))
    assert explained["decision"]["reason"] == "InSync"
    assert [item["number"] for item in explained["attempts"]] == [2, 1]
    found = store.read_sync(lambda session: views.checkpoint_views(session, the_run(session)))
    assert [item["path"] for item in found] == ["/c/2", "/c/1"]


def test_a_run_file_stored_since_the_start_is_a_difference_of_its_own(store: Store) -> None:
    def shown() -> dict[str, Any]:
        return store.read_sync(lambda session: views.drift_view(session, the_run(session)))

    with_attempt(store, "ready")
    assert (shown()["is_drifted"], shown()["changes"], shown()["message"]) == (False, [], "")
    store.write_sync(lambda session: make_run(session, env={"A": "1"}))
    found = shown()
    assert (found["is_drifted"], found["class"], found["action"]) == (True, None, None)
    assert [(item["name"], item["old"], item["new"]) for item in found["changes"]] == [
        ("run file", "generation 1", "generation 2")
    ]
    assert "next start" in found["message"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"last_checkpoint": {"step": 5}, "first_checkpoint_step": None}, True),
        ({"last_checkpoint": {"step": 5}, "first_checkpoint_step": 4}, True),
        ({"last_checkpoint": {"step": 5}, "first_checkpoint_step": 5}, False),
        ({}, False),
        ({"state": "lost"}, None),
        ({"stop": {"cause": "drift"}}, None),
        ({"stop": {"cause": "ready_timeout"}}, False),
        ({"spec": {"command": {"argv": ["/x"]}}}, None),
        ({"spec": {"command": {"argv": ["/x"]}}, "last_status": {"phase": "training"}}, False),
    ],
)
def test_progress_is_known_or_unknown(store: Store, changes: dict[str, Any], expected: Any) -> None:
    fields = {"state": "failed", **changes}
    attempt = with_attempt(store, **fields)
    assert has_new_checkpoint(attempt) is expected


def test_history_reads_back_what_was_stored(store: Store) -> None:
    change(store, runs.request_start, actor="t")
    with_attempt(
        store, "failed", reason="ReadyTimeout", trigger="drift", exit_record={"last_lines": ["boom"]}
    )
    history = store.read_sync(lambda session: history_of(session, the_run(session)))
    assert history.newest is not None
    assert (history.newest.reason, history.newest.trigger, history.newest.last_lines) == (
        "ReadyTimeout",
        "drift",
        ("boom",),
    )
