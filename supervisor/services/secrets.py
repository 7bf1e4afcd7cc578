"""Secrets: encrypted at rest with a key outside the database, or kept by reference; never listed by value.

The API stores and removes them, the reconciler's composition asks for the values when a run starts. A value
leaves this module only through `resolve_secrets`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlmodel import Session, col, select

from supervisor.domain.environment import check_env_value, check_secret_name
from supervisor.domain.errors import ConfigError, NotFoundError, RequestError
from supervisor.store.events import hide, now_of, record_event
from supervisor.store.tables import Secret

MAX_FILE_BYTES = 65_536


class SecretBox:
    """Encrypts with the first key of the key file, decrypts with any; a new first key rotates."""

    def __init__(self, key_file: Path) -> None:
        self._file = key_file
        self._fernet = MultiFernet(_load_keys(key_file))

    def seal(self, value: str) -> str:
        """Ciphertext of a value."""
        return self._fernet.encrypt(value.encode()).decode()

    def unseal(self, name: str, ciphertext: str) -> str:
        """Value of a ciphertext; ConfigError when no key fits."""
        try:
            return self._fernet.decrypt(ciphertext.encode()).decode()
        except InvalidToken as error:
            raise ConfigError(
                f"secret {name} cannot be decrypted with the keys in {self._file}",
                hint="put the former key back as a further line, or set the secret again",
                field=name,
            ) from error

    def reseal(self, ciphertext: str) -> str:
        """Encrypt anew with the first key."""
        return self._fernet.rotate(ciphertext.encode()).decode()


def put_secret(
    session: Session,
    box: SecretBox,
    *,
    name: str,
    actor: str,
    value: str | None = None,
    reference: str | None = None,
) -> Secret:
    """Store a value or a reference under a name, replacing what was there.

    Raises:
        RequestError: bad name, empty value, both or neither, or a reference of an unknown kind.
    """
    _check(name, value, reference)
    if value is not None:
        hide(session, [value])
    now = now_of(session)
    row = session.get(Secret, name)
    is_new = row is None
    if row is None:
        row = Secret(name=name, created_at=now, updated_at=now, version=0)
    row.ciphertext = box.seal(value) if value is not None else None
    row.reference = reference
    row.version += 1
    row.updated_at = now
    session.add(row)
    record_event(
        session,
        actor=actor,
        subject=f"secret/{name}",
        reason="SecretSet",
        message="stored" if is_new else "replaced",
        data={"kind": "value" if reference is None else reference.split(":", 1)[0]},
    )
    return row


def delete_secret(session: Session, name: str, *, actor: str) -> None:
    """Remove; NotFoundError when there is none."""
    row = session.get(Secret, name)
    if row is None:
        raise _missing(name)
    session.delete(row)
    record_event(session, actor=actor, subject=f"secret/{name}", reason="SecretDeleted", message="removed")


def list_secrets(session: Session) -> list[dict[str, Any]]:
    """Names, kinds and ages; no values."""
    return [
        {
            "name": row.name,
            "kind": "value" if row.reference is None else "reference",
            "reference": row.reference,
            "version": row.version,
            "created_at": row.created_at.isoformat(),
            "updated_at": row.updated_at.isoformat(),
        }
        for row in session.exec(select(Secret).order_by(col(Secret.name))).all()
    ]


def resolve_secrets(
    session: Session,
    box: SecretBox,
    names: Sequence[str],
    *,
    read_environment: Callable[[str], str | None],
) -> dict[str, str]:
    """Values for the names that a run's spec lists.

    Raises:
        NotFoundError: a name is not set.
        ConfigError: a reference cannot be read, or no key fits.
    """
    values = {}
    for name in names:
        row = session.get(Secret, name)
        if row is None:
            raise _missing(name)
        if row.reference is not None:
            values[name] = _read_reference(name, row.reference, read_environment)
        elif row.ciphertext is not None:
            values[name] = box.unseal(name, row.ciphertext)
    hide(session, values.values())
    return values


def remember_secrets(
    session: Session, box: SecretBox, *, read_environment: Callable[[str], str | None]
) -> list[str]:
    """At start: learn all values, so that what repeats one is blanked; returns names that cannot be read."""
    unreadable = []
    for name in session.exec(select(Secret.name).order_by(col(Secret.name))).all():
        try:
            resolve_secrets(session, box, [name], read_environment=read_environment)
        except ConfigError:
            unreadable.append(name)
    return unreadable


def rotate_secrets(session: Session, box: SecretBox) -> int:
    """Encrypt every value anew with the first key; returns how many."""
    rows = session.exec(select(Secret).where(col(Secret.ciphertext).is_not(None))).all()
    for row in rows:
        assert row.ciphertext is not None
        row.ciphertext = box.reseal(row.ciphertext)
        session.add(row)
    return len(rows)


def _check(name: str, value: str | None, reference: str | None) -> None:
    try:
        check_secret_name(name)
        if value is not None:
            check_env_value(value)
    except ValueError as error:
        raise RequestError(f"secret {name!r}: {error}", reason="BadSecret") from error
    if (value is None) == (reference is None):
        raise RequestError(f"secret {name} needs either a value or a reference", reason="BadSecret")
    if value == "":
        raise RequestError(f"secret {name} is empty", reason="BadSecret")
    if reference is not None and not _is_reference(reference):
        raise RequestError(
            f"secret {name}: a reference is env:NAME or file:/absolute/path: {reference!r}",
            reason="BadSecret",
        )


def _is_reference(reference: str) -> bool:
    kind, _, rest = reference.partition(":")
    return bool(rest) and "\0" not in rest and (kind == "env" or (kind == "file" and rest.startswith("/")))


def _read_reference(name: str, reference: str, read_environment: Callable[[str], str | None]) -> str:
    kind, _, rest = reference.partition(":")
    if kind == "env":
        value = read_environment(rest)
        if not value:
            raise ConfigError(
                f"secret {name}: variable {rest} is not set in the daemon's environment", field=name
            )
        return value
    try:
        with Path(rest).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"secret {name}: file {rest} is larger than {MAX_FILE_BYTES} bytes", field=name)
        return data.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret {name}: file {rest} cannot be read: {error}", field=name) from error


def _load_keys(key_file: Path) -> list[Fernet]:
    """Read the keys, one a line; create the file, 0600, when there is none."""
    key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(descriptor, "wb") as file:
            file.write(Fernet.generate_key() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    mode = key_file.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"key file can be read by others: {key_file} has mode {mode:o}",
            hint=f"chmod 600 {key_file}",
            field="master_key_file",
        )
    try:
        keys = [Fernet(line) for line in key_file.read_bytes().split()]
    except ValueError as error:
        raise ConfigError(f"key file holds no Fernet key: {key_file}", field="master_key_file") from error
    if not keys:
        raise ConfigError(f"key file is empty: {key_file}", field="master_key_file")
    return keys


def _missing(name: str) -> NotFoundError:
    return NotFoundError(
        f"no secret is called {name}",
        hint=f"store it with `dflashctl secret set {name}`",
        kind="secret",
        name=name,
    )
