"""Run by Alembic; see `common.migrations`."""

from common.migrations import run_migrations

run_migrations()
