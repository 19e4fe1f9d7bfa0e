"""Turns leases into stored reports: episodes, encoding, sealing and upload, in bounded memory.

A lease ends even if its report has not arrived, so a node asks only users whom it can serve in time
(`ReportTiming`). If an episode takes too long, a report of noise only is sent in time. Otherwise a
missing report would show that this user was slow.

A chunk is several whole reports of one node in one batch. An environment serves one user at a time,
so only one chunk's episodes run at a time. Meanwhile earlier chunks are sealed and uploaded. If the
shuffler stays unreachable, as many chunks wait as ``capacity`` allows, and no episodes begin.

A sealed report is kept, and sent again unchanged, until the shuffler has stored it or refuses it
for good. Nothing about an episode is stored or logged.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from riffle.common.mechanism.workflow import Report
from riffle.common.process.workers import finish
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import RemoteError, RiffleError
from riffle.common.protocol.signatures import key_id
from riffle.common.protocol.wire import Lease, UploadReply, frame
from riffle.node_client.environments.tabular import Environment
from riffle.node_client.episode import slot_report
from riffle.node_client.ledger import UNCHARGED, Charge
from riffle.node_client.sealing import MOST_CHUNK, SealKeys, whole_reports
from riffle.node_client.settings import JOURNAL, Credential
from riffle.node_client.shuffler_client import ShufflerClient
from riffle.node_client.trust import AcceptedBatch
from riffle.node_client.users import Users

PORTION = 0.25
"""Part of a lease's time in which the reports of all asked users should be accepted or refused."""

SLOWEST = 0.5
"""Part of a lease's time that sealing and uploading one report may take."""

KEPT = 0.7
"""Weight of earlier measurements when a new one is added."""

MOST_DOUBLINGS = 12  # doublings of the pause while no report is accepted, up to about an hour

Seal = Callable[[SealKeys, Report], Awaitable[bytes]]


@dataclass(slots=True)
class Rate:
    """The average seconds per item, weighted toward recent measurements."""

    seconds: float = 0.0
    things: float = 0.0

    def record(self, seconds: float, things: int) -> None:
        """Records that ``things`` items took ``seconds`` together."""
        self.seconds = KEPT * self.seconds + seconds
        self.things = KEPT * self.things + things

    @property
    def mean(self) -> float:
        """The seconds per item; 0 before the first measurement."""
        return self.seconds / self.things if self.things else 0.0


@dataclass(slots=True)
class ReportTiming:
    """Measured seconds to run and encode an episode, and to seal and upload one message.

    ``under_way`` counts the asked users whose reports are not yet accepted or refused.
    ``in_vain`` starts at one and counts the chunks since the last accepted report. While
    ``in_vain`` is above zero, the node asks one user at a time, and nobody before ``retry_at``.
    """

    lease_seconds: float = 0.0
    episodes: Rate = field(default_factory=Rate)
    messages: Rate = field(default_factory=Rate)
    under_way: int = 0
    in_vain: int = 1
    retry_at: float = 0.0
    _last_end: float = 0.0

    def record_delivery(self, start: float, now: float, messages: int, accepted: int) -> None:
        """Records a chunk of ``messages`` messages, ready at ``start`` and delivered at ``now``.

        Chunks are sealed one after another. A chunk's own time begins when the previous chunk has
        ended.
        """
        self.messages.record(now - max(start, self._last_end), messages)
        self._last_end = now
        self.in_vain = 0 if accepted else self.in_vain + 1
        self.retry_at = now + 2.0 ** min(self.in_vain, MOST_DOUBLINGS) if self.in_vain else 0.0

    def is_too_slow(self, L: int) -> bool:
        """Returns whether one report of L messages takes too long, or the speed is unknown."""
        return not self.messages.things or L * self.messages.mean > SLOWEST * self.lease_seconds

    def most_users(
        self, L: int, now: float, left: float = math.inf, episode_seconds: int = 0
    ) -> int:
        """Returns how many more users may be asked now. The batch ends in ``left`` seconds."""
        if self.is_too_slow(L) or now < self.retry_at or left <= episode_seconds:
            return 0
        # A lease ends with its batch.
        seconds = PORTION * min(self.lease_seconds + episode_seconds, left)
        fitting = int(seconds / max(self._report_seconds(L), 1e-6))
        most = 1 if self.in_vain else max(1, fitting)
        return max(0, most - self.under_way)

    def in_time(
        self, leases: Sequence[Lease], L: int, now: float, episode_seconds: int = 0
    ) -> list[Lease]:
        """Returns leases with enough time to send first all reports under way, then their own."""
        seconds, chosen = self._report_seconds(L), list[Lease]()
        for lease in leases:
            ready = now + seconds * (self.under_way + len(chosen) + 1)
            if now + episode_seconds < lease.expires_at >= ready:
                chosen.append(lease)
        return chosen

    def _report_seconds(self, L: int) -> float:
        return self.episodes.mean + L * self.messages.mean


