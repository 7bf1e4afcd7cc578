"""Start, stop and restart from many threads at once: serialised, each with one answer and one end."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from sqlmodel import Session, select

from supervisor.domain.errors import ConflictError
from supervisor.services import runs
from supervisor.store.attempts import apply_transition
from supervisor.store.queries import live_attempt
from supervisor.store.tables import Attempt, Event, Operation
from supervisor.store.writer import Store
from tests.support.domain_builders import make_attempt, make_run, open_store

ENDS = {"done": "OperationDone", "failed": "OperationFailed", "superseded": "OperationSuperseded"}


def pretend_to_reconcile(session: Session) -> None:
    """Move the run one step towards what is wanted."""
    run = runs.get_run(session, "slammed")
    live = live_attempt(session, run.id)
    if live is None and run.desired == "running":
        make_attempt(session, run, state="ready")
    elif live is not None and (run.desired == "stopped" or live.intent < run.intent):
        if live.state == "ready":
            apply_transition(session, live, "stopping")
        else:
            apply_transition(session, live, "stopped")


def act(store: Store, chance: random.Random, answers: list[object]) -> None:
    requests = [runs.request_start, runs.request_stop, runs.request_restart]
    for _ in range(12):
        if chance.random() < 0.4:
            store.write_sync(pretend_to_reconcile)
            continue
        request = chance.choice(requests)
        try:
            answer: object = store.write_sync(
                lambda session, request=request: request(session, runs.get_run(session, "slammed"), actor="t")
            )
        except ConflictError as error:
            answer = error.reason
        answers.append(answer)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_order_each_request_has_one_answer_and_one_end(tmp_path: Path, seed: int) -> None:
    answers: list[object] = []
    with open_store(tmp_path) as store:
        store.write_sync(make_run)
        threads = [
            threading.Thread(target=act, args=(store, random.Random(seed * 100 + n), answers))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        operations = store.read_sync(lambda session: session.exec(select(Operation)).all())
        events = store.read_sync(lambda session: session.exec(select(Event)).all())
        attempts = store.read_sync(lambda session: session.exec(select(Attempt)).all())

    assert {answer for answer in answers if isinstance(answer, str)} <= {"AlreadyRunning"}
    given = {answer.id for answer in answers if isinstance(answer, Operation)}
    assert given == {operation.id for operation in operations}
    assert sum(operation.status == "pending" for operation in operations) <= 1
    for operation in operations:
        ends = [
            event.reason
            for event in events
            if event.operation_id == operation.id and event.reason in ENDS.values()
        ]
        assert ends == ([] if operation.status == "pending" else [ENDS[operation.status]])
    assert sum(attempt.state in ("ready", "stopping") for attempt in attempts) <= 1
    assert [event.id for event in events] == sorted(event.id or 0 for event in events)
