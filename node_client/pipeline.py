"""From leases to stored reports: episodes, encoding, sealing, upload, with a bound on all of it.

A chunk is some whole reports of one node in one batch. Episodes and encoding run in this process
while the pool seals earlier chunks and still earlier ones are uploaded, so that every core seals
all the time. A chunk holds one of ``room`` places from before its episodes are run until the
shuffler has decided on its reports; a shuffler that is away therefore stops episodes, not the node.

A sealed report is kept, and sent again unchanged, until it is accepted, replayed, or refused for
good. Totals say how many of each, and never which.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.counters import Ints
from common.errors import RiffleError
from common.wire import Lease, UploadReply, frame
from node_client.environments.environment import Environment
from node_client.report import BatchPlan, slot_report
from node_client.sealing import SealKeys, reports_a_chunk
from node_client.settings import Credential
from node_client.shuffler_api import ShufflerApi, one_line
from node_client.trust import Accepted
from node_client.users import Users

Seal = Callable[[SealKeys, Ints], Awaitable[bytes]]
_log = logging.getLogger("riffle.node")


@dataclass(frozen=True, slots=True)
class Job:
    """An accepted batch with what its reports need."""

    batch_id: str
    plan: BatchPlan
    keys: SealKeys

    @classmethod
    def of(cls, accepted: Accepted) -> "Job":
        """The job of an accepted descriptor."""
        descriptor = accepted.context.descriptor
        return cls(
            batch_id=descriptor.batch_id,
            plan=BatchPlan.of(descriptor),
            keys=SealKeys.of(accepted.context, accepted.batch_key),
        )


@dataclass(slots=True)
class Totals:
    """What became of this process's reports. ``refused`` counts by problem slug."""

    episodes: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Pipeline:
    """The bounded way of reports from lease to shuffler. Shared by all nodes of a process."""

    environment: Environment
    seal: Seal
    api: ShufflerApi
    users: Users
    totals: Totals
    room: asyncio.Semaphore
    test_entry: bool
    _deliveries: set[asyncio.Task[None]] = field(default_factory=set)

    async def submit(self, job: Job, credential: Credential, leases: Sequence[Lease]) -> None:
        """Run and encode these users' episodes; seal and upload them in the background."""
        step = reports_a_chunk(job.keys.messages)
        for start in range(0, len(leases), step):
            chunk = leases[start : start + step]
            await self.room.acquire()
            run_before = self.totals.episodes
            try:
                messages = await self._encode(job, chunk)
            except BaseException:
                self.totals.refused["unsent"] += self.totals.episodes - run_before
                self.room.release()
                raise
            task = asyncio.create_task(self._deliver(job, credential, chunk, messages))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    async def drain(self, seconds: float) -> None:
        """Wait for the reports on their way, then give up on what is left (counted unsent)."""
        if not self._deliveries:
            return
        _, late = await asyncio.wait(self._deliveries, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _encode(self, job: Job, chunk: Sequence[Lease]) -> Ints:
        await asyncio.to_thread(self.users.mark_asked, [lease.user for lease in chunk])
        rows: list[Ints] = []
        for lease in chunk:
            _, messages = slot_report(
                job.plan, self.environment, lease.slot, test_entry=self.test_entry
            )
            rows.append(messages)
            self.totals.episodes += 1
            await asyncio.sleep(0)  # let sealed chunks be sent between two episodes
        return np.stack(rows)

    async def _deliver(
        self, job: Job, credential: Credential, chunk: Sequence[Lease], messages: Ints
    ) -> None:
        try:
            sealed = await self.seal(job.keys, messages)
            self._settle(await self._upload(job, credential, chunk, sealed))
        except RiffleError as error:
            _log.warning("batch %s: reports refused: %s", job.batch_id, one_line(error.detail))
            self.totals.refused[error.slug] += len(chunk)
        except asyncio.CancelledError:
            self.totals.refused["unsent"] += len(chunk)
            raise
        except Exception as error:  # the type only: an exception's text could hold a report
            _log.error("batch %s: reports lost: %s", job.batch_id, type(error).__name__)
            self.totals.refused["internal"] += len(chunk)
        finally:
            self.room.release()

    async def _upload(
        self, job: Job, credential: Credential, chunk: Sequence[Lease], sealed: bytes
    ) -> UploadReply:
        size = job.plan.descriptor.report_bytes
        leases = [lease.lease for lease in chunk]
        body = b"".join(
            frame(lease, sealed[i * size : (i + 1) * size]) for i, lease in enumerate(leases)
        )
        deadline = job.plan.descriptor.expires_at
        return await self.api.upload(credential.token, job.batch_id, leases, body, deadline)

    def _settle(self, reply: UploadReply) -> None:
        for result in reply.results:
            if result.outcome in {"accepted", "replayed"}:
                self.totals.accepted += 1
            else:
                self.totals.refused[result.outcome] += 1
