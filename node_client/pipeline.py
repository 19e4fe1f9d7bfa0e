"""How fast this process runs episodes, and what that says about leases. Pure: times are arguments.

A lease ends whether or not its user's report has arrived, and a user who was asked is never asked
again. So a user is asked only when the episode can end within the lease, and a lease request is
for no more users than episodes fit well into one.

From leases to stored reports: episodes, encoding, sealing, upload, with a bound on all of it.

A chunk is some whole reports of one node in one batch. Episodes and encoding run in a thread, one
chunk at a time (an environment serves one user at a time), while the pool seals earlier chunks and
still earlier ones are uploaded, so that every core seals all the time. A chunk holds one of
``room`` places from before its episodes are run until the shuffler has decided on its reports; a
shuffler that is away therefore stops episodes, not the node.

A sealed report is kept, and sent again unchanged, until it is accepted, replayed, or refused for
good. Totals say how many of each, and never which.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import key_id
from riffle.common.protocol.errors import RemoteError, RiffleError
from riffle.common.protocol.messages import Lease, UploadReply, frame
from riffle.node_client.environments.tabular import Environment
from riffle.node_client.episode import PreparedBatch, slot_report
from riffle.node_client.journal import JOURNAL, note
from riffle.node_client.sealing import MOST_CHUNK, SealKeys, whole_reports
from riffle.node_client.settings import Credential
from riffle.node_client.shuffler_client import ShufflerApi
from riffle.node_client.trust import Accepted
from riffle.node_client.users import Users

SHARE_OF_A_LEASE = 0.25
"""Part of a lease that its portion's episodes may take: sealing, upload and retries need some."""

NEWEST = 0.3
"""Weight of the newest measurement in the running mean."""


@dataclass(slots=True)
class Pace:
    """Seconds an episode takes with its encoding (None: not known), seconds that leases last."""

    episode_seconds: float | None = None
    lease_seconds: float = 0.0

    def took(self, seconds: float, episodes: int) -> None:
        """Note that so many episodes, one or more, took so many seconds together."""
        new = seconds / episodes
        old = new if self.episode_seconds is None else self.episode_seconds
        self.episode_seconds = old + NEWEST * (new - old)

    def granted(self, leases: Sequence[Lease], now: float) -> None:
        """Note how long leases granted at time ``now`` (seconds since 1970, UTC) last."""
        if leases:
            self.lease_seconds = max(lease.expires_at for lease in leases) - now

    def most_users(self) -> int:
        """Users of one lease request; one until an episode was measured."""
        if self.episode_seconds is None:
            return 1
        share = SHARE_OF_A_LEASE * self.lease_seconds
        return max(1, int(share / max(self.episode_seconds, 1e-6)))

    def in_time(self, leases: Sequence[Lease], now: float) -> list[Lease]:
        """The leases whose episodes, run one after another from ``now``, end before they do.

        When nothing but the measurement speaks against all of them it is forgotten: one long pause
        of the machine must not stop the node for good.
        """
        each = self.episode_seconds or 0.0
        kept: list[Lease] = []
        for lease in leases:
            if lease.expires_at > now and lease.expires_at >= now + each * (len(kept) + 1):
                kept.append(lease)
        if not kept and any(lease.expires_at > now for lease in leases):
            self.episode_seconds = None
        return kept