@dataclass(frozen=True, slots=True)
class Job:
    """An accepted batch with the objects that its reports need."""

    batch: BatchDescriptor
    keys: SealKeys
    charge: Charge = UNCHARGED

    def episode_time(self, left: float, share: float) -> float:
        """Returns an episode's time limit: declared time plus ``share`` of the rest of ``left``."""
        declared = self.batch.episode_seconds or 0
        return declared + share * max(0.0, left - declared)

    @classmethod
    def of(cls, accepted: AcceptedBatch, charge: Charge = UNCHARGED) -> "Job":
        """Prepares an accepted batch. ``charge`` is the privacy that one report spends."""
        keys = SealKeys.of(accepted.context, accepted.batch_key)
        return cls(accepted.context.descriptor, keys, charge)

    async def upload(
        self, shuffler: ShufflerClient, token: str, leases: Sequence[Lease], sealed: bytes
    ) -> UploadReply:
        """Uploads sealed reports, concatenated in the order of ``leases``.

        Raises the errors of `ShufflerClient.upload`.
        """
        d, key = self.batch, key_id(self.keys.batch_key)
        names, size = [lease.lease for lease in leases], d.report_bytes
        body = b"".join(frame(n, sealed[i * size : (i + 1) * size]) for i, n in enumerate(names))
        return await shuffler.upload(token, d.batch_id, names, body, d.expires_at, key)


@dataclass(slots=True)
class Totals:
    """Counts of this process's episodes and reports.

    ``refused`` has counts by problem slug. ``failed`` counts failed episodes.
    """

    episodes: int = 0
    failed: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Progress:
    """Progress of a chunk's episodes: their messages, how many failed, and whether to stop."""

    environment: Environment | None
    rows: list[Report | None]
    failed: int = 0
    halted: bool = False


