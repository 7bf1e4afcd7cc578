"""A real server in a thread, its store emptied for each test, and the environment of an admin."""

from __future__ import annotations

import pytest
from sqlmodel import select

from supervisor.store.tables import Node, Run
from tests.support.api_app import (
    build_api,
    live_server,
    seed_node,
    seed_run,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    api = build_api(tmp_path_factory.mktemp("cli") / "state")
    with live_server(api) as live:
        yield live
    api.state.store.close()


@pytest.fixture
def live(server, tmp_path, monkeypatch):
    """The server with an empty store and the environment of an admin."""
    token_file = tmp_path / "token"
    token_file.write_text(server.api.tokens["admin"] + "\n")
    monkeypatch.setenv("DFLASHCTL_URL", server.url)
    monkeypatch.setenv("DFLASHCTL_TOKEN_FILE", str(token_file))

    def empty(session):
        for table in (Run, Node):
            for row in session.exec(select(table)).all():
                session.delete(row)
            session.flush()

    server.api.state.store.write_sync(empty)
    server.api.state.logs.is_unreachable = False
    return server


@pytest.fixture
def node(live):
    return seed_node(live.api.state)


@pytest.fixture
def run(live, node):
    return seed_run(live.api.state)
