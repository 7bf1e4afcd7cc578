"""Migrations: models agree, backup first, failure leaves nothing, children survive, newer is refused."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlmodel import SQLModel, select

from supervisor.domain.errors import SchemaTooNewError, StoreError
from supervisor.store.migrate import migrations_folder
from supervisor.store.tables import Event, Node
from supervisor.store.writer import Store
from tests.support.domain_builders import FakeClock, make_attempt, make_run, open_store

REBUILD = """
import sqlalchemy as sa
from alembic import op
revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

def upgrade():
    with op.batch_alter_table("node", recreate="always") as batch:
        batch.add_column(sa.Column("extra", sa.String(), nullable=True))
{more}

def downgrade():
    pass
"""


def scripts(tmp_path: Path, more: str = "") -> Path:
    folder = tmp_path / "migrations"
    shutil.copytree(migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "0002_next.py").write_text(REBUILD.format(more=more))
    return folder


def filled(tmp_path: Path) -> Path:
    with open_store(tmp_path) as store:
        store.write_sync(lambda session: make_attempt(session, make_run(session)))
    return tmp_path / "supervisor.db"


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def revision(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def test_models_and_migrations_agree(tmp_path: Path) -> None:
    path = filled(tmp_path)
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "render_as_batch": True})
        assert compare_metadata(context, SQLModel.metadata) == []
    engine.dispose()


def test_the_tables_are_ones_that_postgresql_can_make() -> None:
    dialect = postgresql.dialect()
    for table in SQLModel.metadata.sorted_tables:
        assert str(CreateTable(table).compile(dialect=dialect))
        for index in table.indexes:
            assert str(CreateIndex(index).compile(dialect=dialect))


def test_released_scripts_use_plain_types_only() -> None:
    for script in (migrations_folder() / "versions").glob("*.py"):
        assert "sqlmodel" not in script.read_text()


def test_every_constraint_has_a_name_that_a_later_migration_can_use() -> None:
    for table in SQLModel.metadata.tables.values():
        assert all(constraint.name for constraint in table.constraints)


def test_migrating_twice_changes_nothing_and_backs_up_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with open_store(tmp_path) as store:
        assert store.migrate() is None
    assert list(tmp_path.glob("*.before-*")) == []
    assert rows(path, "run") == 1


def test_a_rebuilt_parent_keeps_its_children_and_a_backup_is_made_first(tmp_path: Path) -> None:
    path = filled(tmp_path)
    store = Store(path, clock=FakeClock())
    backup = store.migrate(folder=scripts(tmp_path))
    store.close()

    assert revision(path) == "0002"
    assert (rows(path, "node"), rows(path, "run"), rows(path, "attempt")) == (1, 1, 1)
    assert backup == str(tmp_path / "supervisor.db.before-0002")
    assert revision(Path(backup)) == "0001"
    assert rows(Path(backup), "attempt") == 1
    assert Path(backup).stat().st_mode & 0o777 == 0o600


def test_a_failing_migration_leaves_nothing_behind(tmp_path: Path) -> None:
    path = filled(tmp_path)
    store = Store(path, clock=FakeClock())
    more = '    op.create_table("half", sa.Column("id", sa.Integer()))\n'
    more += '    op.execute("INSERT INTO nowhere VALUES (1)")'
    with pytest.raises(StoreError, match="nowhere"):
        store.migrate(folder=scripts(tmp_path, more))
    assert revision(path) == "0001"
    with closing(sqlite3.connect(path)) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        columns = {row[1] for row in connection.execute("PRAGMA table_info(node)")}
    assert "half" not in names
    assert "extra" not in columns
    assert store.read_sync(lambda session: session.exec(select(Node)).one().name) == "local"
    store.close()


def test_a_migration_that_breaks_references_is_undone(tmp_path: Path) -> None:
    path = filled(tmp_path)
    store = Store(path, clock=FakeClock())
    with pytest.raises(StoreError, match="would break 2 references"):
        store.migrate(folder=scripts(tmp_path, '    op.execute("DELETE FROM node")'))
    store.close()
    assert (revision(path), rows(path, "node")) == ("0001", 1)


def test_a_newer_schema_is_refused_and_untouched(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    before = path.read_bytes()
    store = Store(path, clock=FakeClock())
    with pytest.raises(SchemaTooNewError) as caught:
        store.migrate()
    store.close()
    assert caught.value.data == {"found": "9999", "known": "0001"}
    assert path.read_bytes() == before


def test_only_the_newest_backups_are_kept(tmp_path: Path) -> None:
    path = filled(tmp_path)
    for number in range(7):
        old = tmp_path / f"supervisor.db.before-old{number}"
        old.write_bytes(b"")
    store = Store(path, clock=FakeClock())
    store.migrate(folder=scripts(tmp_path))
    store.close()
    backups = sorted(found.name for found in tmp_path.glob("*.before-*"))
    assert len(backups) == 5
    assert "supervisor.db.before-0002" in backups


def test_the_first_start_makes_everything(tmp_path: Path) -> None:
    with open_store(tmp_path / "deep" / "state") as store:
        assert store.read_sync(lambda session: session.exec(select(Event)).all()) == []


def test_downgrade_of_the_first_revision_removes_what_it_made(tmp_path: Path) -> None:
    engine = sa.create_engine("sqlite://")
    namespace: dict[str, object] = {}
    script = migrations_folder() / "versions" / "0001_initial.py"
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    from alembic.operations import Operations

    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        with Operations.context(context):
            namespace["upgrade"]()  # type: ignore[operator]
            assert "run" in sa.inspect(connection).get_table_names()
            namespace["downgrade"]()  # type: ignore[operator]
        assert sa.inspect(connection).get_table_names() == []
    engine.dispose()
