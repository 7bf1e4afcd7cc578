"""Secrets: encrypted at rest, listed by name only, by reference, rotated; and redaction everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from sqlmodel import Session, select

from supervisor.domain.environment import redact
from supervisor.domain.errors import ConfigError, NotFoundError, RequestError
from supervisor.services import secrets
from supervisor.services.secrets import SecretBox
from supervisor.store.attempts import apply_transition
from supervisor.store.events import record_event
from supervisor.store.operations import create_operation, finish_operation
from supervisor.store.tables import Event
from supervisor.store.writer import Store
from tests.support.domain_builders import make_attempt, make_run, open_store

CANARY = "canary-5b1f-value"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "state") as opened:
        yield opened


@pytest.fixture
def box(tmp_path: Path) -> SecretBox:
    return SecretBox(tmp_path / "keys" / "secrets.key")


def put(store: Store, box: SecretBox, name: str = "WANDB_API_KEY", **changes: Any) -> None:
    store.write_sync(lambda session: secrets.put_secret(session, box, name=name, actor="t", **changes))


def resolve(store: Store, box: SecretBox, *names: str, environment: dict[str, str] | None = None) -> Any:
    found = environment or {}
    return store.read_sync(
        lambda session: secrets.resolve_secrets(session, box, names, read_environment=found.get)
    )


def test_a_value_comes_back_and_is_nowhere_in_clear(store: Store, box: SecretBox, tmp_path: Path) -> None:
    put(store, box, value=CANARY)
    assert resolve(store, box, "WANDB_API_KEY") == {"WANDB_API_KEY": CANARY}
    shown = str(store.read_sync(secrets.list_secrets)) + str(
        store.read_sync(lambda s: s.exec(select(Event)).all())
    )
    assert "WANDB_API_KEY" in shown
    assert CANARY not in shown
    store.close()
    assert not any(CANARY.encode() in path.read_bytes() for path in (tmp_path / "state").iterdir())


def test_the_key_file_is_ours_alone_and_refused_when_it_is_not(box: SecretBox, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "secrets.key"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="read by others"):
        SecretBox(path)


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b"not a key\n", "no Fernet key")])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        SecretBox(path)


def test_keys_rotate_and_a_lost_key_is_told(store: Store, box: SecretBox, tmp_path: Path) -> None:
    put(store, box, value=CANARY)
    path = tmp_path / "keys" / "secrets.key"
    old = path.read_bytes()
    path.write_bytes(Fernet.generate_key() + b"\n" + old)
    both = SecretBox(path)
    assert store.write_sync(lambda session: secrets.rotate_secrets(session, both)) == 1
    path.write_bytes(path.read_bytes().split()[0])
    assert resolve(store, SecretBox(path), "WANDB_API_KEY") == {"WANDB_API_KEY": CANARY}
    path.write_bytes(old)
    with pytest.raises(ConfigError, match="cannot be decrypted"):
        resolve(store, SecretBox(path), "WANDB_API_KEY")


def test_references_are_read_when_they_are_needed(store: Store, box: SecretBox, tmp_path: Path) -> None:
    file = tmp_path / "key"
    put(store, box, "A", reference="env:HERE")
    put(store, box, "B", reference=f"file:{file}")
    with pytest.raises(ConfigError, match="HERE is not set"):
        resolve(store, box, "A")
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(store, box, "B")
    file.write_text(CANARY + "\n")
    assert resolve(store, box, "A", "B", environment={"HERE": "x"}) == {"A": "x", "B": CANARY}
    file.write_bytes(b"x" * 70_000)
    with pytest.raises(ConfigError, match="larger than"):
        resolve(store, box, "B")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lower", {"value": "x"}),
        ("PATH", {"value": "x"}),
        ("LD_PRELOAD", {"value": "x"}),
        ("A", {"value": ""}),
        ("A", {"value": "a\0b"}),
        ("A", {}),
        ("A", {"value": "x", "reference": "env:B"}),
        ("A", {"reference": "https://x"}),
        ("A", {"reference": "file:relative"}),
        ("A", {"reference": "env:"}),
    ],
)
def test_what_cannot_be_a_secret_is_refused_without_its_value(
    store: Store, box: SecretBox, name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        put(store, box, name, **changes)
    assert caught.value.reason == "BadSecret"


def test_a_missing_secret_says_how_to_store_it(store: Store, box: SecretBox) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve(store, box, "NOT_THERE")
    assert caught.value.hint == "store it with `dflashctl secret set NOT_THERE`"
    put(store, box, "A", value="x")
    store.write_sync(lambda session: secrets.delete_secret(session, "A", actor="t"))
    with pytest.raises(NotFoundError):
        store.write_sync(lambda session: secrets.delete_secret(session, "A", actor="t"))


def test_redaction_by_key_at_any_depth_and_by_value_in_any_text() -> None:
    data = {"a": [{"Authorization": "Bearer x"}], "line": f"key={CANARY}!", "tok_s": 3, "secrets": ["NAME"]}
    assert redact(data, secrets=[CANARY, "abc"]) == {
        "a": [{"Authorization": "[redacted]"}],
        "line": "key=[redacted]!",
        "tok_s": 3,
        "secrets": ["NAME"],
    }
    assert redact("abc", secrets=["abc"]) == "abc", "short values would blank unrelated text"


def test_a_program_that_prints_its_own_key_does_not_bring_it_into_the_database(
    store: Store, box: SecretBox, tmp_path: Path
) -> None:
    put(store, box, value=CANARY)

    def live(session: Session) -> None:
        run = make_run(session)
        attempt = make_attempt(session, run, state="started", last_status={"message": f"using {CANARY}"})
        attempt.exit_record = {"last_lines": [f"login with {CANARY} failed"]}
        apply_transition(
            session, attempt, "failed", reason="ExitedNonZero", message=f"said {CANARY}", data={"x": [CANARY]}
        )
        operation = create_operation(session, kind="start", actor="t", run=run, params={"reason": CANARY})
        finish_operation(session, operation, status="failed", error={"reason": "R", "message": CANARY})

    store.write_sync(live)
    store.close()
    assert not any(CANARY.encode() in path.read_bytes() for path in (tmp_path / "state").iterdir())


def test_a_new_daemon_learns_the_values_at_start(store: Store, box: SecretBox, tmp_path: Path) -> None:
    put(store, box, value=CANARY)
    put(store, box, "B", reference="env:NOT_SET")
    with open_store(tmp_path / "state") as fresh:
        unreadable = fresh.read_sync(
            lambda session: secrets.remember_secrets(session, box, read_environment={}.get)
        )
        event = fresh.write_sync(
            lambda session: record_event(session, actor="a", subject="s", reason="R", message=f"got {CANARY}")
        )
    assert unreadable == ["B"]
    assert event.message == "got [redacted]"
