"""Episodes of people in progress: what an app may do with one, and what is on its disk meanwhile.

A person's episode takes minutes to days, and must survive a restart of the app. So the users' file
has a `Row` for each: the lease, the word that selects the policy, and the recorded steps (states
and reward bits, never rewards). It is as private as the app's own data about this person.

- Steps are erased when the report is sealed, when the person gives up and when the time is over.
- The sealed report takes their place until the shuffler has it or the lease is over. Only shuffler
  and coordinator together can open it.
- An app that never starts again leaves its last rows behind: delete its `state_dir`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from riffle.common.mechanism.counters import Episode, Sizes
from riffle.common.mechanism.randomness import Randomness, SystemRandomness, bernoulli
from riffle.common.protocol.descriptor import Document
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.wire import Lease
from riffle.node_client.environments.tabular import Declaration
from riffle.node_client.episode import PreparedBatch, reward_mean, run_episode
from riffle.node_client.users import Users

Step = tuple[int, int, int | None]
"""State, reward bit, next state; None if the episode ended early."""


class Row(Document):
    """One user's episode. If ``steps`` is None, the report is sealed, or is to be noise.

    The episode's time is over at ``ends_at``. ``sealed`` is the report under ``batch_key``, in hex.
    """

    node_id: str
    batch_id: str
    lease: Lease
    ends_at: float
    word: int
    steps: tuple[Step, ...] | None = ()
    sealed: str | None = None
    batch_key: str | None = None


@dataclass(slots=True)
class RecordedEpisode:
    """A person's recorded episode as an environment, so that it is encoded like any other.

    Without steps it only states what the app's episodes are like.
    """

    sizes: Sizes
    reward_range: tuple[float, float]
    absorbing: int | None
    declaration: Declaration
    steps: tuple[Step, ...] = ()
    taken: int = 0

    def reset(self, _: Randomness) -> int:
        """Returns the first state."""
        return self.steps[0][0]

    def step(self, _: int, __: Randomness) -> tuple[int, float, bool]:
        """Returns the next state, the end of the reward range that is the bit, and early ends."""
        _, bit, state = self.steps[self.taken]
        self.taken += 1
        return state or 0, self.reward_range[bit], state is None


class UserLease:
    """One user's episode, from `Participant.lease`.

    For each step from 0 to H - 1, ask for an action with `act` and `record` what followed; then
    `report`. After ``ends_at`` (seconds since 1970, UTC), noise is reported in its place.
    """

    batch: PreparedBatch

    def __init__(
        self,
        row: Row,
        users: Users,
        shape: RecordedEpisode,
        clock: Callable[[], float],
        send: Callable[["UserLease"], asyncio.Task[None]],
    ) -> None:
        self.row, self.shape, self.ends_at = row, shape, row.ends_at
        self.lock = asyncio.Lock()  # held while the report is on its way
        self._users, self._clock, self._send = users, clock, send

    @property
    def step(self) -> int:
        """The next step to record: how many are recorded. After an early end it is H."""
        steps = self.row.steps or ()
        return self.shape.sizes.H if steps and steps[-1][2] is None else len(steps)

    @property
    def state(self) -> int | None:
        """The state after the recorded steps; None before the first and after an early end."""
        return self.row.steps[-1][2] if self.row.steps else None

    def act(self, step: int, state: int) -> int:
        """Returns the action of this user's policy: the same one each time.

        Raises LocalError ``wrong-size`` for a step or state that does not exist.
        """
        X, H = self.shape.sizes.X, self.shape.sizes.H
        if not (0 <= step < H and 0 <= state < X):
            raise LocalError("wrong-size", f"steps are 0 to {H - 1}, states 0 to {X - 1}")
        return int(self.batch.mixture.pick(self.row.word)[step, state])

    def record(
        self, step: int, state: int, action: int, reward: float, next_state: int | None
    ) -> None:
        """Records one step; ``next_state`` is None if the episode ended early.

        Returns when the step is on the disk, after some milliseconds. It may be repeated after a
        crash. Of the reward, one random bit is kept.

        Raises LocalError: ``late`` if the episode is over, ``wrong-state`` if this is not the next
        step or the action is not that of `act`, ``wrong-size`` if a value is out of its range.
        """
        steps, after = self.open_steps(), None if next_state is None else int(next_state)
        if 0 <= step < len(steps) and (steps[step][0], steps[step][2]) == (state, after):
            return
        right = step == self.step and not (steps and state != self.state)
        if not right or action != self.act(step, state):
            detail = f"the next step is {self.step}, in the state that the last one led to, with "
            raise LocalError("wrong-state", f"{detail}the action of act; or give up")
        (low, high), X = self.shape.reward_range, self.shape.sizes.X
        known = after in range(X) or (after is None and self.shape.absorbing is not None)
        if not (low <= reward <= high and known):
            detail = f"rewards are {low:g} to {high:g}, states 0 to {X - 1}; None as next state "
            raise LocalError("wrong-size", f"{detail}needs an absorbing state")
        mean = reward_mean(reward, self.batch.reward_range)
        taken = int(state), bernoulli(SystemRandomness(), mean), after
        self.keep(steps=(*steps, taken))

    async def report(self) -> None:
        """Sends the report, and returns when the shuffler has stored it.

        While the shuffler is away, this waits until the batch is over. If it is cancelled, the
        report is still sent. Raises LocalError ``wrong-state`` if steps are missing and ``late`` if
        the episode is over, RemoteError if the shuffler refuses the report.
        """
        self.open_steps()
        if self.step < self.shape.sizes.H:
            detail = f"{self.step} of {self.shape.sizes.H} steps are recorded; or give up"
            raise LocalError("wrong-state", detail)
        await asyncio.shield(self._send(self))

    def give_up(self) -> None:
        """Erases the episode. Noise and padding are sent in its place, in the background.

        This changes nothing once `report` has been called.
        """
        if self.row.steps is not None:
            self.keep(steps=None)
            self._send(self)

    def keep(self, **changes: object) -> None:
        """Changes the row, on the disk first."""
        row = self.row.model_copy(update=changes)
        self._users.keep_episode(row.lease.user, row.model_dump_json())
        self.row = row

    def episode(self) -> Episode | None:
        """Returns the recorded episode; None if there is none, or it is outside the support."""
        if (steps := self.row.steps) is None:
            return None
        policy, ends = self.batch.mixture.pick(self.row.word), self.batch.reward_range
        recorded = replace(self.shape, steps=steps, reward_range=ends)
        return run_episode(recorded, policy, ends, SystemRandomness(), self.batch.layout)

    def open_steps(self) -> tuple[Step, ...]:
        """Returns the recorded steps. Raises LocalError ``late`` if the episode is over."""
        if self.row.steps is None or self._clock() >= self.row.ends_at:
            detail = "this episode is over: its report is sent, or noise in its place"
            raise LocalError("late", detail)
        return self.row.steps
