"""The service's log: one JSON object a line, with fields from an allow-list only.

Node, user, lease and slot are not on the list and never will be: a log that says who sent when
undoes the shuffle for whoever reads it.
"""

import json
import logging

LOG = logging.getLogger("riffle.shuffler")

ALLOWED = frozenset({"batch_id", "state", "n", "reports", "messages", "seconds", "batches", "host"})


def note(event: str, **fields: str | float) -> None:
    """Log one event.

    Raises:
        ValueError: a field is not on the allow-list: a mistake of ours, caught by the tests.
    """
    unknown = sorted(fields.keys() - ALLOWED)
    if unknown:
        raise ValueError(f"fields {unknown} may not be logged")
    LOG.info(json.dumps({"event": event, **fields}))
