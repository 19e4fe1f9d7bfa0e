"""What stops a service before it fails: a full disk, a clock that is not its peer's.

Expiries and leases are times of day, so peers must agree on it: a descriptor that one side takes
for open is over for the other. `MOST_SKEW_SECONDS` is far below the shortest useful expiry and far
above what a clock that is kept by NTP is off.
"""

import shutil
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

LEAST_FREE_BYTES = 64 << 20
MOST_SKEW_SECONDS = 30.0


def disk_trouble(folder: Path) -> str | None:
    """What is wrong with the space for a service's data; None: nothing."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot look at {folder}: {error.strerror}"
    if free < LEAST_FREE_BYTES:
        return f"{free >> 20} MiB are free for the data, {LEAST_FREE_BYTES >> 20} are needed"
    return None


def skew(date: str | None, now: datetime) -> float | None:
    """Seconds that a peer's clock, by its ``Date`` header, is ahead of ``now`` (aware); None: it
    does not say. The header has whole seconds."""
    if date is None:
        return None
    try:
        return (parsedate_to_datetime(date) - now).total_seconds()
    except (TypeError, ValueError):
        return None


def clock_trouble(ahead: float | None) -> str | None:
    """What is wrong with a clock that a peer's is ``ahead`` of, in seconds; None: nothing."""
    if ahead is None or abs(ahead) <= MOST_SKEW_SECONDS:
        return None
    which = "ahead of" if ahead > 0 else "behind"
    return (
        f"the shuffler's clock is {abs(ahead):.0f} s {which} this one, "
        f"{MOST_SKEW_SECONDS:.0f} s are allowed; set the clocks by NTP"
    )
