"""The environment in which Alembic runs the revisions of either store, for `server.database`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
