"""Run by Alembic; see `common.migrations`."""

from riffle.common.migrations import run_migrations

run_migrations()
