"""What a node logs, for its own owner; how: `common.process.journal`. No user, lease or episode.

``detail`` is a sentence of Riffle's own errors about a descriptor, a file or an answer of the
shuffler, on one line (`common.protocol.errors.one_line`).
"""

from riffle.common.process.journal import Journal

JOURNAL = Journal(
    "node", "batch_id", "node_id", "messages", "episodes", "failed", "problem", "detail", "request"
)
note = JOURNAL.note
