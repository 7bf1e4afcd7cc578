"""Adding a node over SSH: its host key is shown, compared, pinned, and a wrong one is refused.

A real sshd answers; the daemon asks it for its key without logging in.
"""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.support.api_app import build_api

pytestmark = pytest.mark.sshd


@pytest.fixture
def client(tmp_path):
    api = build_api(tmp_path / "state")
    headers = {"Authorization": f"Bearer {api.tokens['admin']}"}
    with TestClient(api.app, base_url="http://127.0.0.1:8420", headers=headers) as client:
        yield client
    api.state.store.close()


def body_of(host, **more):
    return {
        "name": "far",
        "transport": "ssh",
        "host": "127.0.0.1",
        "port": host.port,
        "identity_file": str(host.folder / "client_key"),
        **more,
    }


def test_the_key_is_shown_first_and_pinned_when_confirmed(client, ssh_host):
    plan = client.post("/v1/nodes", params={"dry_run": True}, json=body_of(ssh_host)).json()
    unconfirmed = client.post("/v1/nodes", json=body_of(ssh_host))
    fingerprint = plan["host_key"]["fingerprint"]
    added = client.post("/v1/nodes", json=body_of(ssh_host, host_key_fingerprint=fingerprint))

    assert plan["host_key"]["algorithm"] == "ssh-ed25519"
    assert fingerprint.startswith("SHA256:")
    assert (unconfirmed.status_code, unconfirmed.json()["reason"]) == (422, "HostKeyUnconfirmed")
    assert unconfirmed.json()["data"]["seen"] == fingerprint
    assert (added.status_code, added.json()["host_key_fingerprint"]) == (201, fingerprint)


def test_another_key_than_the_confirmed_one_is_refused(client, ssh_host):
    wrong = "SHA256:" + "A" * 43

    response = client.post("/v1/nodes", json=body_of(ssh_host, host_key_fingerprint=wrong))

    assert (response.status_code, response.json()["reason"]) == (409, "HostKeyMismatch")
    assert response.json()["data"]["expected"] == wrong
    assert client.get("/v1/nodes").json()["items"] == []


def test_a_new_address_needs_its_key_confirmed_again(client, ssh_host):
    fingerprint = client.post("/v1/nodes", params={"dry_run": True}, json=body_of(ssh_host)).json()[
        "host_key"
    ]["fingerprint"]
    etag = client.post("/v1/nodes", json=body_of(ssh_host, host_key_fingerprint=fingerprint)).headers["ETag"]
    headers = {"If-Match": etag}
    moved = {"port": ssh_host.direct_port}

    refused = client.patch("/v1/nodes/far", json=moved, headers=headers)
    changed = client.patch(
        "/v1/nodes/far", json=moved | {"host_key_fingerprint": fingerprint}, headers=headers
    )
    other = client.patch(
        "/v1/nodes/far", json={"user": "someone"}, headers={"If-Match": changed.headers["ETag"]}
    )

    assert (refused.status_code, refused.json()["reason"]) == (422, "HostKeyUnconfirmed")
    assert changed.json()["port"] == ssh_host.direct_port
    assert other.json()["user"] == "someone"
