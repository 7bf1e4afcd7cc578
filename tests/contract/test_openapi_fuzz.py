"""Requests made up from the OpenAPI document: no answer is a 500, every answer fits its description.

Bounded and derandomized. The streams are left out because they do not end by themselves, the log-in because
it is limited to five a minute.
"""

from __future__ import annotations

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from supervisor.api import hostkeys, install
from supervisor.transport.ssh import fingerprint, parse_host_key
from tests.support.api_app import build_api, live_server, seed_attempt, seed_node, seed_run

EXAMPLES = 10
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINOJrKiSobsTwi3m47VcEaeK+ATUVbH8/lUUVpxXj6U0"
LEFT_OUT = ("GET /v1/telemetry/stream", "POST /v1/session", "DELETE /v1/session")


def operations():
    """Operations by name, from the routes alone: no daemon is needed to describe them."""
    app = FastAPI(title="dflash-supervisor", version="0")
    install(app)
    schema = schemathesis.openapi.from_dict(app.openapi())
    found = {result.ok().label: result.ok() for result in schema.get_all_operations()}
    return {label: operation for label, operation in found.items() if label not in LEFT_OUT}


OPERATIONS = operations()


async def show_key(host, port):
    """Hosts that are made up are not asked: what a resolver says of them is a matter of place."""
    return HOST_KEY, fingerprint(parse_host_key(HOST_KEY))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    api = build_api(tmp_path_factory.mktemp("fuzz") / "state")
    # Named like what the fuzzer likes to try, so that some requests find something.
    seed_node(api.state, "0")
    seed_attempt(api.state, seed_run(api.state, "0", node="0"), log=b"line\n")
    with pytest.MonkeyPatch.context() as patch, live_server(api) as live:
        patch.setattr(hostkeys, "scan_host_key", show_key)
        yield live
    api.state.store.close()


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_breaks_the_interface(served, label):
    headers = {"Authorization": f"Bearer {served.api.tokens['admin']}"}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy())
    def check(case):
        case.call_and_validate(
            base_url=served.url,
            headers=headers,
            timeout=120,
            checks=[not_a_server_error, content_type_conformance, response_schema_conformance],
        )

    check()
