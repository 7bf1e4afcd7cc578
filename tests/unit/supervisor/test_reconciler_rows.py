"""What the reconciler writes: leases that fence, operations that end once, telemetry that is stored once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlmodel import Session, select

from supervisor.clock import Clock, SystemClock
from supervisor.domain.actions import Decision, Nothing
from supervisor.domain.errors import LeaseLostError, NotRunningError, StoreBusyError
from supervisor.domain.run import ConditionType
from supervisor.reconciler import apply, leases
from supervisor.reconciler.operations import describe_end, end_operations
from supervisor.reconciler.reachability import Reachability
from supervisor.reconciler.sampler import MAX_PENDING, Sampler, Tracked, flush_forever
from supervisor.reconciler.watches import _load
from supervisor.services import runs
from supervisor.store.events import now_of
from supervisor.store.queries import get_run, newest_attempt
from supervisor.store.tables import Attempt, Event, GpuSample, MetricLine, Operation, Run
from supervisor.store.writer import Store
from tests.support.domain_builders import FakeClock, make_attempt, make_run, open_store

WAITING = Decision(actions=(Nothing(reason="Start"),), reason="Start", explanation="waiting")
FAIL = Decision(actions=(Nothing(reason="x"),), reason="x", explanation="a restart cannot help")
HELD = Decision(actions=(Nothing(reason="Held"),), reason="Held", explanation="held")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    with open_store(tmp_path, clock=clock) as opened:
        opened.write_sync(make_run)
        yield opened


def the_run(session: Session) -> Run:
    return get_run(session, "slammed")


def write(store: Store, function: Callable[[Session], Any]) -> Any:
    return store.write_sync(function)


def test_a_lease_is_held_by_one_owner_until_it_expires(store: Store, clock: FakeClock) -> None:
    run_id = store.read_sync(the_run).id

    def claim(owner: str) -> str | None:
        return write(store, lambda session: leases.claim(session, Run, run_id, owner))

    first = claim("one")
    assert first is not None
    assert claim("two") is None
    clock.move(leases.LEASE_S + 1)
    second = claim("two")

    assert second is not None
    with pytest.raises(LeaseLostError):
        write(store, lambda session: leases.require(session, Run, run_id, first))
    write(store, lambda session: leases.renew(session, Run, run_id, second))
    write(store, lambda session: leases.release(session, Run, run_id, first))
    assert store.read_sync(the_run).lease_token == second
    write(store, lambda session: leases.release(session, Run, run_id, second))
    assert store.read_sync(the_run).lease_token is None


def test_a_new_daemon_voids_the_leases_of_the_former_one(store: Store) -> None:
    run_id = store.read_sync(the_run).id
    write(store, lambda session: leases.claim(session, Run, run_id, "former"))

    assert write(store, leases.void_all) == 1
    assert write(store, lambda session: leases.claim(session, Run, run_id, "new")) is not None
    assert write(store, lambda session: leases.claim(session, Run, "gone", "new")) is None


def request_start(store: Store) -> str:
    return write(store, lambda session: runs.request_start(session, the_run(session), actor="token/t").id)


def end(store: Store, decision: Decision = WAITING, reach: Reachability | None = None) -> None:
    write(store, lambda session: end_operations(session, the_run(session), decision, reach))


def operation(store: Store, operation_id: str) -> Operation:
    found = store.read_sync(lambda session: session.get(Operation, operation_id))
    assert found is not None
    return found


def attempt_for(store: Store, state: str, **changes: Any) -> None:
    def function(session: Session) -> None:
        run = the_run(session)
        make_attempt(session, run, state=state, intent=run.intent, **changes)

    write(store, function)


def test_a_start_goes_on_until_its_attempt_has_shown_life(store: Store, clock: FakeClock) -> None:
    operation_id = request_start(store)
    end(store)
    assert operation(store, operation_id).status == "running"

    attempt_for(store, "started", first_output_at=clock.now())
    end(store)
    assert operation(store, operation_id).status == "running"
    clock.move(2)
    end(store)

    done = operation(store, operation_id)
    assert done.status == "done"
    assert done.result is not None
    assert done.result["attempt"] == 1


def test_a_started_process_that_reports_a_phase_needs_no_further_wait(store: Store, clock: FakeClock) -> None:
    operation_id = request_start(store)
    attempt_for(store, "started", first_output_at=clock.now(), last_status={"phase": "loading"})
    end(store)
    assert operation(store, operation_id).status == "done"


def test_a_start_whose_attempt_failed_carries_the_cause(store: Store) -> None:
    operation_id = request_start(store)
    attempt_for(
        store,
        "failed",
        reason="CannotBoot",
        message="configuration is wrong (exit code 2)",
        exit_code=2,
        exit_record={"code": 2, "last_lines": ["usage:", "error: no such flag --lrr"]},
    )

    end(store)
    assert operation(store, operation_id).status == "running", "what follows is not decided yet"
    judge(store, "fail")
    end(store, FAIL)

    failed = operation(store, operation_id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error["reason"] == "CannotBoot"
    assert "no such flag --lrr" in failed.error["message"]
    assert failed.error["data"]["exit_code"] == 2
    assert failed.error["data"]["follows"] == "no further attempt starts by itself (a restart cannot help)"


def judge(store: Store, verdict: str, *, starts_in_s: float | None = None, **ledger: Any) -> None:
    """What the policy makes of the newest attempt's end."""

    def function(session: Session) -> None:
        run = the_run(session)
        attempt = newest_attempt(session, run.id)
        assert attempt is not None
        run.ledger = {**run.ledger, "evaluated": attempt.id, "verdict": verdict, **ledger}
        attempt.is_counted = verdict == "restart"
        run.next_attempt_number = attempt.number + 1
        if starts_in_s is not None:
            run.next_start_at = now_of(session) + timedelta(seconds=starts_in_s)

    write(store, function)


