"""Accepted reports in the store, and the disk that they need.

The reports of one upload share one row, encrypted together.

In a batch of sums, a report is a public key E and a masked vector. The store keeps one sum of all
vectors, and the keys E with their slots. A batch of any size needs room for only a few vectors.

Sum, keys, leases and the count of reports change in one transaction. So the sum always has the
vectors of exactly the accepted reports. The sum is encrypted under the batch's secret.

Each key E may occur once in a batch. The store recognises a repeated key by its tag. A tag can be
computed only with the batch's secret, so the tags of an erased batch do not reveal its keys.
"""

from collections.abc import Generator, Sequence
from pathlib import Path
from shutil import disk_usage

import numpy as np
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from riffle.common.mechanism.sums import KEY_BYTES, Words, add, empty_sum
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import is_shared
from riffle.common.server.monitoring import LEAST_FREE_BYTES
from riffle.common.server.statements import execute_rows, is_one_of
from riffle.shuffler.rules import Frame
from riffle.shuffler.store.batch_rows import Batch, is_open
from riffle.shuffler.store.lease_rows import read_slots, write_slots
from riffle.shuffler.store.schema import batches, report_keys, reports, sums
from riffle.shuffler.store.vault import ReportCipher

ROW_BYTES = 512
"""Bytes of disk for one report's lease, keys and overhead."""

SUM_COPIES = 3
"""Copies of a sum on disk: in the database's pages, old and new, and in its log."""

ADD_BYTES = 1 << 18
"""About how many bytes of reports are added to the sum at once."""

_SEALED = select(sums.c.sealed).where(sums.c.batch_id == bindparam("batch"))
_SAVE = update(sums).where(sums.c.batch_id == bindparam("batch")).values(sealed=bindparam("sum"))
_OF_BATCH = report_keys.c.batch_id == bindparam("batch")
_USED = select(report_keys.c.tag).where(_OF_BATCH, is_one_of(report_keys.c.tag, "tags"))
_INSERT_TAGS = insert(report_keys)
_SOME = select(report_keys.c.tag).where(_OF_BATCH).limit(bindparam("most"))
_DELETE_SOME = delete(report_keys).where(_OF_BATCH, report_keys.c.tag.in_(_SOME))
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


def stored_slots(connection: Connection, batch_id: str) -> list[int]:
    """Returns the slots of the stored reports of a batch."""
    query = select(reports.c.slots).where(reports.c.batch_id == batch_id)
    return [slot for slots in connection.scalars(query) for slot in read_slots(slots)]


def stored_reports(connection: Connection, batch_id: str) -> Generator[tuple[list[int], bytes]]:
    """Yields the slots and stored reports of each upload, in any order."""
    query = select(reports.c.slots, reports.c.sealed).where(reports.c.batch_id == batch_id)
    with connection.execution_options(yield_per=1).execute(query) as rows:
        for slots, sealed in rows:
            yield read_slots(slots), bytes(sealed)


def delete_reports(connection: Connection, batch_id: str, slots: range) -> None:
    """Deletes the stored reports of every upload that has its first slot in ``slots``."""
    of_slots = reports.c.slot.between(slots.start, slots.stop - 1)
    connection.execute(delete(reports).where(reports.c.batch_id == batch_id, of_slots))


def check_disk(connection: Connection, d: BatchDescriptor, now: int) -> None:
    """Raises LocalError ``unavailable`` if the disk lacks room for this batch and all open ones.

    Space that erased batches left in the file counts as free. PostgreSQL's disk is not checked.
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
    if needed + promised + LEAST_FREE_BYTES > free:
        # The detail must not give `promised` or `free`: each report of another batch changes them.
        detail = f"the batch needs {needed} bytes of the shuffler's disk, which has not enough room"
        raise LocalError("unavailable", detail, retry_after=60)


def _disk_bytes(reports: int, report_bytes: int, word_bits: int | None) -> int:
    """Returns the disk bytes that future reports need. Summed reports need only a few vectors."""
    vectors = SUM_COPIES * report_bytes if word_bits else reports * report_bytes
    return vectors + reports * ROW_BYTES


# -- sums --------------------------------------------------------------------------------------


def insert_sum(connection: Connection, batch: Batch, cipher: ReportCipher) -> None:
    """Stores a sum of zeros, which already takes all the disk that the sum will ever need."""
    sealed = cipher.encrypt(0, _empty(batch).tobytes())
    connection.execute(insert(sums).values(batch_id=batch.batch_id, sealed=sealed))


def read_sum(connection: Connection, batch: Batch, cipher: ReportCipher) -> Words:
    """Returns the sum of the batch's vectors (C,); raises LocalError if the sum is damaged."""
    sealed, total = connection.scalar(_SEALED, {"batch": batch.batch_id}), _empty(batch)
    data = b"" if sealed is None else cipher.decrypt(batch.reports, bytes(sealed))
    if len(data) != total.nbytes:
        raise LocalError("internal", "the sum of the batch is damaged; nothing is released")
    total[:] = np.frombuffer(data, dtype=total.dtype)
    return total


class UploadKeys:
    """The public keys of an upload's reports, and which of them earlier accepted reports used."""

    def __init__(
        self, connection: Connection, batch: Batch, frames: Sequence[Frame], cipher: ReportCipher
    ) -> None:
        keys = {report[:KEY_BYTES] for *_, report in frames if report is not None}
        self.tags = {key: cipher.tag(key) for key in keys}
        query = {"batch": batch.batch_id, "tags": list(self.tags.values())}
        self._used = set(connection.scalars(_USED, query))

    def take(self, report: bytes) -> bool:
        """Returns whether a report's key is new, and counts it as used from now on."""
        tag = self.tags[report[:KEY_BYTES]]
        is_new = tag not in self._used
        self._used.add(tag)
        return is_new


def add_reports(
    connection: Connection,
    batch: Batch,
    accepted: Sequence[tuple[int, bytes]],
    cipher: ReportCipher,
    keys: UploadKeys,
) -> list[tuple[int, bytes]]:
    """Adds reports, given with their slots, to the sum. Returns each report's slot and key E."""
    total, step = read_sum(connection, batch, cipher), max(1, ADD_BYTES // batch.message_bytes)
    for start in range(0, len(accepted), step):
        add(total, b"".join(report for _, report in accepted[start : start + step]))
    sealed = cipher.encrypt(batch.reports + len(accepted), total.tobytes())
    connection.execute(_SAVE, {"batch": batch.batch_id, "sum": sealed})
    stored = [(slot, report[:KEY_BYTES]) for slot, report in accepted]
    rows = [(batch.batch_id, keys.tags[key]) for _, key in stored]
    execute_rows(connection, _INSERT_TAGS, ("batch_id", "tag"), rows)
    return stored


def delete_sum(connection: Connection, batch_id: str, most: int) -> None:
    """Deletes a batch's sum, and at most ``most`` of the batch's key tags."""
    connection.execute(delete(sums).where(sums.c.batch_id == batch_id))
    connection.execute(_DELETE_SOME, {"batch": batch_id, "most": most})


def _empty(batch: Batch) -> Words:
    bits = batch.word_bits or 0
    return empty_sum((batch.message_bytes - KEY_BYTES) * 8 // bits, bits)
