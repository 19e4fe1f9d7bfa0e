"""From leases to stored reports: episodes, encoding, sealing and upload, with bounded memory.

A user who was asked is never asked again, and a lease ends whether or not its report has arrived.
So `EpisodeTiming` (pure: times are arguments) lets a node ask only users whose episodes can end
within their leases.

A chunk is some whole reports of one node in one batch. Episodes and encoding run in a thread, one
chunk at a time (an environment serves one user at a time), while the pool seals earlier chunks and
still earlier ones are uploaded, so that every core seals all the time. A chunk takes one unit of
``capacity`` from before its episodes run until the shuffler has decided on its reports. A shuffler
that is away therefore stops episodes, not the node.

A sealed report is kept, and sent again unchanged, until it is accepted, replayed, or refused for
good. Nothing of an episode is stored or logged: totals count reports, and never say whose.
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
from riffle.common.protocol.wire import Lease, UploadReply, frame
from riffle.node_client.environments.tabular import Environment
from riffle.node_client.episode import PreparedBatch, slot_report
from riffle.node_client.sealing import MOST_CHUNK, SealKeys, whole_reports
from riffle.node_client.settings import JOURNAL, Credential
from riffle.node_client.shuffler_client import ShufflerClient
from riffle.node_client.trust import AcceptedBatch
from riffle.node_client.users import Users

LEASE_SHARE = 0.25
"""Part of a lease that the episodes of one request may take; sealing, upload and retries follow."""

NEWEST_WEIGHT = 0.3
"""Weight of the newest measurement in the running mean."""

Seal = Callable[[SealKeys, Ints], Awaitable[bytes]]


@dataclass(slots=True)
class EpisodeTiming:
    """Measured seconds of an episode with its encoding (None: unknown), and seconds of a lease."""

    episode_seconds: float | None = None
    lease_seconds: float = 0.0

    def record_episodes(self, seconds: float, episodes: int) -> None:
        """Records that ``episodes``, one or more, took ``seconds`` together."""
        newest = seconds / episodes
        mean = newest if self.episode_seconds is None else self.episode_seconds
        self.episode_seconds = mean + NEWEST_WEIGHT * (newest - mean)

    def record_leases(self, leases: Sequence[Lease], now: float) -> None:
        """Records how long leases granted at ``now`` (seconds since 1970, UTC) last."""
        if leases:
            self.lease_seconds = max(lease.expires_at for lease in leases) - now

    def most_users(self) -> int:
        """Returns the most users of one lease request; one until an episode was measured."""
        if self.episode_seconds is None:
            return 1
        return max(1, int(LEASE_SHARE * self.lease_seconds / max(self.episode_seconds, 1e-6)))

    def in_time(self, leases: Sequence[Lease], now: float) -> list[Lease]:
        """Returns the leases that outlast their episodes, run one after another from ``now``.

        If the measurement alone excludes all of them it is forgotten: one long pause of the machine
        must not stop the node for good.
        """
        seconds = self.episode_seconds or 0.0
        chosen: list[Lease] = []
        for lease in leases:
            if lease.expires_at > now and lease.expires_at >= now + seconds * (len(chosen) + 1):
                chosen.append(lease)
        if not chosen and any(lease.expires_at > now for lease in leases):
            self.episode_seconds = None
        return chosen


@dataclass(frozen=True, slots=True)
class Job:
    """An accepted batch with what its reports need."""

    batch_id: str
    batch: PreparedBatch
    keys: SealKeys

    @classmethod
    def of(cls, accepted: AcceptedBatch) -> "Job":
        """Prepares an accepted batch."""
        descriptor = accepted.context.descriptor
        keys = SealKeys.of(accepted.context, accepted.batch_key)
        return cls(descriptor.batch_id, PreparedBatch.of(descriptor), keys)


@dataclass(slots=True)
class Totals:
    """Counts of this process's episodes and reports. ``refused`` counts by problem slug.

    The environment failed in ``failed`` of the episodes; their reports carry noise only.
    """

    episodes: int = 0
    failed: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Progress:
    """A chunk's episodes so far: their messages, how many failed, whether to stop."""

    rows: list[Ints] = field(default_factory=list)
    failed: int = 0
    halted: bool = False


