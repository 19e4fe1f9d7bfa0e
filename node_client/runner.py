"""The loop of many nodes in one process: poll, check, lease, submit.

Nodes and open batches take turns, so that all nodes take part in every batch that has room. A
request names few users, so that no more users are asked than can report in time. A process that has
no users left or is too slow stays up and tells the shuffler why.

A batch's descriptor is checked once (`trust`). A refused batch is checked again after a pause,
because the cause may be temporary, such as a clock that jumped or a key that is pinned later.
"""

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.protocol.verification import check_expiry
from riffle.common.protocol.wire import DECLINE_SECONDS, DeclineReason, Lease, LeaseReply, OpenBatch
from riffle.node_client.ledger import Charge
from riffle.node_client.pipeline import Job, Pipeline
from riffle.node_client.sealing import LEAST_CHUNK, MOST_CHUNK, whole_reports
from riffle.node_client.settings import JOURNAL, Credential
from riffle.node_client.trust import Demands, accept

POLL_SECONDS = 20
PAUSE_SECONDS = 0.25
MOST_DOUBLINGS = 7  # doublings of the pause while the record of users fails, up to 30 seconds
IDLE_DOUBLINGS = 3  # doublings of the pause while no batch can be served, up to two seconds
DRAIN_SECONDS = 8.0  # container engines kill after 10
REMEMBERED_JOBS = 16
RETRY_SECONDS = 10.0  # before a node that holds its share of a batch asks again
REFUSAL_DOUBLINGS = 6  # doublings of the pause after refusals of a batch, up to ten minutes
REHEARSAL_SECONDS = 60.0  # before a node that is too slow measures its speed again
OnStart = Callable[[], None] | None
_REVOKED = frozenset({"unauthorized", "forbidden"})


@dataclass(slots=True)
class NodeState:
    """A node of this process, with its present limits.

    ``revoked``: the shuffler refuses the node's token. ``quota_reached``: the node may serve no new
    users. ``out_of_users``: the batches for which the node has no users left. ``retry_at``: when
    the node may ask for a batch again after the refusal ``share-exceeded``, by batch id.
    """

    credential: Credential
    revoked: bool = False
    quota_reached: bool = False
    out_of_users: set[str] = field(default_factory=set)
    retry_at: dict[str, float] = field(default_factory=dict)

    def leave(self, batch_id: str, until: float, now: float) -> None:
        """Leaves a batch to other nodes until ``until``. Deletes past times from ``retry_at``."""
        self.retry_at = {batch: end for batch, end in self.retry_at.items() if end > now}
        self.retry_at[batch_id] = until

    def may_ask(self, batch_id: str, now: float) -> bool:
        """Returns whether this node may ask for slots of a batch."""
        return not self.is_out(batch_id) and self.retry_at.get(batch_id, 0.0) <= now

    def is_out(self, batch_id: str) -> bool:
        """Returns whether this node is revoked, or has no users left for a batch."""
        return self.revoked or batch_id in self.out_of_users


