"""Nodes as services: what is refused, what is remembered, requests that become operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session, select

from supervisor.domain.errors import ConflictError, NotFoundError, RequestError
from supervisor.services import nodes, views
from supervisor.services.operations import finish_operation
from supervisor.store.tables import Event, Node, Operation
from supervisor.store.writer import Store
from tests.support.domain_builders import make_attempt, make_run, open_store

PROXMOX: dict[str, Any] = {
    "name": "ct200",
    "transport": "proxmox",
    "host": "10.0.0.6",
    "user": "root",
    "vmid": 200,
    "host_key_fingerprint": "SHA256:abc",
    "log_dir": "/workspace",
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


def add(store: Store, **changes: Any) -> Node:
    fields = {**PROXMOX, **changes}
    return store.write_sync(lambda session: nodes.add_node(session, actor="t", **fields))


def test_defaults_are_those_of_the_guide(store: Store) -> None:
    node = add(store, log_dir=None)
    assert (node.root, node.log_dir, node.port) == ("/srv/dflash", "/srv/dflash/logs", 22)
    local = add(
        store, name="here", transport="local", host=None, user=None, vmid=None, host_key_fingerprint=None
    )
    assert local.user is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "Big"}, "name"),
        ({"name": "-rf"}, "name"),
        ({"transport": "docker"}, "transport"),
        ({"host": None}, "host"),
        ({"host": "-oProxyCommand=x"}, "host"),
        ({"host": "a;b"}, "host"),
        ({"port": 0}, "port"),
        ({"user": "a b"}, "user"),
        ({"vmid": None}, "vmid"),
        ({"vmid": 5}, "vmid"),
        ({"transport": "ssh"}, "vmid"),
        ({"root": "srv"}, "root"),
        ({"root": "/"}, "root"),
        ({"root": "/srv/.."}, "root"),
        ({"log_dir": "/a\nb"}, "log_dir"),
        ({"python": "python3"}, "python"),
        ({"identity_file": "id"}, "identity_file"),
        ({"find_links": "--index-url=x"}, "find_links"),
        ({"host_key_fingerprint": None}, "host_key_fingerprint"),
    ],
)
def test_a_setting_that_cannot_work_is_named(store: Store, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        add(store, **changes)
    assert caught.value.data["field"] == field
    assert store.read_sync(nodes.list_nodes) == []


def test_an_unconfirmed_host_key_says_what_to_do(store: Store) -> None:
    with pytest.raises(RequestError) as caught:
        add(store, host_key_fingerprint=None)
    assert caught.value.reason == "HostKeyNotConfirmed"
    assert caught.value.hint
    assert "fingerprint" in caught.value.hint


def test_a_name_is_taken_once(store: Store) -> None:
    add(store)
    with pytest.raises(ConflictError, match="exists already"):
        add(store)


def update(store: Store, changes: dict[str, Any], **options: Any) -> Node:
    return store.write_sync(
        lambda session: nodes.update_node(
            session, nodes.get_node(session, "ct200"), changes, actor="t", **options
        )
    )


def test_a_change_bumps_the_version_and_tells_what(store: Store) -> None:
    add(store)
    node = update(store, {"python": "/usr/bin/python3", "port": 22}, expected_version=1)
    assert (node.version, node.python) == (2, "/usr/bin/python3")
    event = store.read_sync(lambda session: session.exec(select(Event)).all())[-1]
    assert (event.reason, event.data) == ("NodeChanged", {"python": "/usr/bin/python3"})
    with pytest.raises(ConflictError) as caught:
        update(store, {"port": 23}, expected_version=1)
    assert caught.value.reason == "StaleVersion"
    with pytest.raises(RequestError, match="cannot be changed"):
        update(store, {"name": "other"})
    with pytest.raises(RequestError, match="port"):
        update(store, {"port": 99_999})
    assert store.read_sync(lambda session: nodes.get_node(session, "ct200").port) == 22


def test_where_a_live_attempt_runs_stays_as_it_is(store: Store) -> None:
    add(store)
    store.write_sync(lambda session: make_attempt(session, make_run(session, node="ct200")))
    with pytest.raises(ConflictError, match="while an attempt is live"):
        update(store, {"root": "/elsewhere"})
    assert update(store, {"python": "/usr/bin/python3"}).python


def test_a_node_with_runs_is_not_removed(store: Store) -> None:
    add(store)

    def remove(session: Session) -> None:
        nodes.delete_node(session, nodes.get_node(session, "ct200"), actor="t")

    store.write_sync(lambda session: make_run(session, node="ct200"))
    with pytest.raises(ConflictError, match="slammed"):
        store.write_sync(remove)
    store.write_sync(lambda session: session.delete(make_run(session, node="ct200")))
    store.write_sync(remove)
    with pytest.raises(NotFoundError):
        store.read_sync(lambda session: nodes.get_node(session, "ct200"))


def request(store: Store, function: Any, **arguments: Any) -> Operation:
    return store.write_sync(
        lambda session: function(session, nodes.get_node(session, "ct200"), actor="t", **arguments)
    )


def test_a_check_that_waits_is_given_again(store: Store) -> None:
    add(store)
    first = request(store, nodes.request_check)
    assert request(store, nodes.request_check).id == first.id
    store.write_sync(
        lambda session: finish_operation(session, session.get(Operation, first.id), status="done")  # type: ignore[arg-type]
    )
    assert request(store, nodes.request_check).id != first.id


def test_one_deploy_at_a_time(store: Store) -> None:
    add(store)
    operation = request(store, nodes.request_deploy)
    assert operation.params == {"source": "bundled", "lock": "bundled", "python": None}
    with pytest.raises(ConflictError) as caught:
        request(store, nodes.request_deploy)
    assert (caught.value.reason, caught.value.data["operation"]) == ("DeployRunning", operation.id)


@pytest.mark.parametrize(
    "arguments", [{"source": ""}, {"lock": "a\0"}, {"python": "python3"}, {"lock": "x", "python": "/x"}]
)
def test_a_deploy_of_nonsense_is_refused(store: Store, arguments: dict[str, Any]) -> None:
    add(store)
    with pytest.raises(RequestError):
        request(store, nodes.request_deploy, **arguments)


def test_a_deploy_plan_names_the_runs_that_it_touches(store: Store) -> None:
    add(store)
    store.write_sync(lambda session: make_attempt(session, make_run(session, node="ct200")))
    plan = store.read_sync(lambda session: nodes.plan_deploy(session, nodes.get_node(session, "ct200")))
    assert [item["run"] for item in plan["affected_runs"]] == ["slammed"]
    assert [step["action"] for step in plan["steps"]] == ["check", "release", "environment", "switch"]


def test_a_view_shows_the_check_and_no_key(store: Store) -> None:
    add(store, host_key="ssh-ed25519 AAAA")
    view = store.read_sync(lambda session: views.node_view(session, nodes.get_node(session, "ct200")))
    assert (view["check_status"], view["runs"], view["deployment"]) == ("unknown", [], None)
    assert "host_key" not in view
    assert views.check_status([{"status": "ok"}, {"status": "warn"}]) == "warn"
    assert views.check_status([{"status": "warn"}, {"status": "fail"}]) == "fail"