@dataclass(slots=True)
class Pipeline:
    """The path of reports from lease to shuffler, shared by all nodes of a process.

    ``refetch`` returns a job with the batch's present key.
    """

    environment: Environment
    seal: Seal
    shuffler: ShufflerClient
    users: Users
    totals: Totals
    capacity: asyncio.Semaphore
    test_entry: bool
    timing: EpisodeTiming = field(default_factory=EpisodeTiming)
    clock: Callable[[], float] = time.time
    refetch: Callable[[Credential, Job], Awaitable[Job]] | None = None
    _deliveries: set[asyncio.Task[None]] = field(default_factory=set)
    _short_lease_logged: bool = False

    async def submit(self, job: Job, credential: Credential, leases: Sequence[Lease]) -> int:
        """Runs and encodes these users' episodes; seals and uploads them in the background.

        Users whose leases end too soon are not asked. Returns how many users were asked.
        """
        step, asked = whole_reports(MOST_CHUNK, job.keys.messages), 0
        for start in range(0, len(leases), step):
            await self.capacity.acquire()
            try:
                chunk = self._in_time(leases[start : start + step])
                messages = await self._encode(job, chunk) if chunk else None
            except BaseException:
                self.capacity.release()
                raise
            if messages is None:
                self.capacity.release()
                continue
            asked += len(chunk)
            task = asyncio.create_task(self._deliver(job, credential, chunk, messages))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)
        return asked

    async def drain(self, seconds: float) -> None:
        """Waits for the reports on their way, then gives up the rest (counted as unsent)."""
        if self._deliveries:
            _, late = await asyncio.wait(self._deliveries, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self.totals.failed:  # a number, and never whose
            failed, episodes = self.totals.failed, self.totals.episodes
            JOURNAL.note("episodes-failed", logging.WARNING, failed=failed, episodes=episodes)

    def _in_time(self, leases: Sequence[Lease]) -> list[Lease]:
        """Returns the leases that can be met; decided before any user is marked as asked."""
        chosen = self.timing.in_time(leases, self.clock())
        if len(chosen) < len(leases) and not self._short_lease_logged:
            self._short_lease_logged = True
            JOURNAL.note("leases-end-too-soon", logging.WARNING)
        return chosen

    async def _encode(self, job: Job, chunk: Sequence[Lease]) -> Ints:
        await asyncio.to_thread(self.users.mark_asked, [lease.user for lease in chunk])
        progress, start = _Progress(), time.monotonic()
        try:
            await asyncio.to_thread(self._run_episodes, job, chunk, progress)
        except BaseException:
            progress.halted = True  # the thread ends its present episode, and begins no other
            self.totals.refused["unsent"] += self._count(progress)
            raise
        self.timing.record_episodes(time.monotonic() - start, self._count(progress))
        return np.stack(progress.rows)

    def _run_episodes(self, job: Job, chunk: Sequence[Lease], progress: _Progress) -> None:
        """Fills ``progress`` user by user, in a thread."""
        for lease in chunk:
            if progress.halted:
                return
            episode, messages = slot_report(
                job.batch, self.environment, lease.slot, test_entry=self.test_entry
            )
            progress.failed += episode is None
            progress.rows.append(messages)

    def _count(self, progress: _Progress) -> int:
        if progress.failed and not self.totals.failed:
            JOURNAL.note("environment-failed", logging.WARNING)  # its report carries noise only
        episodes = len(progress.rows)
        self.totals.failed += progress.failed
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
            self.capacity.release()

    async def _seal_and_upload(
        self, job: Job, credential: Credential, chunk: Sequence[Lease], messages: Ints
    ) -> UploadReply:
        """Seals once more, to the batch's present key, if the remembered key is outdated.

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
        descriptor = job.batch.descriptor
        size, deadline = descriptor.report_bytes, descriptor.expires_at
        leases = [lease.lease for lease in chunk]
        body = b"".join(
            frame(lease, sealed[i * size : (i + 1) * size]) for i, lease in enumerate(leases)
        )
        batch_key = key_id(job.keys.batch_key)
        return await self.shuffler.upload(
            credential.token, job.batch_id, leases, body, deadline, batch_key
        )

    def _settle(self, reply: UploadReply) -> None:
        for result in reply.results:
            if result.outcome in {"accepted", "replayed"}:
                self.totals.accepted += 1
            else:
                self.totals.refused[result.outcome] += 1
