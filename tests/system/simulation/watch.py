"""What is seen of a simulation from outside, and what must hold of it whenever one looks.

Every report is known by its bytes: what the nodes seal is remembered row by row, and every row is
unique. So it shows at once when a batch that is handed over misses a report that was acknowledged,
has one twice, or one of another batch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import Connection, select

from riffle.common.mechanism.parameters import Aggregation
from riffle.common.mechanism.sums import KEY_BYTES
from riffle.common.protocol import hpke
from riffle.common.protocol.wire import LEASE_BYTES, Conservation, LeaseReply, UploadReply
from riffle.node_client.pipeline import Pipeline
from riffle.shuffler.metrics import conservation
from riffle.shuffler.store.schema import batches
from tests.system.simulation.installation import OWNER_SLOTS
from tests.system.simulation.learner import N
from tests.system.simulation.network import Sent

OVER = ("erased", "abandoned")
WORD = np.dtype("<u2")
ACKNOWLEDGED = ("accepted", "replayed")


@dataclass
class Known:
    """What the shuffler's store must know: reports ``acknowledged`` and the stranger's leases with
    their ends, by batch id, and the batches that are ``over``."""

    acknowledged: dict[str, set[bytes]] = field(default_factory=dict)
    strangers: dict[str, dict[str, int]] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)


@dataclass
class Watch:
    """Reports are known by their sealed bytes. By batch id: the messages ``released``, and the
    ``owners`` of these, and how many users were ``asked_for`` it. The services that were
    ``rolled_back`` run on an older store; the shuffler is ``steady`` while its clock was never set;
    each of the ``setbacks`` may have cost the reports of all who were being asked."""

    clock: Callable[[], float]
    stranger: str
    aggregation: Aggregation = "messages"
    problems: list[str] = field(default_factory=list)
    sealed: dict[bytes, bytes] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    asked_for: Counter[str] = field(default_factory=Counter)
    known: Known = field(default_factory=Known)
    released: dict[str, bytes] = field(default_factory=dict)
    owners: dict[str, set[bytes]] = field(default_factory=dict)
    rolled_back: set[str] = field(default_factory=set)
    steady: bool = True
    setbacks: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remember what nodes seal, and whom they ask."""
        seal, run = hpke.seal, Pipeline._run_episodes

        def sealing(key: bytes, info: bytes, plaintext: bytes) -> bytes:
            sealed = seal(key, info, plaintext)
            self.sealed[sealed] = plaintext
            return sealed

        def running(pipeline: Pipeline, job: Any, chunk: Sequence[Any], done: Any) -> None:
            self.asked.update(lease.user for lease in chunk)
            self.asked_for[job.batch.batch_id] += len(chunk)
            run(pipeline, job, chunk, done)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("riffle.node_client.sealing.seal", sealing)
            patch.setattr(Pipeline, "_run_episodes", running)
            yield

    def expect(self, holds: bool, what: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(what)

    # -- answers that leave a service ------------------------------------------------------------

    def answered(self, sent: Sent, response: httpx.Response) -> None:
        """Look at an answer on its way."""
        path = httpx.URL(sent.url).path.split("/")
        server_error = response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        self.expect(not server_error, f"{sent.method} {sent.url}: {response.text}")
        if response.status_code != HTTPStatus.OK:
            return
        if path[-1] == "reports":
            self._upload(path[-2], sent.body, response)
        if path[-1] == "leases" and ("authorization", self.stranger) in sent.headers:
            self._lease(path[-2], response)
        if path[-1] == "messages":
            self._release(path[-2], response.content)

    def _upload(self, batch_id: str, body: bytes, response: httpx.Response) -> None:
        results = UploadReply.model_validate_json(response.content).results
        size = len(body) // len(results)
        frames = (body[start : start + size] for start in range(0, len(body), size))
        acknowledged = self.known.acknowledged.setdefault(batch_id, set())
        for frame, result in zip(frames, results, strict=True):
            if result.outcome in ACKNOWLEDGED:
                acknowledged.add(frame[LEASE_BYTES:])

    def _lease(self, batch_id: str, response: httpx.Response) -> None:
        """No owner has more than their share, and one who never reports gets it twice at most."""
        leases = self.known.strangers.setdefault(batch_id, {})
        reply = LeaseReply.model_validate_json(response.content)
        leases |= {lease.lease: lease.expires_at for lease in reply.leases}
        held = sum(end > self.clock() for end in leases.values())
        within = held <= OWNER_SLOTS and len(leases) <= 2 * OWNER_SLOTS
        hogged = f"batch {batch_id}: the stranger got {len(leases)} leases, and holds {held}"
        self.expect(within or not self.steady, hogged)

    def _release(self, batch_id: str, data: bytes) -> None:
        """The same messages, always; only a shuffler that forgot a batch may have others in it."""
        before = self.released.setdefault(batch_id, data)
        if before == data:
            return
        again = [rows[:32] for rows in self.sealed.values() if rows[:32] in before]
        known = "shuffler" not in self.rolled_back or any(first in data for first in again)
        self.expect(not known, f"batch {batch_id} was handed over in two orders")
        self.released[batch_id] = data
        self.owners.pop(batch_id, None)

    def restored(self, known: Known) -> None:
        """The shuffler's store is an older copy, and knows no more than it did then."""
        self.known = deepcopy(known)

    # -- the shuffler's store --------------------------------------------------------------------

    def look(self, connection: Connection) -> None:
        """What must hold of every batch that was not over when last looked at."""
        for batch_id, state, clean in connection.execute(
            select(batches.c.batch_id, batches.c.state, batches.c.clean)
        ).all():
            if batch_id not in self.known.over:
                self._look(conservation(connection, batch_id))
            if state in OVER and clean:
                self.known.over.add(batch_id)
        twice = [user for user, times in self.asked.items() if times > 1]
        self.expect(not twice, f"users asked twice: {twice}")

    def _look(self, record: Conservation) -> None:
        accepted = record.accepted or 0
        acknowledged = len(self.known.acknowledged.get(record.batch_id, ()))
        self.expect(record.balanced, f"conservation: {record}")
        self.expect(accepted <= record.n, f"more than n reports: {record}")
        self.expect(acknowledged <= accepted, f"acknowledged {acknowledged}, kept: {record}")
        full = record.state not in ("open", "abandoned")
        self.expect(not full or accepted == record.n, f"sealed short: {record}")
        in_vain = self.asked_for[record.batch_id] - accepted
        self.expect(in_vain <= (2 + self.setbacks) * N, f"{in_vain} asked in vain: {record}")
        self.expect(record.forwarded in (0, record.n), f"handed over in part: {record}")
        if record.batch_id in self.released:
            self._whole(record)

    def _whole(self, record: Conservation) -> None:
        """What was handed over is exactly n whole reports, the acknowledged ones among them."""
        batch_id = record.batch_id
        if batch_id not in self.owners:
            self.owners[batch_id] = self._owners(record)
        lost = self.known.acknowledged.get(batch_id, set()) - self.owners[batch_id]
        self.expect(not lost, f"{len(lost)} acknowledged reports are not in {record}")

    def _owners(self, record: Conservation) -> set[bytes]:
        if self.aggregation == "sums":
            return self._summed(record)
        data, L = self.released[record.batch_id], record.messages_a_report
        size = len(data) // (record.n * L)
        owner = {row: sealed for sealed, rows in self.sealed.items() for row in split(rows, size)}
        found = split(data, size)
        reports = Counter(owner.get(row, b"") for row in found)
        self.expect(len(set(found)) == len(found) == record.n * L, f"a message twice: {record}")
        self.expect(b"" not in reports, f"a message that no node sealed: {record}")
        whole = len(reports) == record.n and set(reports.values()) == {L}
        self.expect(whole, f"not n whole reports, but {sorted(reports.values())}: {record}")
        return set(reports)

    def _summed(self, record: Conservation) -> set[bytes]:
        """The sum is that of exactly the n reports whose keys are handed over with it."""
        data, start = self.released[record.batch_id], -KEY_BYTES * record.n
        total, keys = np.frombuffer(data[:start], WORD), split(data[start:], KEY_BYTES)
        reports = {rows[:KEY_BYTES]: (sealed, rows) for sealed, rows in self.sealed.items()}
        found = [reports[key] for key in keys if key in reports]
        self.expect(len(set(keys)) == len(keys) == record.n, f"a key twice: {record}")
        self.expect(len(found) == len(keys), f"a key that no node sealed: {record}")
        vectors = [np.frombuffer(rows[KEY_BYTES:], WORD) for _, rows in found]
        same = bool((np.sum(vectors, axis=0, dtype=WORD) == total).all())
        self.expect(same, f"the sum is not that of the reports handed over: {record}")
        return {sealed for sealed, _ in found}


def split(data: bytes, size: int) -> list[bytes]:
    """Rows of equal size."""
    return [data[start : start + size] for start in range(0, len(data), size)]