def test_a_failed_start_says_that_and_when_the_next_try_comes(store: Store) -> None:
    operation_id = request_start(store)
    attempt_for(store, "failed", reason="ExitedNonZero", message="exit code 1")

    judge(store, "restart", starts_in_s=18.2, restarts=1, no_progress=1)
    end(store)

    failed = operation(store, operation_id)
    assert failed.error is not None
    assert failed.error["data"]["follows"] == (
        "attempt 2 starts by itself in 18 s; the run is held after 2 more failures"
    )


def test_a_start_whose_run_is_held_says_so(store: Store) -> None:
    operation_id = request_start(store)
    attempt_for(store, "failed", reason="NonFinite", message="exit code 5")

    def hold(session: Session) -> None:
        the_run(session).hold = {"reason": "NonFinite", "message": "the default for NonFinite says hold"}

    write(store, hold)
    end(store)

    failed = operation(store, operation_id)
    assert failed.error is not None
    assert failed.error["data"]["follows"] == (
        "the run is held: no further attempt starts by itself (the default for NonFinite says hold)"
    )


def test_a_start_on_a_node_out_of_reach_fails_and_says_that_the_wish_stays(
    store: Store, clock: FakeClock
) -> None:
    operation_id = request_start(store)
    reach = Reachability()
    reach.note_failure(NotRunningError("container '200' not running!"), clock.now(), 0.0)

    end(store, reach=reach)

    failed = operation(store, operation_id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error["reason"] == "ContainerStopped"
    assert "stays wanted" in failed.error["hint"]


def test_an_unknown_reachability_ends_nothing(store: Store) -> None:
    operation_id = request_start(store)
    end(store, reach=Reachability())
    assert operation(store, operation_id).status == "running"


def test_a_held_run_ends_its_start_with_the_reason_of_the_hold(store: Store) -> None:
    operation_id = request_start(store)

    def hold(session: Session) -> None:
        run = the_run(session)
        run.hold = {"reason": "GpuNotReleased", "message": "still in use", "since": "", "intent": run.intent}
        session.add(run)

    write(store, hold)
    end(store, HELD)

    failed = operation(store, operation_id)
    assert (failed.status, failed.error and failed.error["reason"]) == ("failed", "GpuNotReleased")


def test_a_stop_is_done_when_nothing_lives_and_failed_when_it_cannot_be_killed(store: Store) -> None:
    request_start(store)
    attempt_for(store, "stopping")
    stop_id = write(store, lambda session: runs.request_stop(session, the_run(session), actor="token/t").id)
    end(store)
    assert operation(store, stop_id).status == "running"

    def quarantine(session: Session) -> None:
        attempt = newest_attempt(session, the_run(session).id)
        assert attempt is not None
        apply.apply_transition(session, attempt, "quarantined", reason="StillAlive")

    write(store, quarantine)
    end(store)

    failed = operation(store, stop_id)
    assert (failed.status, failed.error and failed.error["reason"]) == ("failed", "Quarantined")


def test_an_operation_ends_once(store: Store) -> None:
    operation_id = request_start(store)
    attempt_for(store, "succeeded")
    end(store)
    end(store)

    events = store.read_sync(
        lambda session: session.exec(select(Event).where(Event.operation_id == operation_id)).all()
    )
    assert [event.reason for event in events if event.reason.startswith("Operation")] == ["OperationDone"]


def test_a_refused_launch_is_described_by_its_first_failed_check() -> None:
    attempt = Attempt(
        id="a",
        run_id="r",
        node_id="n",
        number=3,
        state="launch_failed",
        generation=1,
        reason="PreflightFailed",
        message="nvml is required",
        created_at=FakeClock().now(),
        updated_at=FakeClock().now(),
        preflight=[
            {
                "name": "capability nvml",
                "status": "fail",
                "reason": "MissingDependency",
                "message": "nvml is required",
                "remedy": "add it",
            }
        ],
    )

    error = describe_end(attempt, follows="no further attempt starts by itself")

    assert (error["reason"], error["hint"]) == ("MissingDependency", "add it")
    assert error["message"] == "attempt 3 launch_failed: capability nvml: nvml is required"
    assert (error["data"]["attempt_reason"], error["data"]["follows"]) == (
        "PreflightFailed",
        "no further attempt starts by itself",
    )


def conditions_of(store: Store, *steps: tuple[bool | None, str]) -> list[str]:
    for status, reason in steps:

        def function(session: Session, status: bool | None = status, reason: str = reason) -> None:
            apply.set_condition(session, the_run(session), ConditionType.TELEMETRY_OK, status, reason=reason)

        write(store, function)
    rows = store.read_sync(lambda session: session.exec(select(Event).order_by(Event.id)).all())  # type: ignore[arg-type]
    return [event.reason for event in rows if event.reason.startswith("TelemetryOK")]


def test_a_condition_that_only_flickers_between_true_and_unknown_fills_no_history(store: Store) -> None:
    assert conditions_of(store, *[(True, "Ok"), (None, "Silent")] * 20) == []


def test_a_condition_that_breaks_and_heals_is_told_twice(store: Store) -> None:
    steps = [(True, "Ok"), (False, "Missing"), (False, "Missing"), (False, "Other"), (True, "Ok")]
    assert conditions_of(store, *steps) == ["TelemetryOKFalse", "TelemetryOKFalse", "TelemetryOKTrue"]


def test_reasons_that_only_change_places_are_told_once_each(store: Store) -> None:
    flapping = [(False, "Missing"), (False, "NoInterpreter")] * 10
    assert conditions_of(store, *flapping) == ["TelemetryOKFalse"] * 2
    again = [(True, "Ok"), (False, "NoInterpreter")]
    assert conditions_of(store, *again)[2:] == ["TelemetryOKTrue", "TelemetryOKFalse"]


NO_INTERPRETER = [{"name": "interpreter", "status": "warn"}]
READS_GPUS = [{"name": "interpreter", "status": "ok"}, {"name": "capability nvml", "status": "ok"}]


@pytest.mark.parametrize(
    ("other", "preflight", "expected"),
    [
        ("preflight", None, "/own/python"),
        ("launching", None, "/own/python"),
        ("failed", None, "/own/python"),
        ("ready", NO_INTERPRETER, "/own/python"),
        ("ready", None, "/no/python"),
        ("ready", READS_GPUS, "/no/python"),
    ],
)
def test_the_interpreter_of_another_run_that_cannot_be_used_reads_no_gpus(
    store: Store, other: str, preflight: list[dict[str, str]] | None, expected: str
) -> None:
    def build(session: Session) -> str:
        for name, python, state, report in (
            ("b", "/own/python", "ready", None),
            ("a", "/no/python", other, preflight),
        ):
            run = make_run(session, name=name, environment={"python": python})
            make_attempt(session, run, state=state, preflight=report)
        return run.node_id

    node_id = write(store, build)
    assert store.read_sync(lambda session: _load(session, node_id))[1] == expected


class Harness:
    """A sampler with its outputs caught."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.published: list[tuple[str, Any]] = []
        self.hinted: list[str] = []
        self.environments: list[tuple[str, str]] = []
        self.sampler = Sampler(
            store,
            publish=lambda topic, data, **_: self.published.append((topic, data)),
            hint=self.hinted.append,
            on_environment=lambda node, python: self.environments.append((node, python)),
            clock=clock,
        )
        self.attempt: Attempt = store.write_sync(lambda s: make_attempt(s, the_run(s), state="started"))
        self.node_id = self.attempt.node_id
        self.connection: Any = SimpleNamespace(address=SimpleNamespace(id=self.node_id, name="ct200"))
        self.track()

    def track(self, newest: float = 0.0) -> None:
        self.sampler.track(
            self.node_id,
            [
                Tracked(
                    attempt_id=self.attempt.id,
                    run_id=self.attempt.run_id,
                    run_name="slammed",
                    node_id=self.node_id,
                    newest_metric_t=newest,
                )
            ],
        )

    def send(self, **frame: Any) -> None:
        self.sampler.on_frame(self.connection, frame)

    def metrics(self, t: float, step: int, **frame: Any) -> None:
        record = {"v": 1, "t": t, "step": step, "train": {"loss": 1.0}}
        self.send(ev="metrics", attempt_id=self.attempt.id, record=record, offset=min(int(t), 99), **frame)


@pytest.fixture
def harness(store: Store, clock: FakeClock) -> Harness:
    return Harness(store, clock)


def rows(store: Store, table: Any) -> list[Any]:
    return list(store.read_sync(lambda session: session.exec(select(table)).all()))


async def test_a_metrics_line_is_stored_once_however_often_it_comes(store: Store, harness: Harness) -> None:
    for _ in range(2):
        harness.metrics(10.0, 1)
        harness.metrics(11.0, 2)
        await harness.sampler.flush()

    assert [(row.t, row.step) for row in rows(store, MetricLine)] == [(10.0, 1), (11.0, 2)]
    assert harness.sampler.offsets(harness.node_id) == {harness.attempt.id: 11}


async def test_the_last_lines_of_an_attempt_that_is_let_go_are_still_taken(
    store: Store, harness: Harness
) -> None:
    harness.sampler.track(harness.node_id, [], is_letting_go=False)
    harness.metrics(10.0, 24)
    harness.sampler.track(harness.node_id, [])
    harness.metrics(11.0, 25)
    await harness.sampler.flush()

    assert [row.step for row in rows(store, MetricLine)] == [24]


async def test_lines_from_before_a_restart_of_the_daemon_are_not_taken_again(
    store: Store, clock: FakeClock
) -> None:
    harness = Harness(store, clock)
    harness.sampler.track(harness.node_id, [])
    harness.track(newest=10.0)

    harness.metrics(10.0, 1)
    harness.metrics(11.0, 2)
    await harness.sampler.flush()

    assert [row.step for row in rows(store, MetricLine)] == [2]


async def test_a_line_that_cannot_be_stored_costs_nothing_else(store: Store, harness: Harness) -> None:
    harness.metrics(10**400, 1)
    harness.metrics(10.0, 10**40)
    harness.metrics(11.0, 2)
    await harness.sampler.flush()

    assert [(row.t, row.step) for row in rows(store, MetricLine)] == [(10.0, -1), (11.0, 2)]


async def test_a_tick_that_fails_in_an_unknown_way_does_not_end_the_telemetry(
    store: Store, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("not thought of")

    with monkeypatch.context() as patch:
        patch.setattr("supervisor.reconciler.sampler.write_pending", fail)
        harness.metrics(10.0, 1)
        await harness.sampler.flush()
    harness.metrics(11.0, 2)
    await harness.sampler.flush()

    assert [row.step for row in rows(store, MetricLine)] == [2]


async def test_first_output_is_noted_and_wakes_the_run(store: Store, harness: Harness) -> None:
    harness.send(ev="log", attempt_id=harness.attempt.id, size=17)
    await harness.sampler.flush()

    attempt = rows(store, Attempt)[0]
    assert attempt.log_size == 17
    assert attempt.first_output_at is not None
    assert harness.hinted == [harness.attempt.run_id]


async def test_a_status_record_is_kept_and_its_news_wake_the_run(store: Store, harness: Harness) -> None:
    checkpoint = {"step": 5, "path": "/c", "saved_at": 1.0}
    for step in (4, 5):
        harness.send(
            ev="status",
            attempt_id=harness.attempt.id,
            status={"phase": "training", "step": step, "last_checkpoint": checkpoint},
        )
    await harness.sampler.flush()

    attempt = rows(store, Attempt)[0]
    assert (attempt.last_step, attempt.last_checkpoint) == (5, checkpoint)
    assert harness.hinted.count(harness.attempt.run_id) == 2


async def test_a_non_finite_value_is_marked_and_wakes_the_run(store: Store, harness: Harness) -> None:
    harness.metrics(1.0, 1, nonfinite=["train.loss"])
    await harness.sampler.flush()

    assert rows(store, MetricLine)[0].record["nonfinite"] == ["train.loss"]
    assert harness.hinted == [harness.attempt.run_id]


async def test_gpu_samples_are_kept_with_their_reason(store: Store, harness: Harness) -> None:
    harness.send(ev="gpu", sample={"t": 1.0, "gpus": [], "reason": "LibraryNotFound", "message": "no driver"})
    await harness.sampler.flush()

    sample = rows(store, GpuSample)[0]
    assert (sample.reason, sample.message, sample.gpus) == ("LibraryNotFound", "no driver", [])
    view = harness.sampler.gpus(harness.node_id)
    assert view is not None
    assert view.is_stale(view.received_s + 100)


async def test_reports_of_attempts_that_are_not_ours_are_left_alone(store: Store, harness: Harness) -> None:
    harness.send(ev="metrics", attempt_id="stranger", record={"t": 1.0})
    harness.send(ev="something-new", attempt_id=harness.attempt.id)
    harness.send(ev="env", python="/py", listing_digest="d")
    await harness.sampler.flush()

    assert rows(store, MetricLine) == []
    assert harness.environments == [(harness.node_id, "/py")]


async def test_a_store_that_fails_costs_the_oldest_samples_and_no_memory(
    store: Store, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_function: Any) -> Any:
        raise StoreBusyError("locked")

    monkeypatch.setattr(store, "write", refuse)
    for number in range(MAX_PENDING + 10):
        harness.metrics(float(number + 1), number)
        if number % 1000 == 0:
            await harness.sampler.flush()
    monkeypatch.undo()
    await harness.sampler.flush()

    stored = rows(store, MetricLine)
    assert len(stored) == MAX_PENDING
    assert stored[0].step == 10


async def test_an_ended_attempt_keeps_its_last_record(store: Store, harness: Harness) -> None:
    store.write_sync(
        lambda session: apply.apply_transition(
            session, session.get(Attempt, harness.attempt.id), "failed", reason="ExitedNonZero"
        )
    )
    harness.send(ev="status", attempt_id=harness.attempt.id, status={"phase": "training", "step": 99})
    harness.send(ev="log", attempt_id=harness.attempt.id, size=5)
    await harness.sampler.flush()

    attempt = rows(store, Attempt)[0]
    assert attempt.last_step != 99
    assert attempt.log_size == 5


async def test_what_waits_is_written_when_the_daemon_ends(store: Store) -> None:
    harness = Harness(store, SystemClock())
    task = asyncio.create_task(flush_forever(harness.sampler))
    await asyncio.sleep(0)
    harness.metrics(1.0, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(rows(store, MetricLine)) == 1
