"""Accepted reports in the store, and the disk that they need.

One row has the reports of an upload, encrypted together.
"""

from collections.abc import Generator, Sequence
from pathlib import Path
from shutil import disk_usage

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select

from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import is_shared
from riffle.common.server.monitoring import LEAST_FREE_BYTES
from riffle.shuffler.store.lease_rows import read_slots, write_slots
from riffle.shuffler.store.schema import batches, reports
from riffle.shuffler.store.vault import ReportCipher

ROW_BYTES = 512
"""Disk for the lease, the keys and the overhead of one report."""

SUM_COPIES = 3
"""Copies of a sum on disk: in the database's pages, old and new, and in its log."""

_INSERT = insert(reports)


def insert_reports(
    connection: Connection,
    batch_id: str,
    accepted: Sequence[tuple[int, bytes]],
    cipher: ReportCipher,
) -> None:
    """Stores the accepted reports of one upload, given with their slots in ascending order."""
    slots = [slot for slot, _ in accepted]
    row = {
        "batch_id": batch_id,
        "slot": slots[0],
        "held": len(slots),
        "slots": write_slots(slots),
        "sealed": cipher.encrypt(slots, b"".join(report for _, report in accepted)),
    }
    connection.execute(_INSERT, row)


def count_stored(connection: Connection, batch_id: str) -> int:
    """Returns the number of reports whose bytes are in the store."""
    query = select(func.sum(reports.c.held)).where(reports.c.batch_id == batch_id)
    return int(connection.scalar(query) or 0)


def stored_slots(connection: Connection, batch_id: str) -> list[int]:
    """Returns the slots of the reports whose bytes are in the store."""
    query = select(reports.c.slots).where(reports.c.batch_id == batch_id)
    return [slot for slots in connection.scalars(query) for slot in read_slots(slots)]


def stored_reports(connection: Connection, batch_id: str) -> Generator[tuple[list[int], bytes]]:
    """Yields the slots and stored reports of each upload, in any order."""
    query = select(reports.c.slots, reports.c.sealed).where(reports.c.batch_id == batch_id)
    with connection.execution_options(yield_per=1).execute(query) as rows:
        for slots, sealed in rows:
            yield read_slots(slots), bytes(sealed)


def delete_reports(connection: Connection, batch_id: str, slots: range) -> None:
    """Deletes the stored reports of the uploads whose first slots are in ``slots``."""
    of_slots = reports.c.slot.between(slots.start, slots.stop - 1)
    connection.execute(delete(reports).where(reports.c.batch_id == batch_id, of_slots))


def check_disk(connection: Connection, d: BatchDescriptor, now: int) -> None:
    """Raises LocalError ``unavailable`` if the disk has no room for this and all open batches.

    Space that erased batches left in the file counts as free. PostgreSQL's disk is not checked,
    because it may be on another machine.
    """
    if is_shared(connection):
        return
    query = select(batches.c.n - batches.c.reports, batches.c.report_bytes, batches.c.word_bits)
    still_open = connection.execute(query.where(is_open(now)))
    needed = _disk_bytes(d.n, d.report_bytes, d.word_bits)
    promised = sum(_disk_bytes(*row) for row in still_open)
    pages, size = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("freelist_count", "page_size")
    )
    free = disk_usage(Path(connection.engine.url.database or "").parent).free + pages * size
    missing = needed + promised + LEAST_FREE_BYTES - free
    if missing > 0:
        detail = f"the batch needs {needed} bytes of the shuffler's disk; {missing} are missing"
        raise LocalError("unavailable", detail, retry_after=60)


def _disk_bytes(reports: int, report_bytes: int, word_bits: int | None) -> int:
    """Returns the bytes of disk that future reports need; a sum needs only a few vectors."""
    vectors = SUM_COPIES * report_bytes if word_bits else reports * report_bytes
    return vectors + reports * ROW_BYTES


def is_open(now: int) -> ColumnElement[bool]:
    """Returns the condition that a batch is open at ``now``."""
    return (batches.c.state == "open") & (batches.c.expires_at > now)
