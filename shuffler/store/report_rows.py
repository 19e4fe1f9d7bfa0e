"""Accepted reports in the store: one row for the reports of an upload, encrypted together."""

from collections.abc import Generator, Sequence

from sqlalchemy import Connection, delete, func, insert, select

from riffle.shuffler.store.lease_rows import read_slots, write_slots
from riffle.shuffler.store.schema import reports
from riffle.shuffler.store.vault import ReportCipher

_INSERT = insert(reports)


def insert_reports(
    connection: Connection,
    batch_id: str,
    accepted: Sequence[tuple[int, bytes]],
    cipher: ReportCipher,
) -> None:
    """Stores the accepted reports of one upload, each given with its slot, in ascending order."""
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
