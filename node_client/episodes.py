"""Episodes of people in progress, on the disk of the app that drives them (`participant`).

A person's episode takes minutes to days, and must survive a restart of the app. So a file holds,
for each leased user, the lease, the word that selects the policy, and the recorded steps: states
and reward bits, never rewards. Such a row is private, like the app's own data about this person.

- Steps are erased when the report is sealed, when the person gives up and when the time is over. So
  they are stored no longer than the batch's ``episode_seconds`` and a part of a lease.
- A sealed report takes their place until the shuffler has it or the lease is over. It is
  ciphertext, which only the shuffler and the coordinator together can open.
- An app that never starts again leaves its last rows behind. Delete its `state_dir`.

SQLite overwrites what is erased (``secure_delete``), and its log is emptied in the same call. It
cannot overwrite what a file system, a flash disk or a backup has copied. So keep the folder on an
encrypted disk, and out of backups.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from riffle.common.mechanism.counters import Episode, Sizes
from riffle.common.mechanism.randomness import Randomness, SystemRandomness, bernoulli
from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.tabular import Declaration
from riffle.node_client.episode import PreparedBatch, reward_mean, run_episode
from riffle.node_client.users import StateFile

SCHEMA = """
CREATE TABLE episodes (
    user TEXT PRIMARY KEY,
    node_id TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    slot INTEGER NOT NULL,
    lease TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    ends_at REAL NOT NULL,
    word INTEGER NOT NULL,
    steps TEXT,
    sealed BLOB,
    batch_key BLOB
);
PRAGMA user_version = 1;
"""

Step = tuple[int, int, int | None]
"""State, reward bit, next state; None if the episode ended early."""


@dataclass(slots=True)
class Row:
    """One user's episode. ``steps`` is None when none may be sent: noise is sent in their place.

    ``ends_at`` is when the episode's time is over, ``expires_at`` when the lease is (seconds since
    1970, UTC). ``sealed`` is the report under ``batch_key``.
    """

    user: str
    node_id: str
    batch_id: str
    slot: int
    lease: str
    expires_at: int
    ends_at: float
    word: int
    steps: list[Step] | None
    sealed: bytes | None = None
    batch_key: bytes | None = None


class Episodes(StateFile):
    """The episodes of a process's users. Every call is synced; raises LocalError `unavailable`."""

    name = "episodes.sqlite"
    schema = SCHEMA

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self._database.execute("PRAGMA secure_delete = ON")

    def rows(self) -> list[Row]:
        """Returns all episodes."""
        rows = self._rows("SELECT * FROM episodes", ())
        values = ((*row[:8], _read(row[8]), *row[9:]) for row in rows)
        return [Row(*each) for each in values]

    def begin(self, row: Row) -> None:
        """Stores a user's new episode."""
        values = list(astuple(row))
        values[8] = json.dumps(row.steps)
        marks = ", ".join("?" * len(values))
        self._write(f"INSERT OR REPLACE INTO episodes VALUES ({marks})", [tuple(values)])  # noqa: S608

    def record(self, user: str, steps: Sequence[Step]) -> None:
        """Stores the steps so far."""
        values = (json.dumps(steps), user)
        self._write("UPDATE episodes SET steps = ? WHERE user = ?", [values])

    def drop_steps(self, user: str) -> None:
        """Erases the steps of an episode whose report is to be noise."""
        self._erase("UPDATE episodes SET steps = NULL WHERE user = ?", user)

    def seal(self, user: str, sealed: bytes, batch_key: bytes) -> None:
        """Stores the sealed report, and erases the steps in the same transaction."""
        change = "UPDATE episodes SET steps = NULL, sealed = ?, batch_key = ? WHERE user = ?"
        self._erase(change, sealed, batch_key, user)

    def forget(self, row: Row) -> None:
        """Deletes a user's episode; erases it if it still has steps."""
        delete = "DELETE FROM episodes WHERE user = ?"
        if row.steps is None:
            self._write(delete, [(row.user,)])
        else:
            self._erase(delete, row.user)

    def _erase(self, statement: str, *values: str | bytes) -> None:
        """Executes a statement and empties the log, which has older versions of the row."""
        self._write(statement, [values])
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)", ())


@dataclass(slots=True)
class RecordedEpisode:
    """A person's recorded episode as an environment, so that it is encoded like any other.

    Without steps it only states what the app's episodes are like.
    """

    sizes: Sizes
    reward_range: tuple[float, float]
    absorbing: int | None
    declaration: Declaration
    steps: Sequence[Step] = ()
    taken: int = 0

    def reset(self, randomness: Randomness) -> int:
        """Returns the first state."""
        del randomness
        return self.steps[0][0]

    def step(self, action: int, randomness: Randomness) -> tuple[int, float, bool]:
        """Returns the next state, the end of the reward range that is the bit, and early ends."""
        del action, randomness
        _, bit, state = self.steps[self.taken]
        self.taken += 1
        return state or 0, self.reward_range[bit], state is None


