"""A node inside an app, which drives the episodes of its users itself, many at once.

An app shows its users actions, and learns what happened minutes or days later. Everything else is
the node's (`main`): checks, users, sealing, upload. What must survive a restart is in `episodes`.

A report carries noise and padding only if the user gave up, or did not report in time: no missing
report shows what a person did. If an app is gone for good, its slots go to others when their leases
end. The noise of its users is missing, and nothing else of them is known to anybody.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Self
from weakref import WeakValueDictionary

from riffle.common.mechanism.counters import Sizes
from riffle.common.protocol.errors import PROBLEMS, LocalError, RemoteError, RiffleError
from riffle.common.protocol.wire import Lease, UploadReply
from riffle.node_client.environments.tabular import Declaration
from riffle.node_client.episode import encode_episode, policy_word
from riffle.node_client.episodes import RecordedEpisode, Row, UserLease
from riffle.node_client.main import open_nodes
from riffle.node_client.pipeline import Job, Totals
from riffle.node_client.runner import DRAIN_SECONDS, RETRY_SECONDS, NodeState
from riffle.node_client.sealing import seal_in_thread
from riffle.node_client.settings import JOURNAL, AppSettings
from riffle.node_client.users import opaque_id

LONGEST_SLEEP = 60.0
"""A sleeping machine stops timers, so the clock is read again at this interval (seconds)."""


class Participant(AsyncExitStack):
    """A node inside an app, for many users at once. Use it as an asynchronous context manager.

    ``sizes`` (X, A, H), ``reward_range``, ``absorbing`` and ``declaration`` describe the app's
    episodes, as in `Environment`. The settings are a node's: ``RIFFLE_NODE_...`` variables, of
    which keyword arguments replace some, such as ``state_dir``. One process uses a state folder.

    Raises LocalError ``invalid-spec``, which names what is wrong with the settings.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        reward_range: tuple[float, float] = (0.0, 1.0),
        absorbing: int | None = None,
        declaration: Declaration = Declaration(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **settings: Any,  # noqa: ANN401  (checked by the settings)
    ) -> None:
        super().__init__()
        self._shape = RecordedEpisode(sizes, reward_range, absorbing, declaration)
        self._clock, self._sleep = clock, sleep
        self._settings = AppSettings.load(**settings)
        self._held: dict[str, UserLease] = {}
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        self._watches: set[asyncio.Task[None]] = set()
        self._reports: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _open(self) -> None:
        opened = open_nodes(self._settings, self._shape, seal_in_thread, Totals(), self._clock)
        made = await self.enter_async_context(opened)
        self._runner, self._pipeline, self._users = made, made.pipeline, made.pipeline.users
        self._nodes = {node.credential.node_id: node for node in made.nodes}
        self.push_async_callback(self._end)
        for row in map(Row.model_validate_json, self._users.episodes()):
            self._users.mark_asked([row.lease.user])
            self._hold(row)

    async def _end(self) -> None:
        """Sends what is to be sent, for some seconds; the next start goes on with the rest."""
        if self._reports:
            await asyncio.wait(self._reports, timeout=DRAIN_SECONDS)
        for task in (tasks := [*self._reports, *self._watches]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def lease(self, user: str) -> UserLease:
        """Returns a user's lease, the same one until its report is sent, also after a restart.

        ``user`` is the app's own id of a person, always spelt the same; the shuffler sees it under
        the owner's key only. A person takes part once.

        Raises LocalError ``unavailable`` if no batch has room now (try again later),
        ``user-unavailable`` if the user was asked before, ``late`` if the episode is over, and
        RemoteError if the shuffler refuses the user or the node.
        """
        name = opaque_id(self._settings.users_key or b"", user)
        async with self._locks.setdefault(name, asyncio.Lock()):
            held = self._held.get(name) or await self._ask(name)
            await self._prepare(held)
        held.open_steps()
        return held

    async def _ask(self, name: str) -> UserLease:
        """Takes a slot for a new user, by the first of the owner's nodes that gets one."""
        ids = sorted(self._nodes)
        first = int(name, 16) % len(ids)  # after a crash, the same node gets the same lease again
        nodes = [self._nodes[node_id] for node_id in ids[first:] + ids[:first]]
        if not await asyncio.to_thread(self._users.admit, ids[first], name):
            raise LocalError("user-unavailable", "this user was asked before: once is the most")
        for node in nodes:
            for job, _ in await self._runner.open_jobs(node, 0):
                lease = None if job is None else await self._request(node, job, name)
                if job is not None and lease is not None:
                    return self._hold(await asyncio.to_thread(self._begin, node, job, lease))
        raise LocalError("unavailable", "no open batch has room for this user now; try again later")

    async def _request(self, node: NodeState, job: Job, name: str) -> Lease | None:
        """Returns a slot of one batch, or None if a user has no room or no time in it."""
        if not await self._runner.most_users(job):
            return None
        reply = await self._pipeline.shuffler.lease(node.credential.token, job.batch_id, [name])
        leases = await asyncio.to_thread(self._runner.record_reply, node, job, reply)
        for refusal in reply.refused:
            if refusal.problem in {"user-unavailable", "quota-exceeded"}:
                raise _refusal(refusal.problem)
        return next(iter(self._pipeline.in_time(job, leases)), None)

    def _begin(self, node: NodeState, job: Job, lease: Lease) -> Row:
        """Records the lease, then marks the user as asked: a crash in between loses nobody."""
        now, share = self._clock(), self._settings.episode_share
        entry = self._pipeline.test_entry
        row = Row(
            node_id=node.credential.node_id,
            batch_id=job.batch_id,
            lease=lease,
            ends_at=now + job.episode_time(lease.expires_at - now, share),
            word=policy_word(job.batch.descriptor, lease.slot, test_entry=entry),
        )
        self._users.keep_episode(lease.user, row.model_dump_json())
        self._users.mark_asked([lease.user])
        JOURNAL.note("leased", batch_id=job.batch_id, reports=1)
        return row

    def _hold(self, row: Row) -> UserLease:
        held = UserLease(row, self._users, self._shape, self._clock, self._send)
        self._held[row.lease.user] = held
        _start(self._watch(held), self._watches)
        return held

    def _send(self, held: UserLease, *, noise: bool = False) -> asyncio.Task[None]:
        return _start(self._deliver(held, noise=noise), self._reports)

    async def _prepare(self, held: UserLease) -> Job:
        """Returns the batch of a lease, checked again after a restart."""
        if (node := self._nodes.get(held.row.node_id)) is None:
            raise LocalError("unauthorized", "the node of this lease has no credential any more")
        job = await self._runner.job(node, held.row.batch_id)
        held.batch = job.batch
        return job

    async def _watch(self, held: UserLease) -> None:
        """When the time is over, sends noise; then, or when the lease is over, forgets the user."""
        while held.row.steps is not None and (left := held.ends_at - self._clock()) > 0:
            await self._sleep(min(left, LONGEST_SLEEP))
        while self._is_held(held) and self._clock() < held.row.lease.expires_at:
            try:
                await self._send(held, noise=True)
            except RiffleError as error:
                JOURNAL.problem("reports-refused", error, batch_id=held.row.batch_id)
                await self._sleep(RETRY_SECONDS)
        self._forget(held)

    async def _deliver(self, held: UserLease, *, noise: bool) -> None:
        """Sends a user's report, once. Keeps the lease only if another try may succeed."""
        async with held.lock:
            if not self._is_held(held):
                return
            if noise and held.row.steps is not None:
                held.keep(steps=None)
            try:
                reply = await self._upload(held)
            except RemoteError:
                self._forget(held)
                raise
            self._forget(held)
        accepted = self._pipeline.settle(reply)
        JOURNAL.note("uploaded", batch_id=held.row.batch_id, reports=1, accepted=accepted)
        if not accepted:
            raise _refusal(reply.results[0].outcome)

    async def _upload(self, held: UserLease) -> UploadReply:
        job, row = await self._prepare(held), held.row
        credential = self._nodes[row.node_id].credential
        if row.sealed is None:
            entry, slot = self._pipeline.test_entry, row.lease.slot
            report = encode_episode(held.batch, held.episode(), slot, test_entry=entry)

            def keep(job: Job, sealed: bytes) -> None:
                key = job.keys.batch_key.hex()
                held.keep(steps=None, sealed=sealed.hex(), batch_key=key)

            return await self._pipeline.seal_and_upload(
                job, credential, [row.lease], report[None], keep
            )
        if row.batch_key != job.keys.batch_key.hex():
            raise RemoteError("outdated-key", "the batch has another key than the stored report")
        return await job.upload(
            self._pipeline.shuffler, credential.token, [row.lease], bytes.fromhex(row.sealed)
        )

    def _is_held(self, held: UserLease) -> bool:
        return self._held.get(held.row.lease.user) is held

    def _forget(self, held: UserLease) -> None:
        if self._is_held(held):
            self._users.keep_episode(held.row.lease.user, None)
            held.row = held.row.model_copy(update={"steps": None})
            del self._held[held.row.lease.user]


def _start(
    work: Coroutine[None, None, None], running: set[asyncio.Task[None]]
) -> asyncio.Task[None]:
    """Starts a task and remembers it while it runs. Its error is not logged by asyncio."""
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


def _refusal(outcome: str) -> RemoteError:
    """Returns the error for the shuffler's refusal of one user or report."""
    slug = outcome if outcome in PROBLEMS else "internal"
    return RemoteError(slug, f"the shuffler refused: {PROBLEMS[slug][1]}")
