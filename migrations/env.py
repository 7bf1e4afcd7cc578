"""Alembic's entry: runs the scripts on the connection that `supervisor.store.migrate` hands over."""

from alembic import context
from sqlmodel import SQLModel

from supervisor.store import tables

assert tables.Run.metadata is SQLModel.metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
