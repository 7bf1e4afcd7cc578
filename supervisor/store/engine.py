"""Engines for SQLite (pragmas, explicit transactions) and PostgreSQL, and where the database file lies.

Called by `writer.Store` and `migrate.py` only. SQLite's driver opens no transaction for a SELECT by itself,
which loses updates without an error; so its own handling is switched off and every transaction is begun here.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import QueuePool

from supervisor.domain.errors import (
    ConfigError,
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)

READERS = 4


def parse_url(target: str | Path) -> URL:
    """Turn a path or a database URL into a URL.

    Raises:
        ConfigError: neither, or a database other than SQLite and PostgreSQL.
    """
    text = str(target)
    if "://" not in text:
        return URL.create("sqlite", database=str(Path(text).absolute()))
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ConfigError("database_url is no database URL", field="database_url") from error
    backend = url.get_backend_name()
    if backend == "sqlite" and not url.database:
        raise ConfigError("database_url names no file", field="database_url", value=text)
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ConfigError(
            f"database_url: only sqlite and postgresql are known: {backend}", field="database_url"
        )
    return url


def database_path(url: URL) -> Path | None:
    """File of a SQLite database; None for a server."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def create_file(path: Path) -> None:
    """Make sure that folder and file exist and belong to us alone; the journal files inherit the mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def build_write_engine(url: URL, *, busy_timeout_s: float, foreign_keys: bool = True) -> sa.Engine:
    """The one connection that writes and checkpoints."""
    if database_path(url) is None:
        return sa.create_engine(url, pool_size=1, max_overflow=0, pool_pre_ping=True)
    engine = sa.create_engine(
        url,
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        connect_args={"check_same_thread": False, "timeout": busy_timeout_s},
    )
    _prepare(engine, busy_timeout_s=busy_timeout_s, begin="BEGIN IMMEDIATE", foreign_keys=foreign_keys)
    return engine


def build_read_engine(url: URL, *, busy_timeout_s: float) -> sa.Engine:
    """Connections that cannot write."""
    path = database_path(url)
    if path is None:
        return sa.create_engine(url, pool_size=READERS, max_overflow=0, pool_pre_ping=True)
    location = f"file:{quote(str(path))}?mode=ro"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(location, uri=True, check_same_thread=False, timeout=busy_timeout_s)

    engine = sa.create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=READERS, max_overflow=0
    )
    _prepare(engine, busy_timeout_s=busy_timeout_s, begin="BEGIN", foreign_keys=True)
    return engine


def translate_error(error: DBAPIError, *, path: Path | None, busy_timeout_s: float) -> StoreError:
    """The one door for the driver's errors."""
    text = str(error.orig).lower()
    place = f" in {path.parent}" if path else ""
    if "locked" in text or "busy" in text:
        return StoreBusyError(
            f"database is locked by another process, gave up after {busy_timeout_s:g} s",
            hint="find the other process with `fuser` on the database file, then try again",
            waited_s=busy_timeout_s,
        )
    if "disk is full" in text or "disk i/o error" in text or "no space" in text:
        return StoreFullError(
            f"no room left for the database{place}: {error.orig}", hint="free disk space, then try again"
        )
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return corrupt_error(path, str(error.orig))
    return StoreError(f"database error: {error.orig}")


def corrupt_error(path: Path | None, detail: str) -> StoreCorruptError:
    """Say plainly that the file is damaged, that it is kept, and what to restore from."""
    backups = (
        sorted((str(found) for found in path.parent.glob(f"{path.name}.before-*")), reverse=True)
        if path
        else []
    )
    way_out = f"newest backup is {backups[0]}" if backups else "there is no backup beside it"
    return StoreCorruptError(
        f"database is damaged: {path}: {detail}; the file was left as it is and {way_out}",
        hint="move the file away and copy a backup in its place, or start empty: nodes keep their attempts",
        path=str(path),
        backups=backups,
    )


def _prepare(engine: sa.Engine, *, busy_timeout_s: float, begin: str, foreign_keys: bool) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        if begin != "BEGIN":
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)