class UserLease:
    """One user's episode: ask for an action with `act`, `record` what followed, then `report`.

    An app does so for steps 0 to H - 1. ``ends_at`` (seconds since 1970, UTC) is when the episode's
    time is over; then noise is reported in its place. Get one from `Participant.lease`.
    """

    def __init__(
        self,
        row: Row,
        store: "Episodes",
        shape: RecordedEpisode,
        clock: Callable[[], float],
        send: Callable[["UserLease"], Awaitable[None]],
    ) -> None:
        self.row, self.shape = row, shape
        self.batch: PreparedBatch | None = None
        self.lock = asyncio.Lock()  # held while the report is on its way
        self.over, self.done = asyncio.Event(), asyncio.Event()
        self._store, self._clock, self._send = store, clock, send
        if row.steps is None:
            self.over.set()

    @property
    def ends_at(self) -> float:
        """When the time of the episode is over, in seconds since 1970, UTC."""
        return self.row.ends_at

    @property
    def step(self) -> int:
        """The next step to record: how many are recorded. After an early end it is H."""
        steps = self.row.steps or []
        return self.shape.sizes.H if steps and steps[-1][2] is None else len(steps)

    @property
    def state(self) -> int | None:
        """The state after the recorded steps; None before the first and after an early end."""
        return self.row.steps[-1][2] if self.row.steps else None

    def act(self, step: int, state: int) -> int:
        """Returns the action of this user's policy: the same one each time.

        Raises LocalError ``wrong-size`` for a step or state that does not exist.
        """
        sizes = self.shape.sizes
        if not (0 <= step < sizes.H and 0 <= state < sizes.X):
            detail = f"steps are 0 to {sizes.H - 1}, states 0 to {sizes.X - 1}"
            raise LocalError("wrong-size", detail)
        return int(self._prepared.mixture.pick(self.row.word)[step, state])

    @property
    def _prepared(self) -> PreparedBatch:
        if self.batch is None:
            raise LocalError("unavailable", "this lease was not given by Participant.lease")
        return self.batch

    def record(
        self, step: int, state: int, action: int, reward: float, next_state: int | None
    ) -> None:
        """Records one step; ``next_state`` is None if the episode ended early.

        Returns when the step is on the disk, after some milliseconds. It may be repeated after a
        crash. Of the reward, one random bit is kept.

        Raises LocalError: ``late`` if the episode is over, ``wrong-state`` if this is not the next
        step or the action is not that of `act`, ``wrong-size`` if a value is out of its range.
        """
        steps, state = self.open_steps(), int(state)
        next_state = self._checked(next_state)
        if 0 <= step < len(steps) and (steps[step][0], steps[step][2]) == (state, next_state):
            return
        if step != self.step or (steps and state != self.state):
            raise LocalError(
                "wrong-state",
                f"the next step is {self.step}, in the state that the last one led to",
            )
        if action != self.act(step, state):
            detail = "the action is not that of the user's policy: take the one of act, or give up"
            raise LocalError("wrong-state", detail)
        recorded = [*steps, (state, self._reward_bit(reward), next_state)]
        self._store.record(self.row.user, recorded)
        self.row.steps = recorded

    async def report(self) -> None:
        """Sends the report, and returns when the shuffler has stored it.

        While the shuffler is away, this waits until the batch is over. If it is cancelled, the
        report is still sent. Raises LocalError ``wrong-state`` if steps are missing and ``late`` if
        the episode is over, RemoteError if the shuffler refuses the report.
        """
        self.open_steps()
        if self.step < self.shape.sizes.H:
            detail = f"{self.step} of {self.shape.sizes.H} steps are recorded"
            raise LocalError("wrong-state", f"{detail}: record the others, or give up")
        await self._send(self)

    def give_up(self) -> None:
        """Erases the episode. Noise and padding are sent in its place, in the background.

        This changes nothing once `report` has been called.
        """
        if self.row.steps is not None:
            self._store.drop_steps(self.row.user)
            self.row.steps = None
        self.over.set()

    def episode(self, batch: PreparedBatch) -> Episode | None:
        """Returns the recorded episode; None if there is none, or it is outside the support."""
        if (steps := self.row.steps) is None:
            return None
        recorded = replace(self.shape, steps=steps, reward_range=batch.reward_range)
        policy, ends = batch.mixture.pick(self.row.word), batch.reward_range
        return run_episode(recorded, policy, ends, SystemRandomness(), batch.layout)

    def open_steps(self) -> list[Step]:
        """Returns the recorded steps. Raises LocalError ``late`` if the episode is over."""
        if self.row.steps is None or self._clock() >= self.row.ends_at:
            raise LocalError(
                "late", "this episode is over: its report is sent, or noise in its place"
            )
        return self.row.steps

    def _reward_bit(self, reward: float) -> int:
        low, high = self.shape.reward_range
        if not low <= reward <= high:
            raise LocalError("wrong-size", f"rewards are {low:g} to {high:g}")
        return bernoulli(SystemRandomness(), reward_mean(reward, self._prepared.reward_range))

    def _checked(self, state: int | None) -> int | None:
        if state is None and self.shape.absorbing is None:
            raise LocalError("wrong-size", "an early end needs an absorbing state, X - 1")
        if state is not None and not 0 <= state < self.shape.sizes.X:
            raise LocalError("wrong-size", f"states are 0 to {self.shape.sizes.X - 1}")
        return None if state is None else int(state)


def _read(steps: str | None) -> list[Step] | None:
    return None if steps is None else [(x, bit, y) for x, bit, y in json.loads(steps)]