@dataclass(slots=True)
class Pipeline:
    """The path of reports from lease to shuffler, shared by all nodes of a process.

    ``refetch`` fetches a job again, with the batch's current key. In an app, ``environment`` is
    None.
    """

    environment: Environment | None
    seal: Seal
    shuffler: ShufflerClient
    users: Users
    totals: Totals
    capacity: asyncio.Semaphore
    test_entry: bool
    episode_share: float = 0.5
    timing: ReportTiming = field(default_factory=ReportTiming)
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    refetch: Callable[[Credential, Job], Awaitable[Job]] | None = None
    _deliveries: set[asyncio.Task[None]] = field(default_factory=set)
    _short_lease_logged: bool = False
    _episodes: asyncio.Future[None] | None = None

    @property
    def is_stuck(self) -> bool:
        """Returns whether an overdue episode still runs. Its report holds only noise."""
        return self._episodes is not None and not self._episodes.done()

    async def rehearse(self, job: Job) -> None:
        """Measures the speed of sealing with a report of zeros, which is thrown away.

        If sealing was slow, measures once more, because new processes seal their first report
        slowly.
        """
        for _ in range(2):
            start = self.monotonic()
            await self.seal(job.keys, job.keys.zeros())
            self.timing.messages = Rate(self.monotonic() - start, job.keys.messages)
            if not self.timing.is_too_slow(job.keys.messages):
                return

    async def submit(self, job: Job, credential: Credential, leases: Sequence[Lease]) -> int:
        """Runs and encodes these users' episodes; seals and uploads reports in the background.

        Asks only users with leases that last long enough. Returns how many users it asked.
        """
        step, asked = whole_reports(MOST_CHUNK, job.keys.size), 0
        for start in range(0, len(leases), step):
            await self.capacity.acquire()
            chunk: Sequence[Lease] = ()
            try:
                chunk = await self._ask(job, self.in_time(job, leases[start : start + step]))
                self.timing.under_way += len(chunk)
                encoded = await self._encode(job, chunk) if chunk else None
            except BaseException:
                self.users.give_back(chunk, job.charge)
                self._release(chunk)
                raise
            if encoded is None:
                self.capacity.release()
                continue
            asked += len(chunk)
            task = asyncio.create_task(self._deliver(job, credential, chunk, *encoded))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)
        return asked

    async def drain(self, seconds: float) -> None:
        """Waits ``seconds`` for reports in progress; gives up the rest, which count as unsent."""
        await finish(self._deliveries, seconds)
        if self.totals.failed:  # a number only, which names no user
            failed, episodes = self.totals.failed, self.totals.episodes
            JOURNAL.note("episodes-failed", logging.WARNING, failed=failed, episodes=episodes)

    def _release(self, chunk: Sequence[Lease]) -> None:
        self.timing.under_way -= len(chunk)
        self.capacity.release()

    def in_time(self, job: Job, leases: Sequence[Lease]) -> list[Lease]:
        """Returns the leases with enough time for a report. Only their users may be asked."""
        L, now = job.keys.messages, self.clock()
        stuck, seconds = self.is_stuck, job.batch.episode_seconds or 0
        chosen = [] if stuck else self.timing.in_time(leases, L, now, seconds)
        if len(chosen) < len(leases) and not self._short_lease_logged:
            self._short_lease_logged = True
            JOURNAL.note("leases-end-too-soon", logging.WARNING, batch_id=job.batch.batch_id)
        return chosen

    async def _ask(self, job: Job, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Marks users as asked if their lifetime limit allows it; returns these users' leases."""
        users = [lease.user for lease in leases]
        asked = frozenset(await asyncio.to_thread(self.users.mark_asked, users, job.charge))
        return [lease for lease in leases if lease.user in asked]

    async def _encode(self, job: Job, chunk: Sequence[Lease]) -> tuple[Report, int]:
        """Returns the messages of a chunk's reports, and how many episodes ended in time.

        The reports of overdue episodes contain only noise. While an overdue episode runs, no other
        begins (`is_stuck`).
        """
        progress, start = _Progress(self.environment, [None] * len(chunk)), self.monotonic()
        left = min(lease.expires_at for lease in chunk) - self.clock()
        run = asyncio.to_thread(self._run_episodes, job, chunk, progress)
        self._episodes = asyncio.ensure_future(run)
        try:
            seconds = job.episode_time(left, self.episode_share)
            await asyncio.wait({self._episodes}, timeout=seconds)
        except BaseException:
            self.totals.refused["unsent"] += self._count(progress)
            raise
        finally:
            progress.halted = True  # the thread ends its current episode and begins no other
        if self._episodes.done():
            self._episodes.result()
        whole = _Progress(None, list(progress.rows), progress.failed)
        if overdue := sum(row is None for row in whole.rows):
            JOURNAL.note(
                "episodes-overdue", logging.WARNING, batch_id=job.batch.batch_id, failed=overdue
            )
            await asyncio.to_thread(self._run_episodes, job, chunk, whole)
        self.timing.episodes.record(self.monotonic() - start, self._count(whole))
        return np.stack([row for row in whole.rows if row is not None]), len(chunk) - overdue

    def _run_episodes(self, job: Job, chunk: Sequence[Lease], progress: _Progress) -> None:
        """Fills ``progress`` user by user, in a thread."""
        for i, lease in enumerate(chunk):
            if progress.halted:
                return
            if progress.rows[i] is None:
                episode, progress.rows[i] = slot_report(
                    job.batch, progress.environment, lease.slot, test_entry=self.test_entry
                )
                progress.failed += episode is None

    def _count(self, progress: _Progress) -> int:
        if progress.failed and not self.totals.failed:
            JOURNAL.note("environment-failed", logging.WARNING)  # the report is only noise
        episodes = sum(row is not None for row in progress.rows)
        self.totals.failed += progress.failed
        self.totals.episodes += episodes
        return episodes

    async def _deliver(
        self,
        job: Job,
        credential: Credential,
        chunk: Sequence[Lease],
        messages: Report,
        in_time: int,
    ) -> None:
        """Seals and uploads a chunk of reports; ``in_time`` of their episodes ended in time."""
        start, accepted, leaving = self.monotonic(), 0, list[bytes]()
        batch_id, count = job.batch.batch_id, len(chunk)
        try:
            reply = await self.seal_and_upload(job, credential, chunk, messages, leaving.append)
            accepted = self.settle(reply)
        except RiffleError as error:
            JOURNAL.problem("reports-refused", error, batch_id=batch_id)
            self.totals.refused[error.slug] += count
        except asyncio.CancelledError:
            self.totals.refused["unsent"] += count
            raise
        except Exception as error:  # the error's text is not logged: it could hold a report
            JOURNAL.exception("reports-lost", error, batch_id=batch_id)
            self.totals.refused["internal"] += count
        finally:
            if not leaving:
                self.users.give_back(chunk, job.charge)
            self._release(chunk)
            done = min(accepted, in_time)
            self.timing.record_delivery(start, self.monotonic(), count * job.keys.messages, done)
            level = logging.INFO if done else logging.WARNING
            JOURNAL.note("uploaded", level, batch_id=batch_id, reports=count, accepted=accepted)

    async def seal_and_upload(
        self,
        job: Job,
        credential: Credential,
        chunk: Sequence[Lease],
        messages: Report,
        keep: Callable[[bytes], None],
    ) -> UploadReply:
        """Seals and uploads a chunk. If the batch's key has changed, repeats both with the new key.

        The shuffler does not read an upload with an outdated key, so it never gets a report twice.
        ``keep`` is called with the sealed reports before they leave.
        """

        async def send(job: Job) -> UploadReply:
            keep(sealed := await self.seal(job.keys, messages))
            return await job.upload(self.shuffler, credential.token, chunk, sealed)

        try:
            return await send(job)
        except RemoteError as error:
            if error.slug != "outdated-key" or self.refetch is None:
                raise
        return await send(await self.refetch(credential, job))

    def settle(self, reply: UploadReply) -> int:
        """Counts the outcomes of an upload. Returns the number of accepted reports."""
        outcomes = Counter(result.outcome for result in reply.results)
        accepted = outcomes.pop("accepted", 0) + outcomes.pop("replayed", 0)
        self.totals.accepted += accepted
        self.totals.refused.update(outcomes)
        return accepted
