"""A batch of sums in the store: one sum of vectors, and the keys of its reports.

Vectors are not stored one by one. The transaction that accepts an upload adds its vectors to the
batch's sum. So a batch of any size needs memory and disk for a few vectors only, and its hand-over
takes no time. The keys E of the reports are stored with the reports' slots (`report_rows`).

One transaction changes sum, keys, leases and the count of reports. So after a crash, and on any
replica, the sum is over exactly the accepted reports. The sum is encrypted under the batch's secret
and bound to the number of its reports.

Each key may occur once in a batch. To notice a second one, the store compares tags of the keys.
Only the batch's secret can make a tag, so the tags of an erased batch do not reveal its keys.
"""

from collections.abc import Sequence

import numpy as np
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from riffle.common.mechanism.sums import KEY_BYTES, Words, add, empty_sum
from riffle.common.protocol.errors import LocalError
from riffle.common.server.statements import execute_rows, is_one_of
from riffle.shuffler.rules import Frame
from riffle.shuffler.store.batch_rows import Batch
from riffle.shuffler.store.schema import report_keys, sums
from riffle.shuffler.store.vault import ReportCipher

ADD_BYTES = 1 << 18
"""Reports are joined to pieces of about this many bytes, and each piece is added at once."""

_SEALED = select(sums.c.sealed).where(sums.c.batch_id == bindparam("batch"))
_SAVE = update(sums).where(sums.c.batch_id == bindparam("batch")).values(sealed=bindparam("sum"))
_OF_BATCH = report_keys.c.batch_id == bindparam("batch")
_USED = select(report_keys.c.tag).where(_OF_BATCH, is_one_of(report_keys.c.tag, "tags"))
_INSERT_TAGS = insert(report_keys)
_SOME = select(report_keys.c.tag).where(_OF_BATCH).limit(bindparam("most"))
_DELETE_SOME = delete(report_keys).where(_OF_BATCH, report_keys.c.tag.in_(_SOME))


def insert_sum(connection: Connection, batch: Batch, cipher: ReportCipher) -> None:
    """Stores the sum of no reports. This takes all the disk that the sum will need."""
    sealed = cipher.encrypt(0, _empty(batch).tobytes())
    connection.execute(insert(sums).values(batch_id=batch.batch_id, sealed=sealed))


def read_sum(connection: Connection, batch: Batch, cipher: ReportCipher) -> Words:
    """Returns the sum of the batch's reports (C,); raises LocalError if it is damaged."""
    sealed, total = connection.scalar(_SEALED, {"batch": batch.batch_id}), _empty(batch)
    data = b"" if sealed is None else cipher.decrypt(batch.reports, bytes(sealed))
    if len(data) != total.nbytes:
        raise LocalError("internal", "the sum of the batch is damaged; nothing is released")
    total[:] = np.frombuffer(data, dtype=total.dtype)
    return total


class UploadKeys:
    """The keys E of an upload's reports, and those among them that an accepted report has used."""

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
    """Adds accepted reports, given with their slots, to the sum; returns slots and keys E."""
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
    """Deletes a batch's sum and at most ``most`` of the tags of its keys."""
    connection.execute(delete(sums).where(sums.c.batch_id == batch_id))
    connection.execute(_DELETE_SOME, {"batch": batch_id, "most": most})


def _empty(batch: Batch) -> Words:
    bits = batch.word_bits or 0
    return empty_sum((batch.message_bytes - KEY_BYTES) * 8 // bits, bits)