@dataclass(slots=True)
class Runner:
    """The nodes of this process and the batches that they have checked."""

    nodes: deque[NodeState]
    demands: Demands
    pipeline: Pipeline
    users_a_request: int
    users_file: Path | None = None
    read_users: Callable[[], Mapping[str, Iterable[str]] | None] = lambda: None
    pins: Callable[[], frozenset[str] | None] = lambda: None
    pause: float = PAUSE_SECONDS
    on_start: OnStart = None  # is called when the shuffler has answered once
    _jobs: OrderedDict[str, Job] = field(default_factory=OrderedDict)
    _users_version: tuple[int, int] | None = None
    _refused: dict[str, tuple[float, int]] = field(default_factory=dict)
    _declined: dict[str, float] = field(default_factory=dict)
    _rehearse_at: float = 0.0
    _away: bool = False
    _idle_turns: int = 0  # consecutive
    _users_file_failures: int = 0  # consecutive

    def __post_init__(self) -> None:
        self.pipeline.refetch = self._refetch

    async def run(self, stop: asyncio.Event) -> None:
        """Serves batches until ``stop`` is set, then delivers the reports in progress.

        Raises LocalError ``unauthorized`` if the shuffler knows none of this process's nodes.
        """
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                turn = asyncio.create_task(self._turn(stop))
                await asyncio.wait({turn, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not turn.done():
                    turn.cancel()
                    await asyncio.gather(turn, return_exceptions=True)
                elif not turn.result():
                    doublings = max(
                        min(self._users_file_failures, MOST_DOUBLINGS),
                        min(self._idle_turns, IDLE_DOUBLINGS),
                    )
                    pause = self.pause * 2**doublings
                    await asyncio.wait({stopping}, timeout=pause)
        finally:
            stopping.cancel()
            await self.pipeline.drain(DRAIN_SECONDS)

    async def _turn(self, stop: asyncio.Event) -> bool:
        """Polls once and leases slots. Returns whether any user was asked."""
        await self._reload_users()
        node = self._next_node()
        try:
            jobs = await self.open_jobs(node, POLL_SECONDS)
        except RiffleError as error:
            self._log_failure(node, error)
            return False
        waiting = deque((job, free) for job, free in jobs if job is not None)
        total = 0
        while waiting and not stop.is_set():
            job, free = waiting.popleft()
            asked = await self._lease_and_submit(job, free)
            total += asked or 0
            if asked is None or 0 < asked < free:
                waiting.append((job, free - (asked or 0)))
        self._idle_turns = self._idle_turns + 1 if jobs and not total else 0
        return total > 0 and not self._users_file_failures

    async def open_jobs(self, node: NodeState, wait: int) -> list[tuple[Job | None, int]]:
        """Returns (job, free slots) for each open batch. The job of a refused batch is None.

        The shuffler waits up to ``wait`` seconds for a batch. Raises the errors of
        `ShufflerClient.open_batches`.
        """
        wait = 0 if self.on_start else wait
        reply = await self.pipeline.shuffler.open_batches(node.credential.token, wait)
        if self.on_start is not None:
            self.on_start()
            self.on_start = None
        self._away = False
        self.pipeline.timing.lease_seconds = reply.lease_seconds
        return [(await self._job(node, batch), batch.free_slots) for batch in reply.batches]

    async def _reload_users(self) -> None:
        """If the owner has changed the users file, replaces the users who were not asked yet."""
        if self.users_file is None or (version := _version(self.users_file)) == self._users_version:
            return
        self._users_version = version
        try:
            listed = await asyncio.to_thread(self.read_users)
            await asyncio.to_thread(self.pipeline.users.replace_unasked, listed or {})
        except LocalError as error:
            JOURNAL.problem("users-file", error)
            if error.slug == "unavailable":  # the record of users failed: try again next turn
                self._users_version = None
                self._users_file_failures += 1
            return
        for node in self.nodes:
            node.out_of_users.clear()
        JOURNAL.note("users-listed")

    async def _job(self, node: NodeState, batch: OpenBatch) -> Job | None:
        """Returns the checked batch, or None if it is refused. Remembers checked batches."""
        if self.pipeline.monotonic() < self._refused.get(batch.batch_id, (-math.inf, 0))[0]:
            return None
        try:
            job = await self.job(node, batch.batch_id)
            check_expiry(job.batch, self.pipeline.clock())
        except RemoteError as error:
            self._refuse(batch.batch_id, error)
            return None
        except LocalError as error:
            self._log_failure(node, error)
            return None
        return job

    async def job(self, node: NodeState, batch_id: str) -> Job:
        """Returns a checked batch; checks it now if this process has not done so.

        Raises RemoteError if the batch is refused, and LocalError if the shuffler does not serve
        it.
        """
        if (known := self._jobs.get(batch_id)) is not None:
            return known
        try:
            signed = await self.pipeline.shuffler.descriptor(node.credential.token, batch_id)
        except RemoteError as error:  # the descriptor may be valid: ask again at the next poll
            raise LocalError(error.slug, error.detail) from error
        demands = replace(self.demands, analyzer_keys=await asyncio.to_thread(self.pins))
        accepted = await asyncio.to_thread(accept, signed, batch_id, demands, self.pipeline.clock())
        descriptor = accepted.context.descriptor
        charge = Charge.of(descriptor, demands.coordinator_key, demands.required)
        job = Job.of(accepted, charge)
        self._jobs[batch_id] = job
        while len(self._jobs) > REMEMBERED_JOBS:
            self._jobs.popitem(last=False)
        JOURNAL.note("batch-accepted", batch_id=batch_id, messages=job.keys.messages)
        return job

    async def _lease_and_submit(self, job: Job, free: int) -> int | None:
        """Lets a node serve a batch. Returns how many users it asked; None: try another node."""
        node = self._node_for(job.batch.batch_id)
        if node is None:
            if all(node.is_out(job.batch.batch_id) for node in self.nodes):
                over = self.pipeline.users.over_limit(job.charge)
                await self._decline(job, "over-limit" if over else "no-users")
            return 0
        try:
            asked = await self._serve(node, job, free)
        except LocalError as error:  # a user who cannot be marked is not asked
            if error.slug != "unavailable":
                raise
            self._users_file_failures += 1
            JOURNAL.problem("users-file", error)
            return 0
        self._users_file_failures = 0
        return asked

    async def _serve(self, node: NodeState, job: Job, free: int) -> int | None:
        """Lets one node serve a batch. Raises LocalError if the record of users fails."""
        if self._users_file_failures:  # take no slot from others until users can be marked again
            await asyncio.to_thread(self.pipeline.users.check_writable)
        most = min(self.users_a_request, await self.most_users(job))
        if most == 0:
            return 0
        count = request_size(free, len(self.nodes), job.keys.size, most)
        name, invent = node.credential.node_id, not node.quota_reached
        users = await asyncio.to_thread(
            self.pipeline.users.next_users, name, count, job.charge, invent=invent
        )
        if not users:
            self._note_out_of_users(node, job)
            return None
        try:
            reply = await self.pipeline.shuffler.lease(
                node.credential.token, job.batch.batch_id, users
            )
        except RiffleError as error:
            self._log_failure(node, error)
            return None if node.revoked else 0
        leases = await asyncio.to_thread(self.record_reply, node, job, reply)
        if leases:
            JOURNAL.note("leased", batch_id=job.batch.batch_id, reports=len(leases))
        asked = await self.pipeline.submit(job, node.credential, leases)
        may_ask = node.may_ask(job.batch.batch_id, self.pipeline.monotonic())
        return asked if asked or may_ask else None

    def _note_out_of_users(self, node: NodeState, job: Job) -> None:
        users, name, batch_id = self.pipeline.users, node.credential.node_id, job.batch.batch_id
        node.out_of_users = (node.out_of_users & self._jobs.keys()) | {batch_id}
        JOURNAL.note("users-exhausted", logging.WARNING, batch_id=batch_id, node_id=name)
        if users.ledger is not None and (over := len(users.over_limit(job.charge))):
            detail = f"{over} people are not asked: with this batch they would pass their lifetime "
            detail += f"limit, {users.ledger.limit}"
            JOURNAL.note("over-limit", logging.WARNING, batch_id=batch_id, detail=detail)

    async def most_users(self, job: Job) -> int:
        """Returns how many users may be asked. Declines the batch if this process is too slow."""
        pipeline, timing, L = self.pipeline, self.pipeline.timing, job.keys.messages
        if timing.is_too_slow(L) and pipeline.monotonic() >= self._rehearse_at:
            try:
                await pipeline.rehearse(job)
            except LocalError as error:
                JOURNAL.problem("rehearsal-failed", error, batch_id=job.batch.batch_id)
            self._rehearse_at = pipeline.monotonic() + REHEARSAL_SECONDS
        left = job.batch.expires_at - pipeline.clock()
        now, seconds = pipeline.monotonic(), job.batch.episode_seconds or 0
        most = 0 if pipeline.is_stuck else timing.most_users(L, now, left, seconds)
        if most == 0 and (timing.is_too_slow(L) or timing.in_vain > 1 or pipeline.is_stuck):
            await self._decline(job, "too-slow")
        elif not timing.in_vain:
            self._declined.pop(job.batch.batch_id, None)
        return most

    async def _decline(self, job: Job, reason: DeclineReason) -> None:
        """Tells the shuffler, at intervals, why no user is asked to report to a batch."""
        batch_id, now = job.batch.batch_id, self.pipeline.monotonic()
        if batch_id not in self._declined:
            JOURNAL.note("given-up", logging.WARNING, batch_id=batch_id, reason=reason)
        elif now < self._declined[batch_id] + DECLINE_SECONDS:
            return
        node, self._declined[batch_id] = self._next_node(), now
        try:
            await self.pipeline.shuffler.decline(node.credential.token, batch_id, reason)
        except RiffleError as error:
            self._log_failure(node, error)

    def record_reply(self, node: NodeState, job: Job, reply: LeaseReply) -> Sequence[Lease]:
        """Records why users were refused; returns the leases that have a slot number below n."""
        refused: dict[str, list[str]] = {}
        for refusal in reply.refused:
            refused.setdefault(refusal.problem, []).append(refusal.user)
        self.pipeline.users.set_aside(refused.get("user-unavailable", ()), job.charge)
        if "share-exceeded" in refused:
            now = self.pipeline.monotonic()
            node.leave(job.batch.batch_id, now + RETRY_SECONDS, now)
        if over_quota := refused.get("quota-exceeded"):
            self.pipeline.users.forget(over_quota)
            if not node.quota_reached:
                name = node.credential.node_id
                JOURNAL.note("users-exhausted", logging.WARNING, node_id=name)
            node.quota_reached = True
        return [lease for lease in reply.leases if lease.slot < job.batch.n]

    def _next_node(self) -> NodeState:
        for _ in range(len(self.nodes)):
            node = self.nodes[0]
            self.nodes.rotate(-1)
            if not node.revoked:
                return node
        raise LocalError(
            "unauthorized",
            "the shuffler knows no token of this process's nodes: enrol them, and see "
            "RIFFLE_NODE_CREDENTIALS_FILE",
        )

    def _node_for(self, batch_id: str) -> NodeState | None:
        """Returns the next node that may ask for slots of a batch now; None if no node may."""
        for _ in range(len(self.nodes)):
            node = self._next_node()
            if node.may_ask(batch_id, self.pipeline.monotonic()):
                return node
        return None

    async def _refetch(self, credential: Credential, job: Job) -> Job:
        """Returns the batch with its current key.

        Raises RemoteError if the batch is refused or has another descriptor now, and LocalError if
        the shuffler does not answer.
        """
        self._jobs.pop(job.batch.batch_id, None)
        fresh = await self.job(NodeState(credential), job.batch.batch_id)
        if fresh.keys.message_info != job.keys.message_info:
            raise RemoteError("outdated-key", "the batch has another descriptor now")
        return fresh

    def _refuse(self, batch_id: str, error: RemoteError) -> None:
        """Refuses a batch for a while, longer each time. Logs only the first time."""
        _, times = self._refused.get(batch_id, (0.0, 0))
        pause = RETRY_SECONDS * 2 ** min(times, REFUSAL_DOUBLINGS)
        self._refused[batch_id] = self.pipeline.monotonic() + pause, times + 1
        self._jobs.pop(batch_id, None)
        if not times:
            JOURNAL.problem("batch-refused", error, batch_id=batch_id)

    def _log_failure(self, node: NodeState, error: RiffleError) -> None:
        """Logs a failed call. If the node's token was refused, marks the node as revoked."""
        if error.slug in _REVOKED and not node.revoked:
            node.revoked = True
            name = node.credential.node_id
            JOURNAL.problem("node-refused", error, logging.ERROR, node_id=name)
            return
        first_loss = error.slug == "unavailable" and not self._away
        self._away = self._away or first_loss
        level = logging.WARNING if first_loss else logging.INFO
        JOURNAL.problem("waiting", error, level)


def _version(file: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size
    return None


def request_size(free: int, nodes: int, messages: int, users_a_request: int) -> int:
    """Returns how many users to name in one lease request, for reports of ``messages`` messages."""
    fair = math.ceil(free / nodes)
    least, most = (whole_reports(chunk, messages) for chunk in (LEAST_CHUNK, MOST_CHUNK))
    return max(1, min(max(fair, least), most, free, users_a_request))
