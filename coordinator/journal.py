"""What the coordinator logs; how: `common.journal`. It knows no user, lease or node to name.

``detail`` is a sentence of Riffle's own errors about a run, the one that ``trouble`` shows, or the
learner's why it cannot go on, which knows private counts only.
"""

from riffle.common.journal import Journal

JOURNAL = Journal("coordinator", "run_id", "deployment", "problem", "detail")
note = JOURNAL.note