Seal = Callable[[SealKeys, Ints], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Job:
    """An accepted batch with what its reports need."""

    batch_id: str
    plan: PreparedBatch
    keys: SealKeys

    @classmethod
    def of(cls, accepted: Accepted) -> "Job":
        """The job of an accepted descriptor."""
        descriptor = accepted.context.descriptor
        return cls(
            batch_id=descriptor.batch_id,
            plan=PreparedBatch.of(descriptor),
            keys=SealKeys.of(accepted.context, accepted.batch_key),
        )


@dataclass(slots=True)
class Totals:
    """What became of this process's reports. ``refused`` counts by problem slug.

    ``failed`` episodes are those whose environment failed; their reports carry noise only.
    """

    episodes: int = 0
    failed: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Run:
    """A chunk's episodes: messages of those that ended so far, how many failed, whether to stop."""

    rows: list[Ints] = field(default_factory=list)
    failed: int = 0
    halted: bool = False


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
    pace: Pace = field(default_factory=Pace)
    clock: Callable[[], float] = time.time
    refetch: Callable[[Credential, Job], Awaitable[Job]] | None = None
    _deliveries: set[asyncio.Task[None]] = field(default_factory=set)
    _told_too_late: bool = False

    async def submit(self, job: Job, credential: Credential, leases: Sequence[Lease]) -> int:
        """Run and encode these users' episodes; seal and upload them in the background.

        Users whose leases end too soon are not asked. Returns how many were.
        """
        step, asked = whole_reports(MOST_CHUNK, job.keys.messages), 0
        for start in range(0, len(leases), step):
            await self.room.acquire()
            try:
                chunk = self._in_time(leases[start : start + step])
                messages = await self._encode(job, chunk) if chunk else None
            except BaseException:
                self.room.release()
                raise
            if messages is None:
                self.room.release()
                continue
            asked += len(chunk)
            task = asyncio.create_task(self._deliver(job, credential, chunk, messages))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)
        return asked

    async def drain(self, seconds: float) -> None:
        """Wait for the reports on their way, then give up on what is left (counted unsent)."""
        if self._deliveries:
            _, late = await asyncio.wait(self._deliveries, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self.totals.failed:  # a number, and never whose
            failed, episodes = self.totals.failed, self.totals.episodes
            note("episodes-failed", logging.WARNING, failed=failed, episodes=episodes)

    def _in_time(self, leases: Sequence[Lease]) -> list[Lease]:
        """Leases that can be met; decided before anybody is marked as asked."""
        kept = self.pace.in_time(leases, self.clock())
        if len(kept) < len(leases) and not self._told_too_late:
            self._told_too_late = True
            note("leases-end-too-soon", logging.WARNING)
        return kept

    async def _encode(self, job: Job, chunk: Sequence[Lease]) -> Ints:
        await asyncio.to_thread(self.users.mark_asked, [lease.user for lease in chunk])
        run, begun = _Run(), time.monotonic()
        try:
            await asyncio.to_thread(self._run, job, chunk, run)
        except BaseException:
            run.halted = True  # the thread ends the episode it is at, and begins no other
            self.totals.refused["unsent"] += self._count(run)
            raise
        self.pace.took(time.monotonic() - begun, self._count(run))
        return np.stack(run.rows)

    def _run(self, job: Job, chunk: Sequence[Lease], run: _Run) -> None:
        """In a thread: fill ``run``, user by user."""
        for lease in chunk:
            if run.halted:
                return
            episode, messages = slot_report(
                job.plan, self.environment, lease.slot, test_entry=self.test_entry
            )
            run.failed += episode is None
            run.rows.append(messages)

    def _count(self, run: _Run) -> int:
        if run.failed and not self.totals.failed:
            note("environment-failed", logging.WARNING)  # its report carries noise only
        episodes = len(run.rows)
        self.totals.failed += run.failed
        self.totals.episodes += episodes
        return episodes

    async def _deliver(
        self, job: Job, credential: Credential, chunk: Sequence[Lease], messages: Ints
    ) -> None:
        try:
            self._settle(await self._seal_and_upload(job, credential, chunk, messages))
        except RiffleError as error:
            JOURNAL.problem("reports-refused", error, batch_id=job.batch_id)
            self.totals.refused[error.slug] += len(chunk)
        except asyncio.CancelledError:
            self.totals.refused["unsent"] += len(chunk)
            raise
        except Exception as error:  # not its text, which could hold a report
            JOURNAL.exception("reports-lost", error, batch_id=job.batch_id)
            self.totals.refused["internal"] += len(chunk)
        finally:
            self.room.release()

    async def _seal_and_upload(
        self, job: Job, credential: Credential, chunk: Sequence[Lease], messages: Ints
    ) -> UploadReply:
        """Once more, sealed to the batch's present key, where the one remembered is outdated.

        The shuffler refuses such an upload before it reads it, so no report is sent twice.
        """
        try:
            sealed = await self.seal(job.keys, messages)
            return await self._upload(job, credential, chunk, sealed)
        except RemoteError as error:
            if error.slug != "outdated-key" or self.refetch is None:
                raise
        job = await self.refetch(credential, job)
        return await self._upload(job, credential, chunk, await self.seal(job.keys, messages))

    async def _upload(
        self, job: Job, credential: Credential, chunk: Sequence[Lease], sealed: bytes
    ) -> UploadReply:
        size = job.plan.descriptor.report_bytes
        leases = [lease.lease for lease in chunk]
        body = b"".join(
            frame(lease, sealed[i * size : (i + 1) * size]) for i, lease in enumerate(leases)
        )
        deadline = job.plan.descriptor.expires_at
        used = key_id(job.keys.batch_key)
        return await self.api.upload(credential.token, job.batch_id, leases, body, deadline, used)

    def _settle(self, reply: UploadReply) -> None:
        for result in reply.results:
            if result.outcome in {"accepted", "replayed"}:
                self.totals.accepted += 1
            else:
                self.totals.refused[result.outcome] += 1
