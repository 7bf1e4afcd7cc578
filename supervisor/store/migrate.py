"""Brings the database to this version's schema: backup first, one transaction, newer schemas refused.

Called by `Store.migrate` at start, before anything else opens the database. Runs on a connection of its own
with foreign keys off, because rebuilding a table with them on deletes its children without a word.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

import supervisor
from supervisor.domain.errors import SchemaTooNewError, StoreError
from supervisor.store.engine import (
    build_write_engine,
    corrupt_error,
    create_file,
    database_path,
    translate_error,
)

KEPT_BACKUPS = 5


def migrations_folder() -> Path:
    """The scripts: inside the installed package, or at the top of the source tree."""
    package = Path(supervisor.__file__).parent
    packed = package / "_migrations"
    return packed if packed.is_dir() else package.parent / "migrations"


def migrate(url: URL, *, busy_timeout_s: float, folder: Path | None = None) -> str | None:
    """Upgrade to the newest schema.

    Returns:
        Path of the backup that was made; None when nothing had to be upgraded or there was nothing to keep.

    Raises:
        SchemaTooNewError: written by a newer version; nothing was touched.
        StoreCorruptError: not an intact database; the file is kept.
        StoreError: a migration failed; the database is as it was.
    """
    path = database_path(url)
    if path is not None:
        create_file(path)
    engine = build_write_engine(url, busy_timeout_s=busy_timeout_s, foreign_keys=False)
    try:
        return _upgrade(engine, path, _config(folder or migrations_folder()))
    except DBAPIError as error:
        raise translate_error(error, path=path, busy_timeout_s=busy_timeout_s) from error
    finally:
        engine.dispose()


def _config(folder: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def _upgrade(engine: sa.Engine, path: Path | None, config: Config) -> str | None:
    script = ScriptDirectory.from_config(config)
    head = script.get_current_head()
    with engine.connect() as connection:
        if path is not None:
            _check_intact(connection, path)
        current = MigrationContext.configure(connection).get_current_revision()
        connection.rollback()
    known = {revision.revision for revision in script.walk_revisions()}
    if current is not None and current not in known:
        raise SchemaTooNewError(
            f"database schema {current} is newer than this version knows, its newest is {head}",
            hint="start the newer version again, or restore the backup that was made before its migration",
            found=current,
            known=head,
        )
    if current == head:
        return None
    backup = _back_up(path, head or "none") if path is not None and current is not None else None
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        if path is not None:
            _check_references(connection)
    return backup


def _check_intact(connection: sa.Connection, path: Path) -> None:
    result = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if result != "ok":
        raise corrupt_error(path, str(result))


def _check_references(connection: sa.Connection) -> None:
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        raise StoreError(
            f"migration would break {len(broken)} references, first in {broken[0][0]}; nothing was changed",
            reason="MigrationFailed",
            broken=len(broken),
        )


def _back_up(path: Path, head: str) -> str:
    """Copy by SQLite's own backup, under a temporary name first; older backups beyond the limit go."""
    target = path.with_name(f"{path.name}.before-{head}")
    temporary = path.with_name(f"{path.name}.backup.tmp")
    temporary.unlink(missing_ok=True)
    create_file(temporary)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(temporary)) as copy:
        source.backup(copy)
    temporary.replace(target)
    backups = sorted(path.parent.glob(f"{path.name}.before-*"), key=lambda found: found.stat().st_mtime_ns)
    for old in backups[:-KEPT_BACKUPS]:
        old.unlink()
    return str(target)
