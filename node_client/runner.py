"""The loop of many nodes in one process: poll, check, lease, hand over, go on.

One node at a time polls for batches, in turn. A batch's descriptor is fetched and checked once
(`trust`); a refusal is logged once and the batch skipped from then on. Leases are taken in small
portions, the nodes and the open batches taking turns, so that all nodes take part in every batch
with room for them, and no more users are asked than can be run and sealed soon. A node that holds
its share of a batch leaves it to the others, and asks again later: leases of its own may end.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.protocol.messages import Lease, LeaseReply, OpenBatch
from riffle.node_client.journal import JOURNAL, note
from riffle.node_client.pipeline import Job, Pipeline
from riffle.node_client.sealing import LEAST_CHUNK, MOST_CHUNK, whole_reports
from riffle.node_client.settings import Credential
from riffle.node_client.shuffler_client import ShufflerApi
from riffle.node_client.trust import Demands, accept, check_expiry
from riffle.node_client.users import Users

POLL_SECONDS = 20
PAUSE_SECONDS = 0.25
MOST_DOUBLINGS = 7  # of it, while the users' file fails: half a minute
DRAIN_SECONDS = 8.0  # container engines kill after 10
KEPT_JOBS = 16
LATER_SECONDS = 10.0  # a node that holds its share of a batch asks again after this
_REVOKED = frozenset({"unauthorized", "forbidden"})


@dataclass(slots=True)
class NodeState:
    """One node: token refused; no new users allowed; none left to ask; batches to leave alone.

    ``later`` is batch id -> when to ask again, after a refusal ``share-exceeded``.
    """

    credential: Credential
    revoked: bool = False
    full: bool = False
    idle: bool = False
    later: dict[str, float] = field(default_factory=dict)

    def leave(self, batch_id: str, until: float, now: float) -> None:
        """Leave a batch to other nodes for a while; forget what is over."""
        self.later = {batch: end for batch, end in self.later.items() if end > now}
        self.later[batch_id] = until

    def may_ask(self, batch_id: str, now: float) -> bool:
        """Whether this node may ask for slots of a batch."""
        return not (self.revoked or self.idle) and self.later.get(batch_id, 0.0) <= now


@dataclass(slots=True)
class Runner:
    """The nodes of this process and what they know of batches."""

    nodes: deque[NodeState]
    demands: Demands
    api: ShufflerApi
    users: Users
    pipeline: Pipeline
    users_a_request: int
    pins: Callable[[], frozenset[str] | None] = lambda: None
    clock: Callable[[], float] = time.time
    pause: float = PAUSE_SECONDS
    _jobs: OrderedDict[str, Job] = field(default_factory=OrderedDict)
    _refused: dict[str, float] = field(default_factory=dict)  # until when
    _away: bool = False
    _failures: int = 0  # of the users' file, since it last worked

    def __post_init__(self) -> None:
        self.pipeline.refetch = self._refetched

    async def run(self, stop: asyncio.Event) -> None:
        """Serve batches until ``stop`` is set, then deliver what is on its way.

        Raises:
            LocalError: ``unauthorized``: the shuffler knows none of this process's nodes;
                ``quota-exceeded``: no node may serve another user.
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
                    pause = self.pause * 2 ** min(self._failures, MOST_DOUBLINGS)
                    await asyncio.wait({stopping}, timeout=pause)
        finally:
            stopping.cancel()
            await self.pipeline.drain(DRAIN_SECONDS)

    async def _turn(self, stop: asyncio.Event) -> bool:
        """One poll and the leases it leads to; whether a lease was granted."""
        node = self._next_node()
        try:
            listed = await self.api.open_batches(node.credential.token, POLL_SECONDS)
        except RiffleError as error:
            self._note(node, error)
            return False
        self._away = False
        jobs = [(await self._job(node, batch), batch.free_slots) for batch in listed.batches]
        waiting = deque((job, free) for job, free in jobs if job is not None)
        granted = 0
        while waiting and not stop.is_set():
            job, free = waiting.popleft()
            leases = await self._lease_and_submit(job, free)
            granted += leases or 0
            if leases is None or 0 < leases < free:
                waiting.append((job, free - (leases or 0)))
        return granted > 0 and not self._failures

    async def _job(self, node: NodeState, batch: OpenBatch) -> Job | None:
        """The checked batch, from memory when it was checked before; None when it is refused."""
        if self.clock() < self._refused.get(batch.batch_id, -math.inf):
            return None
        job = self._jobs.get(batch.batch_id)
        try:
            if job is None:
                job = await self._check(node, batch.batch_id)
            check_expiry(job.plan.descriptor, self.clock())
        except RemoteError as error:
            self._refuse(batch.batch_id, error)
            return None
        except LocalError as error:
            self._note(node, error)
            return None
        return job

    async def _check(self, node: NodeState, batch_id: str) -> Job:
        try:
            signed = await self.api.descriptor(node.credential.token, batch_id)
        except RemoteError as error:  # not the descriptor's fault: ask again at the next poll
            raise LocalError(error.slug, error.detail) from error
        demands = replace(self.demands, analyzer_keys=await asyncio.to_thread(self.pins))
        accepted = await asyncio.to_thread(accept, signed, batch_id, demands, self.clock())
        job = Job.of(accepted)
        self._jobs[batch_id] = job
        while len(self._jobs) > KEPT_JOBS:
            self._jobs.popitem(last=False)
        note("batch-accepted", batch_id=batch_id, messages=job.keys.messages)
        return job

    async def _lease_and_submit(self, job: Job, free: int) -> int | None:
        """One node's portion of a batch: how many users it asked; None: ask another node."""
        node = self._node_for(job.batch_id)
        if node is None:
            return 0
        try:
            left = await self._ask(node, job, free)
        except LocalError as error:  # of the users' file; who was not marked is not asked
            if error.slug != "unavailable":
                raise
            self._failures += 1
            JOURNAL.problem("users-file", error)
            return 0
        self._failures = 0
        return left

    async def _ask(self, node: NodeState, job: Job, free: int) -> int | None:
        """As `_lease_and_submit`, of this node.

        Raises:
            LocalError: the users' file fails; leases that were not used run out.
        """
        if self._failures:  # no slot is taken from others before users can be marked again
            await asyncio.to_thread(self.users.check)
        most = min(self.users_a_request, self.pipeline.pace.most_users())
        count = portion(free, len(self.nodes), job.keys.messages, most)
        name = node.credential.node_id
        users = await asyncio.to_thread(self.users.waiting, name, count, make=not node.full)
        if not users:
            node.idle = True
            return None
        try:
            reply = await self.api.lease(node.credential.token, job.batch_id, users)
        except RiffleError as error:
            self._note(node, error)
            return None if node.revoked else 0
        leases = await asyncio.to_thread(self._heed, node, job, reply)
        asked = await self.pipeline.submit(job, node.credential, leases)
        left = not node.may_ask(job.batch_id, self.clock())
        return None if left and not asked else asked

    def _heed(self, node: NodeState, job: Job, reply: LeaseReply) -> Sequence[Lease]:
        """Note why users were refused; the leases that make sense."""
        by_problem: dict[str, list[str]] = {}
        for refusal in reply.refused:
            by_problem.setdefault(refusal.problem, []).append(refusal.user)
        for problem in ("already-reported", "forbidden"):  # somebody else asked them
            self.users.mark_asked(by_problem.get(problem, ()))
        self.users.set_aside(by_problem.get("wrong-state", ()))
        self.pipeline.pace.granted(reply.leases, self.clock())
        if "share-exceeded" in by_problem:
            node.leave(job.batch_id, self.clock() + LATER_SECONDS, self.clock())
        if over_quota := by_problem.get("quota-exceeded"):
            self.users.forget(over_quota)
            if not node.full:
                note("users-exhausted", logging.WARNING, node_id=node.credential.node_id)
            node.full = True
        return [lease for lease in reply.leases if lease.slot < job.plan.descriptor.n]

    def _next_node(self) -> NodeState:
        for _ in range(len(self.nodes)):
            node = self.nodes[0]
            self.nodes.rotate(-1)
            if not (node.revoked or node.idle):
                return node
        if any(node.idle for node in self.nodes):
            raise LocalError("quota-exceeded", "the nodes have asked all users they may serve")
        raise LocalError("unauthorized", "the shuffler refuses every node of this process")

    def _node_for(self, batch_id: str) -> NodeState | None:
        """The next node that may ask for slots of this batch; None: all shall leave it for now."""
        for _ in range(len(self.nodes)):
            node = self._next_node()
            if node.may_ask(batch_id, self.clock()):
                return node
        return None

    async def _refetched(self, credential: Credential, job: Job) -> Job:
        """The same batch as the shuffler serves it now.

        Raises:
            RemoteError: it is another batch, or not to be served.
            LocalError: the shuffler does not answer.
        """
        self._jobs.pop(job.batch_id, None)
        found = await self._check(NodeState(credential), job.batch_id)
        if found.keys.message_info != job.keys.message_info:
            raise RemoteError("outdated-key", "the batch has another descriptor now")
        return found

    def _refuse(self, batch_id: str, error: RemoteError) -> None:
        """For good; a key that is not pinned may be pinned later."""
        again = error.slug == "outdated-key"
        told = again and batch_id in self._refused
        self._refused[batch_id] = self.clock() + LATER_SECONDS if again else math.inf
        self._jobs.pop(batch_id, None)
        if not told:
            JOURNAL.problem("batch-refused", error, batch_id=batch_id)

    def _note(self, node: NodeState, error: RiffleError) -> None:
        if error.slug in _REVOKED and not node.revoked:
            node.revoked = True
            name = node.credential.node_id
            JOURNAL.problem("node-refused", error, logging.ERROR, node_id=name)
            return
        first_loss = error.slug == "unavailable" and not self._away
        self._away = self._away or first_loss
        level = logging.WARNING if first_loss else logging.INFO
        JOURNAL.problem("waiting", error, level)


def portion(free: int, nodes: int, messages: int, users_a_request: int) -> int:
    """Users of one lease request, in a batch with ``free`` slots and L = ``messages`` a report.

    The node's fair share of the free slots, as a chunk may have it (see `sealing`), and at most
    what is free, and ``users_a_request``.
    """
    fair = math.ceil(free / nodes)
    least, most = (whole_reports(chunk, messages) for chunk in (LEAST_CHUNK, MOST_CHUNK))
    return max(1, min(max(fair, least), most, free, users_a_request))
