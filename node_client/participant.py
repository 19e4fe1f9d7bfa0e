"""A node inside an app. The app itself runs its users' episodes, many at once.

A person's episode must survive a restart of the app, so the file of users has a `Row` for each open
episode. A row is as private as the app's own data about this person. Its steps are erased as soon
as the report is sealed, the person gives up or the episode's time is over. An app that never
starts again leaves its last rows behind: delete its `state_dir`.

If a user gives up or does not report in time, the node sends a report of noise only. Otherwise a
missing report could show what the person did. Whether a report holds an episode is private, too, so
a report of noise is charged to the personal ledger (`ledger`) like any other.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np

from riffle.common.mechanism.counters import Episode, Sizes
from riffle.common.mechanism.randomness import SystemRandomness, bernoulli, word
from riffle.common.process.workers import finish
from riffle.common.protocol.descriptor import BatchDescriptor, Document
from riffle.common.protocol.errors import PROBLEMS, LocalError, RemoteError, RiffleError
from riffle.common.protocol.wire import Lease
from riffle.node_client.environments.tabular import Declaration
from riffle.node_client.episode import encode_episode, reward_mean, slot_randomness
from riffle.node_client.main import open_nodes
from riffle.node_client.pipeline import Job, Totals
from riffle.node_client.runner import DRAIN_SECONDS, RETRY_SECONDS, NodeState
from riffle.node_client.sealing import seal_reports
from riffle.node_client.settings import JOURNAL, AppSettings

LONGEST_SLEEP = 60.0
"""Seconds after which the clock is read again, because a sleeping machine stops timers."""


RecordedStep = tuple[int, int, int | None]
"""A step: state, reward bit, next state (None once the episode has ended early)."""


class Row(Document):
    """A user's stored episode. ``steps`` is None if the report is sealed or will hold only noise.

    ``word`` selects the policy. The episode's time is over at ``ends_at``. ``sealed`` is the report
    in hex.
    """

    node_id: str
    batch_id: str
    lease: Lease
    ends_at: float
    word: int
    steps: tuple[RecordedStep, ...] | None = ()
    sealed: str | None = None


class UserLease:
    """A user's lease, which `Participant.lease` returned, and the user's episode.

    For each step from 0 to H - 1, the app calls `act` to get an action, then `record` to record
    what followed. After the last step, the app calls `report`. After ``ends_at`` (seconds since
    1970, UTC), noise is reported in the episode's place.
    """

    batch: BatchDescriptor

    def __init__(self, app: "Participant", row: Row) -> None:
        self.row, self.ends_at = row, row.ends_at
        self._app = app
        self.timer = asyncio.create_task(app._send_in_time(self))
        self.delivery: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        """The number of the next step to record. After an early end, it is H."""
        return len(self.row.steps or ())

    @property
    def state(self) -> int | None:
        """The state after the recorded steps; None before the first step and after an early end."""
        return self.row.steps[-1][2] if self.row.steps else None

    def act(self, step: int, state: int) -> int:
        """Returns the action of this user's policy. A repeated call returns the same action.

        Raises LocalError ``wrong-size`` for a step or state that does not exist.
        """
        X, H = self._app.sizes.X, self._app.sizes.H
        if not (0 <= step < H and 0 <= state < X):
            raise LocalError("wrong-size", f"steps are 0 to {H - 1}, states 0 to {X - 1}")
        return int(self.batch.mixture.pick(self.row.word)[step, state])

    def record(
        self, step: int, state: int, action: int, reward: float, next_state: int | None
    ) -> None:
        """Records one step; ``next_state`` is None if the episode ended early.

        The step is on disk when the call returns. After a crash, the call may be repeated. Only one
        random bit of the reward is kept.

        Raises LocalError ``late`` if the episode is over. Raises LocalError ``wrong-state`` if
        ``step`` is not the next step, ``state`` is not the current state, or ``action`` is not
        `act`'s action. Raises LocalError ``wrong-size`` if a value is out of its range.
        """
        steps, after = self.open_steps(), None if next_state is None else int(next_state)
        if 0 <= step < len(steps) and (steps[step][0], steps[step][2]) == (state, after):
            return
        right = step == self.step and not (steps and state != self.state)
        if not right or action != self.act(step, state):
            detail = f"the next step is {self.step}, in the state that the last one led to, with "
            raise LocalError("wrong-state", f"{detail}the action of act; or give up")
        (low, high), X, absorbing = self._app.reward_range, self._app.sizes.X, self._app.absorbing
        known = after in range(X) or (after is None and absorbing is not None)
        if not (low <= reward <= high and known):
            detail = f"rewards are {low:g} to {high:g}, states 0 to {X - 1}; None as next state "
            raise LocalError("wrong-size", f"{detail}needs an absorbing state")
        mean = reward_mean(reward, self.batch.reward_range)
        taken = int(state), bernoulli(SystemRandomness(), mean), after
        rest = self._app.sizes.H - step - 1 if after is None else 0
        self.keep(steps=(*steps, taken, *[(absorbing, 0, None)] * rest))

    async def report(self) -> None:
        """Sends the report, and returns when the shuffler has stored it.

        If the shuffler or a file is not available, tries again until the batch is over. If the call
        is cancelled, the report is still sent. Raises LocalError ``wrong-state`` if steps are
        missing, LocalError ``late`` if the episode is over, and RemoteError if the shuffler refuses
        the report.
        """
        if len(self.open_steps()) < (H := self._app.sizes.H):
            detail = f"{self.step} of {H} steps are recorded; or give up"
            raise LocalError("wrong-state", detail)
        await asyncio.shield(self._app._send(self))

    def give_up(self) -> None:
        """Erases the episode, and sends noise and padding in its place, in the background.

        Changes nothing once `report` has been called.
        """
        if self.row.steps is not None and self.delivery is None:
            self.keep(steps=None)
            self._app._send(self)

    def keep(self, **changes: object) -> None:
        """Changes the row on the disk, then in memory."""
        row = self.row.model_copy(update=changes)
        self._app._users.keep_episode(row.lease.user, row.model_dump_json())
        self.row = row

    def episode(self) -> Episode | None:
        """Returns the recorded episode, or None if it is missing or has impossible transitions."""
        if (steps := self.row.steps) is None:
            return None
        last = self._app.absorbing if self.state is None else self.state
        states = np.array([*(state for state, _, _ in steps), last], dtype=np.int64)
        policy = self.batch.mixture.pick(self.row.word)
        actions = policy[np.arange(len(policy)), states[:-1]].astype(np.int64)
        episode = Episode(states, actions, np.array([bit for _, bit, _ in steps], dtype=np.int64))
        with suppress(ValueError):
            self.batch.layout.check(episode)
            return episode
        return None

    def open_steps(self) -> tuple[RecordedStep, ...]:
        """Returns the recorded steps. Raises LocalError ``late`` if the episode is over."""
        if self.row.steps is None or self._app._clock() >= self.row.ends_at:
            detail = "this episode is over: its report is sent, or noise in its place"
            raise LocalError("late", detail)
        return self.row.steps


class Participant(AsyncExitStack):
    """A node inside an app, for many users at once. Use it as an asynchronous context manager.

    ``sizes`` (X, A, H), ``reward_range``, ``absorbing`` and ``declaration`` describe the app's
    episodes, as in `Environment`. The settings are a node's ``RIFFLE_NODE_...`` variables; keyword
    arguments such as ``state_dir`` replace them. Only one process at a time may use a state folder.

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
        self.sizes, self.reward_range = sizes, reward_range
        self.absorbing, self.declaration = absorbing, declaration
        self._clock, self._sleep = clock, sleep
        self._settings = AppSettings.load(**settings)
        self._held: dict[str, UserLease] = {}
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def __aenter__(self) -> Self:
        await self.enter_async_context(self._run())
        return self

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        """Continues the episodes on disk. At the end, sends reports for at most `DRAIN_SECONDS`."""
        async with open_nodes(
            self._settings,
            self._settings.demands(self),
            None,
            lambda keys, reports: asyncio.to_thread(seal_reports, keys, reports),  # few reports
            Totals(),
            self._clock,
        ) as self._runner:
            self._pipeline = self._runner.pipeline
            self._users = self._pipeline.users
            self._nodes = {node.credential.node_id: node for node in self._runner.nodes}
            try:
                for row in map(Row.model_validate_json, self._users.episodes()):
                    self._held[row.lease.user] = UserLease(self, row)
                yield
            finally:
                leases = list(self._held.values())
                await finish([held.timer for held in leases], 0)
                await finish([held.delivery for held in leases if held.delivery], DRAIN_SECONDS)

    async def lease(self, user: str) -> UserLease:
        """Returns a user's lease: the same lease until the report is sent, even after a restart.

        ``user`` is the app's own id of a person, always spelt the same. The shuffler sees only the
        `opaque_id` of this id.

        Raises LocalError ``unavailable`` if no batch has room now or a file cannot be used. Raises
        LocalError ``user-unavailable`` if the user was asked before, or would exceed their lifetime
        limit. Raises LocalError ``late`` if the episode is over. Raises LocalError ``invalid-spec``
        if the id is empty, has over 200 characters, or has any blanks but single spaces between
        words. Raises RemoteError if the shuffler refuses user or node.
        """
        name = self._settings.name_of(user)
        async with self._locks.setdefault(name, asyncio.Lock()):
            held = self._held.get(name) or await self._ask(name)
            await self._prepare(held)
        held.open_steps()
        return held

    async def _ask(self, name: str) -> UserLease:
        """Takes a slot for a user. Tries the app's nodes one after another, until one succeeds."""
        await asyncio.to_thread(self._users.admit, name)
        none = "no open batch has room for this user now; try again later"
        refused = LocalError("unavailable", none)
        ids = sorted(self._nodes)
        first = int(name, 16) % len(ids)  # after a crash, the same node gets the same lease again
        for node in [self._nodes[node_id] for node_id in ids[first:] + ids[:first]]:
            for job, _ in await self._runner.open_jobs(node, 0):
                try:
                    if job and (held := await self._request(node, job, name)):
                        return held
                except LocalError as error:
                    refused = error
        raise refused

    async def _request(self, node: NodeState, job: Job, name: str) -> UserLease | None:
        """Takes a slot of one batch. Returns None if the batch has no room or time for the user."""
        await asyncio.to_thread(self._users.admit, name, job.charge)
        if not await self._runner.most_users(job):
            return None
        reply = await self._pipeline.shuffler.lease(
            node.credential.token, job.batch.batch_id, [name]
        )
        leases = await asyncio.to_thread(self._runner.record_reply, node, job, reply)
        for refusal in reply.refused:
            if refusal.problem in {"user-unavailable", "quota-exceeded"}:
                raise _refusal(refusal.problem)
        for lease in self._pipeline.in_time(job, leases):
            return await asyncio.shield(self._begin(node, job, lease))
        return None

    async def _begin(self, node: NodeState, job: Job, lease: Lease) -> UserLease:
        """Charges the user, stores the lease and marks the user as asked.

        If the app crashes after the charge, the charge stays.
        """
        now, share = self._clock(), self._settings.episode_share
        entry, slot = self._pipeline.test_entry, lease.slot
        row = Row(
            node_id=node.credential.node_id,
            batch_id=job.batch.batch_id,
            lease=lease,
            ends_at=now + job.episode_time(lease.expires_at - now, share),
            word=word(slot_randomness(job.batch, slot, "policy", test_entry=entry)),
        )
        mark, document = self._users.mark_asked, row.model_dump_json()
        if not await asyncio.to_thread(mark, [lease.user], job.charge, document):
            raise LocalError("user-unavailable", "another node has charged this user meanwhile")
        JOURNAL.note("leased", batch_id=job.batch.batch_id, reports=1)
        held = self._held[lease.user] = UserLease(self, row)
        return held

    async def _send_in_time(self, held: UserLease) -> None:
        """Sends noise when the episode's time is over. After a restart, sends an unsent report."""
        while held.row.steps is not None and (left := held.ends_at - self._clock()) > 0:
            await self._sleep(min(left, LONGEST_SLEEP))
        self._send(held)

    def _send(self, held: UserLease) -> asyncio.Task[None]:
        """Starts to send a user's report. A second call starts nothing new."""
        if held.delivery is None:
            held.delivery = asyncio.create_task(self._deliver(held))
            held.delivery.add_done_callback(lambda done: done.cancelled() or done.exception())
        return held.delivery

    async def _prepare(self, held: UserLease) -> Job:
        """Returns the batch of a lease, checked again after a restart."""
        if (node := self._nodes.get(held.row.node_id)) is None:
            raise LocalError("unauthorized", "the node of this lease has no credential any more")
        job = await self._runner.job(node, held.row.batch_id)
        held.batch = job.batch
        return job

    async def _deliver(self, held: UserLease) -> None:
        """Sends a user's report. Tries until the report is sent or refused, or the lease ends."""
        while True:
            try:
                if self._clock() < held.row.lease.expires_at:
                    return await self._upload(held)
                self._forget(held)
                break
            except RiffleError as error:
                JOURNAL.problem("reports-refused", error, batch_id=held.row.batch_id)
                if isinstance(error, RemoteError):
                    self._forget(held)
                    raise
            await self._sleep(RETRY_SECONDS)
        raise LocalError("late", "the lease ended before the report could be sent")

    async def _upload(self, held: UserLease) -> None:
        """Sends a user's report (noise if the episode's time is over), and forgets the user."""
        if held.row.steps is not None and self._clock() >= held.ends_at:
            held.keep(steps=None)
        job, row, chunk = await self._prepare(held), held.row, [held.row.lease]
        credential, entry = self._nodes[row.node_id].credential, self._pipeline.test_entry
        if row.sealed is not None:
            sealed = bytes.fromhex(row.sealed)
            reply = await job.upload(self._pipeline.shuffler, credential.token, chunk, sealed)
        else:
            report = encode_episode(held.batch, held.episode(), row.lease.slot, test_entry=entry)
            reply = await self._pipeline.seal_and_upload(
                *(job, credential, chunk, report[None]),
                keep=lambda sealed: held.keep(steps=None, sealed=sealed.hex()),
            )
        self._forget(held)
        accepted = self._pipeline.settle(reply)
        JOURNAL.note("uploaded", batch_id=row.batch_id, reports=1, accepted=accepted)
        if not accepted:
            raise _refusal(reply.results[0].outcome)

    def _forget(self, held: UserLease) -> None:
        self._users.keep_episode(held.row.lease.user, None)
        held.row = held.row.model_copy(update={"steps": None})
        held.timer.cancel()
        self._held.pop(held.row.lease.user, None)


def _refusal(outcome: str) -> RemoteError:
    """Returns the error for the shuffler's refusal of one user or report."""
    slug = outcome if outcome in PROBLEMS else "internal"
    return RemoteError(slug, f"the shuffler refused: {PROBLEMS[slug][1]}")
