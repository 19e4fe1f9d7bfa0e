"""Schemas of stores as Alembic revisions: a store is brought to the program's revision when it is
opened, inside the transaction that opens it.

The writer's lock is held meanwhile (`common.database`), so that of replicas that start together one
migrates and the others find it done. A store of a revision that the program does not have is
refused: no program writes into a store it does not understand.
"""

import threading
from dataclasses import dataclass
from pathlib import Path

from alembic import command, context
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from riffle.common.errors import LocalError

_ONE_AT_A_TIME = threading.Lock()  # Alembic keeps what it works on in globals of the process


@dataclass(frozen=True, slots=True)
class Schema:
    """A folder of Alembic revisions, and the revision that the program works with."""

    folder: Path
    head: str


def migrate(connection: Connection, schema: Schema) -> None:
    """Bring a store to ``schema.head``; nothing happens when it is there.

    Raises:
        LocalError: ``unavailable``: it has a revision that this program does not know.
    """
    found = revision(connection)
    if found == schema.head:
        return
    known = {script.revision for script in ScriptDirectory(str(schema.folder)).walk_revisions()}
    if found is not None and found not in known:
        raise LocalError(
            "unavailable",
            f"it has schema version {found}, this program knows {schema.head}; run the program "
            "that wrote it, or use another data directory or database",
        )
    config = Config()
    config.set_main_option("script_location", str(schema.folder).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ONE_AT_A_TIME:
        command.upgrade(config, schema.head)


def revision(connection: Connection) -> str | None:
    """The revision a store has; None for a new one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return str(connection.scalar(text("SELECT version_num FROM alembic_version")))


def run_migrations() -> None:
    """What every ``env.py`` does: the steps, on the connection that `migrate` was given."""
    context.configure(connection=context.config.attributes["connection"])
    with context.begin_transaction():
        context.run_migrations()
