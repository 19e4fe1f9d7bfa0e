"""Run by Alembic; see `common.server.database`."""

from riffle.common.server.database import run_migrations

run_migrations()
