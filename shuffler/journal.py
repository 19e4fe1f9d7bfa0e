"""What the shuffler logs; how: `common.journal`.

Node, user, lease and slot are not on the list and never will be: a log that says who sent when
undoes the shuffle for whoever reads it.
"""

from riffle.common.journal import Journal

JOURNAL = Journal("shuffler", "batch_id", "state", "n", "reports", "messages", "batches")
note = JOURNAL.note
