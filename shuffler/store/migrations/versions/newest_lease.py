"""A user's row names the user's newest lease, which replaces an index of leases by user.

User ids are random, so every new lease wrote a page of that index.
"""

import sqlalchemy as sa
from alembic import op

revision = "shuffler_2"
down_revision = "shuffler_1"

_NEWEST_OF_OPEN_BATCHES = """
UPDATE users SET lease = (
    SELECT leases.lease FROM leases JOIN batches ON batches.batch_id = leases.batch_id
    WHERE leases."user" = users."user" AND batches.state = 'open'
    AND leases.slot IS NOT NULL AND leases.report_sha256 IS NULL
    ORDER BY leases.expires_at DESC LIMIT 1
)
"""


def upgrade() -> None:
    """Keeps the leases that may still be live; a user who has reported needs none."""
    op.add_column("users", sa.Column("lease", sa.String(length=32), nullable=True))
    op.execute(_NEWEST_OF_OPEN_BATCHES)
    op.drop_index("ix_leases_user", "leases")
