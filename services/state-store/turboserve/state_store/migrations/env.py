"""Alembic's environment: the migrations run on the connection that `migrate` hands over."""

from alembic import context

from turboserve.state_store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
