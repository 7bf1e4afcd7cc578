"""The store's traps, each as a test: lost updates, locks, rollbacks, damage, one daemon, final rows."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlmodel import Session, select

from supervisor.domain.errors import (
    ConfigError,
    ConflictError,
    InvalidTransitionError,
    StoreBusyError,
    StoreCorruptError,
    StoreError,
)
from supervisor.domain.run import AttemptState, Reason
from supervisor.store.attempts import add_late_evidence, apply_transition
from supervisor.store.engine import parse_url
from supervisor.store.events import record_event
from supervisor.store.lock import StateLock
from supervisor.store.operations import create_operation, finish_operation, report_progress
from supervisor.store.queries import live_attempt, newest_attempt
from supervisor.store.tables import Attempt, Event, Operation, Run
from supervisor.store.writer import Store
from tests.support.domain_builders import T0, FakeClock, make_attempt, make_run, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


def add_event(session: Session, message: str = "happened") -> Event:
    return record_event(session, actor="test", subject="run/x", reason="Tested", message=message)


def count_up(session: Session) -> None:
    run = session.exec(select(Run)).one()
    run.intent = run.intent + 1
    session.add(run)


def test_eight_threads_lose_no_update(store: Store) -> None:
    store.write_sync(make_run)

    def work() -> None:
        for _ in range(50):
            store.write_sync(count_up)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read_sync(lambda session: session.exec(select(Run)).one().intent) == 400


def test_two_stores_on_one_file_lose_no_update_either(store: Store, tmp_path: Path) -> None:
    store.write_sync(make_run)
    other = Store(tmp_path / "supervisor.db", clock=FakeClock(), busy_timeout_s=120)

    def work(target: Store) -> None:
        for _ in range(40):
            target.write_sync(count_up)

    threads = [threading.Thread(target=work, args=(target,)) for target in (store, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert store.read_sync(lambda session: session.exec(select(Run)).one().intent) == 80


@pytest.mark.parametrize(
    ("pragma", "value"),
    [("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1), ("busy_timeout", 5000)],
)
def test_every_writing_connection_has_its_pragmas(store: Store, pragma: str, value: object) -> None:
    found = store.write_sync(lambda session: session.execute(text(f"PRAGMA {pragma}")).scalar())
    assert found == value


def test_a_failing_write_leaves_nothing_and_tells_nobody(store: Store) -> None:
    told: list[object] = []
    store.add_commit_listener(told.append)

    def fail(session: Session) -> None:
        add_event(session)
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        store.write_sync(fail)
    assert store.read_sync(lambda session: session.exec(select(Event)).all()) == []
    assert told == []


def test_listeners_get_the_events_of_a_commit_in_order(store: Store) -> None:
    told: list[list[str]] = []
    store.add_commit_listener(lambda events: told.append([event.message for event in events]))
    store.write_sync(lambda session: [add_event(session, "first"), add_event(session, "second")])
    assert told == [["first", "second"]]


def test_event_ids_only_grow_even_when_the_newest_was_removed(store: Store) -> None:
    first = store.write_sync(add_event).id
    store.write_sync(lambda session: session.execute(text("DELETE FROM event")))
    assert store.write_sync(add_event).id > first


def test_a_reader_cannot_write(store: Store) -> None:
    with pytest.raises(StoreError, match="readonly"):
        store.read_sync(add_event)


def test_readiness_does_not_wait_behind_other_writes(tmp_path: Path) -> None:
    is_writing, go_on = threading.Event(), threading.Event()

    def write(_: Session) -> None:
        is_writing.set()
        go_on.wait(60)

    with open_store(tmp_path, busy_timeout_s=0.2) as store:
        writer = threading.Thread(target=store.write_sync, args=(write,))
        writer.start()
        try:
            assert is_writing.wait(60)
            assert not store.is_writable()
        finally:
            go_on.set()
            writer.join()
        assert store.is_writable()


def test_readers_go_on_while_someone_else_holds_the_database(tmp_path: Path) -> None:
    with open_store(tmp_path, busy_timeout_s=0.2) as store:
        store.write_sync(add_event)
        other = sqlite3.connect(tmp_path / "supervisor.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        try:
            with pytest.raises(StoreBusyError) as caught:
                store.write_sync(add_event)
            assert caught.value.retryable
            assert len(store.read_sync(lambda session: session.exec(select(Event)).all())) == 1
            assert not store.is_writable()
        finally:
            other.execute("ROLLBACK")
            other.close()
        store.write_sync(add_event)
        assert store.is_writable()


async def test_reads_and_writes_from_the_event_loop(store: Store) -> None:
    await store.write(add_event)
    assert len(await store.read(lambda session: session.exec(select(Event)).all())) == 1


def test_a_full_database_refuses_and_recovers(store: Store) -> None:
    def limit(session: Session, pages: int) -> None:
        session.execute(text(f"PRAGMA max_page_count = {pages}"))

    def fill(session: Session) -> None:
        for _ in range(3000):
            add_event(session, "x" * 1000)

    store.write_sync(lambda session: limit(session, 1))
    with pytest.raises(StoreError) as caught:
        store.write_sync(fill)
    assert caught.value.reason == "StoreFull"
    assert store.read_sync(lambda session: session.exec(select(Event)).all()) == []
    store.write_sync(lambda session: limit(session, 100_000))
    store.write_sync(add_event)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        pass
    with pytest.raises(StoreError, match="closed"):
        store.write_sync(add_event)


def test_files_belong_to_us_alone(tmp_path: Path) -> None:
    with open_store(tmp_path / "state") as store:
        store.write_sync(add_event)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
        assert set(modes.values()) == {0o600}, modes
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"not a database at all" + data[21:], id="header"),
        pytest.param(lambda data: data[:2048] + os.urandom(4096) + data[6144:], id="half a page"),
        pytest.param(lambda data: data[: len(data) // 2 - 100], id="cut"),
    ],
)
def test_a_damaged_file_is_refused_in_plain_words_and_kept(tmp_path: Path, damage: object) -> None:
    with open_store(tmp_path) as store:
        store.write_sync(lambda session: [add_event(session, "x" * 500) for _ in range(300)])
    path = tmp_path / "supervisor.db"
    broken = damage(path.read_bytes())  # type: ignore[operator]
    path.write_bytes(broken)
    (tmp_path / "supervisor.db.before-0001").write_bytes(b"")
    with pytest.raises(StoreCorruptError) as caught:  # noqa: SIM117
        with open_store(tmp_path):
            pass
    assert str(path) in caught.value.message
    assert caught.value.data["backups"] == [str(tmp_path / "supervisor.db.before-0001")]
    assert path.read_bytes() == broken


@pytest.mark.parametrize("target", ["mysql://x/y", "sqlite://", "://"])
def test_other_databases_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="database_url"):
        parse_url(target)


def test_postgresql_urls_use_its_present_driver() -> None:
    assert parse_url("postgresql://u:p@h/d").drivername == "postgresql+psycopg"


# --- one daemon ----------------------------------------------------------------------------------------


def test_a_second_daemon_is_refused_naming_the_first(tmp_path: Path) -> None:
    first = StateLock(tmp_path)
    first.acquire(url="http://127.0.0.1:8420", started_at="today")
    with pytest.raises(ConflictError) as caught:
        StateLock(tmp_path).acquire()
    assert caught.value.reason == "StateFolderInUse"
    assert f"pid {os.getpid()}" in caught.value.message
    assert "started at today" in caught.value.message
    assert caught.value.hint.startswith("use that one: export DFLASHCTL_URL=http://127.0.0.1:8420; or")
    first.note(url="http://127.0.0.1:41000")
    with pytest.raises(ConflictError, match="41000"):
        StateLock(tmp_path).acquire()
    first.release()
    with StateLock(tmp_path):
        pass


def test_a_daemon_that_was_killed_blocks_nobody(tmp_path: Path) -> None:
    code = (
        "import sys, os, pathlib\n"
        "from supervisor.store.lock import StateLock\n"
        f"StateLock(pathlib.Path({str(tmp_path)!r})).acquire(url='gone')\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(ConflictError, match=f"pid {child.pid}"):
            StateLock(tmp_path).acquire()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    with StateLock(tmp_path):
        pass


# --- attempts and operations ---------------------------------------------------------------------------


def test_a_transition_and_its_event_are_one(store: Store) -> None:
    store.write_sync(lambda session: make_attempt(session, make_run(session), state="planned"))
    store.write_sync(lambda session: apply_transition(session, newest(session), AttemptState.PREFLIGHT))
    store.write_sync(
        lambda session: apply_transition(
            session,
            newest(session),
            AttemptState.LAUNCH_FAILED,
            reason=Reason.PREFLIGHT_FAILED,
            message="no disk",
        )
    )

    attempt = store.read_sync(newest)
    assert (attempt.state, attempt.reason, attempt.message) == ("launch_failed", "PreflightFailed", "no disk")
    assert attempt.ended_at == T0
    assert attempt.version == 3
    events = store.read_sync(lambda session: session.exec(select(Event)).all())
    assert [event.reason for event in events][-2:] == ["PreflightStarted", "LaunchFailed"]
    assert events[-1].attempt_id == attempt.id
    assert "no disk" in events[-1].message


def newest(session: Session) -> Attempt:
    run = session.exec(select(Run)).one()
    attempt = newest_attempt(session, run.id)
    assert attempt is not None
    return attempt


def test_an_unlisted_transition_changes_nothing(store: Store) -> None:
    store.write_sync(lambda session: make_attempt(session, make_run(session), state="planned"))
    before = len(store.read_sync(lambda session: session.exec(select(Event)).all()))
    with pytest.raises(InvalidTransitionError):
        store.write_sync(lambda session: apply_transition(session, newest(session), "ready"))
    assert store.read_sync(newest).state == "planned"
    assert len(store.read_sync(lambda session: session.exec(select(Event)).all())) == before


@pytest.mark.parametrize(
    "changes",
    [{"reason": "Other"}, {"state": "ready"}, {"exit_code": 3}, {"message": "x"}, {"stop": {"id": "s"}}],
)
def test_an_ended_row_refuses_changes_even_past_the_function(
    store: Store, changes: dict[str, object]
) -> None:
    store.write_sync(lambda session: make_attempt(session, make_run(session), state="failed"))

    def change(session: Session) -> None:
        attempt = newest(session)
        for name, value in changes.items():
            setattr(attempt, name, value)
        session.add(attempt)

    with pytest.raises(InvalidTransitionError, match="final"):
        store.write_sync(change)


def test_bookkeeping_of_an_ended_row_goes_on(store: Store) -> None:
    store.write_sync(lambda session: make_attempt(session, make_run(session), state="failed"))

    def change(session: Session) -> None:
        attempt = newest(session)
        attempt.acknowledged_at = T0
        attempt.gpu_clean_at = T0
        session.add(attempt)

    store.write_sync(change)
    assert store.read_sync(newest).gpu_clean_at == T0


def test_a_lost_attempt_takes_its_exit_record_once(store: Store) -> None:
    store.write_sync(lambda session: make_attempt(session, make_run(session), state="lost"))
    assert store.write_sync(lambda session: add_late_evidence(session, newest(session), {"code": 3}))
    assert not store.write_sync(lambda session: add_late_evidence(session, newest(session), {"code": 4}))
    attempt = store.read_sync(newest)
    assert (attempt.state, attempt.exit_code) == ("lost", 3)
    late = store.read_sync(
        lambda session: session.exec(select(Event).where(Event.reason == "LateEvidence")).all()
    )
    assert [event.data["stored"] for event in late] == [True, False]


def test_the_live_attempt_is_the_one_that_has_not_ended(store: Store) -> None:
    def build(session: Session) -> str:
        run = make_run(session)
        make_attempt(session, run, state="failed")
        return make_attempt(session, run, state="quarantined").id

    live = store.write_sync(build)
    found = store.read_sync(lambda session: live_attempt(session, session.exec(select(Run)).one().id))
    assert found is not None
    assert found.id == live


def test_attempt_numbers_are_unique_within_a_run(store: Store) -> None:
    def build(session: Session) -> None:
        run = make_run(session)
        make_attempt(session, run)
        make_attempt(session, run, id="other", number=1)

    with pytest.raises(StoreError, match="UNIQUE"):
        store.write_sync(build)


def test_an_operation_ends_exactly_once(store: Store) -> None:
    def build(session: Session) -> Operation:
        operation = create_operation(session, kind="start", actor="test", run=make_run(session))
        report_progress(session, operation, step="preflight", done=1, total=4)
        finish_operation(session, operation, status="failed", error=StoreError("it broke", hint="mend it"))
        return operation

    operation = store.write_sync(build)
    assert (operation.status, operation.error and operation.error["hint"]) == ("failed", "mend it")
    with pytest.raises(InvalidTransitionError, match="final"):
        store.write_sync(
            lambda session: finish_operation(session, session.get(Operation, operation.id), status="done")  # type: ignore[arg-type]
        )


def test_events_hold_no_secret_and_no_nan(store: Store) -> None:
    data = {"api_key": "sk-1", "deep": [{"password": "p"}], "tok_s": 3.0, "loss": float("nan")}
    event = store.write_sync(
        lambda session: record_event(session, actor="a", subject="s", reason="R", message="m", data=data)
    )
    assert event.data == {
        "api_key": "[redacted]",
        "deep": [{"password": "[redacted]"}],
        "tok_s": 3.0,
        "loss": None,
    }
