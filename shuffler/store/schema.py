"""The tables of the shuffler's store, which `common.server.database` opens.

Raise the version of the schema with every change of a table.
"""

from functools import partial
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import AUTHENTICATED, Schema, meta_table, open_database

metadata = MetaData()

SCHEMA = Schema("shuffler", 1, metadata)

meta = meta_table(metadata)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", String(32), primary_key=True),
    Column("name", String(100), nullable=False),
    Column("owner", String(100), nullable=False, index=True),
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("quota", BigInteger, nullable=False),
    Column("users", BigInteger, nullable=False, default=0),
    Column("leases", BigInteger, nullable=False, default=0),
    # Unproven claims of coordinators: failed messages of the node, and batches that had any.
    Column("failed_messages", BigInteger, nullable=False, default=0),
    Column("failed_batches", BigInteger, nullable=False, default=0),
    Column("enrolled_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger),
)

users = Table(
    "users",
    metadata,
    Column("user", String(32), primary_key=True),
    Column("node_id", String(32), ForeignKey("nodes.node_id"), nullable=False),
    # The newest lease, which may be over or deleted. No other lease of the user is live, or has
    # reported in the same epoch.
    Column("lease", String(32), nullable=False),
    # `bars_until` of the user's last report under an earlier lease; 0 if there is none.
    Column("barred_until", BigInteger, nullable=False, server_default=text("0")),
)

batches = Table(
    "batches",
    metadata,
    Column("batch_id", String(32), primary_key=True),
    Column("deposited", BigInteger, nullable=False, unique=True),
    Column("descriptor", LargeBinary, nullable=False),
    Column("coordinator_signature", String(128), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("batch_key", String(64), nullable=False),
    Column("shuffler_signature", String(128), nullable=False),
    Column("n", BigInteger, nullable=False),
    Column("owner_slots", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("episode_seconds", Integer, nullable=False, default=0),
    Column("epoch_seconds", BigInteger),  # null: a user reports once in a lifetime
    Column("report_bytes", Integer, nullable=False),
    Column("message_bytes", Integer, nullable=False),
    Column("word_bits", Integer),  # null: not a batch of sums
    Column("state", String(16), nullable=False, index=True),
    Column("reports", BigInteger, nullable=False, default=0),
    Column("next_slot", BigInteger, nullable=False, default=0),
    Column("sealed_at", BigInteger),
    Column("messages_sha256", String(64)),
    # Messages handed over, accepted reports dropped, and the event that abandoned the batch.
    Column("forwarded", BigInteger, nullable=False, default=0),
    Column("discarded", BigInteger, nullable=False, default=0),
    Column("ended_by", String(16)),
    # True once the batch is over, its secret is destroyed and its reports are deleted.
    Column("clean", Boolean, nullable=False, default=False),
)

# A row for the leases of one request (`lease_rows`). The long columns come last, so that the
# database can read the short columns without them.
lease_groups = Table(
    "lease_groups",
    metadata,
    Column("group_id", String(16), primary_key=True),
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), nullable=False),
    Column("node_id", String(32), ForeignKey("nodes.node_id"), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("leases", Integer, nullable=False),
    Column("pending", Integer, nullable=False),
    Column("reports", Integer, nullable=False),
    Column("slots", LargeBinary, nullable=False),
    Column("states", Text, nullable=False),
    Column("users", LargeBinary, nullable=False),
    Column("digests", LargeBinary, nullable=False),
    Index("shares", "batch_id", "node_id", "expires_at", "leases", "pending", "reports"),
    Index(
        "pending",
        *("batch_id", "expires_at", "pending"),
        sqlite_where=text("pending > 0"),
        postgresql_where=text("pending > 0"),
    ),
)

# A row for the reports of one upload, encrypted by `shuffler.store.vault.ReportCipher`: ``slots``
# has all their slots, ``slot`` only the first.
reports = Table(
    "reports",
    metadata,
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), primary_key=True),
    Column("slot", BigInteger, primary_key=True, autoincrement=False),
    Column("held", Integer, nullable=False),
    Column("slots", LargeBinary, nullable=False),
    Column("sealed", LargeBinary, nullable=False, info={AUTHENTICATED: True}),
)

# For each batch of sums: the sum of its reports' vectors, encrypted as reports are, and a tag of
# each report's key (`report_rows`). The table of reports has only the keys of these reports.
sums = Table(
    "sums",
    metadata,
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), primary_key=True),
    Column("sealed", LargeBinary, nullable=False, info={AUTHENTICATED: True}),
)

report_keys = Table(
    "report_keys",
    metadata,
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), primary_key=True),
    Column("tag", String(32), primary_key=True),
)

dropped = Table(
    "dropped",
    metadata,
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), primary_key=True),
    Column("problem", String(32), primary_key=True),
    Column("frames", BigInteger, nullable=False),
)

# The reasons why nodes decline an open batch, and when each reason was last given. The table does
# not tell which nodes decline, or how many.
declined = Table(
    "declined",
    metadata,
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), primary_key=True),
    Column("reason", String(16), primary_key=True),
    Column("at", BigInteger, nullable=False),
)


open_store = partial(open_database, SCHEMA)
"""Opens the store at a URL; raises the errors of `common.server.database.open_database`."""


def sqlite_url(directory: Path) -> str:
    """Returns the URL of the default store: one file in the data directory."""
    return f"sqlite:///{directory / 'shuffler.sqlite'}"


def not_usable(what: str, error: Exception) -> LocalError:
    """Returns the error for a store that could not be read or written; a retry may succeed.

    The database's own text may quote a statement's values, so only the class of ``error`` is named.
    """
    if isinstance(error, LocalError):
        return error
    kind = type(getattr(error, "orig", None) or error).__name__
    failure = LocalError("unavailable", f"the store could not be {what} ({kind})", retry_after=1)
    failure.__cause__ = error
    return failure
