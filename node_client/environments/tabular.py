"""The interface of a node's environments, and Riffle's own environments: MDPs and a bandit.

If episodes can end early, the environment declares one absorbing state, the last of its X states.
After an early end, the user stays there, with zero reward, for the rest of the horizon.

An environment draws only from the randomness that its caller gives. The same seed and sizes give
the same environment on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError
from scipy.special import ndtr, ndtri

from riffle.common.mechanism.counters import Sizes, Successors, Support
from riffle.common.mechanism.randomness import Randomness, categorical, generator_for
from riffle.common.protocol.descriptor import MAX_HORIZON, Document, first_fault
from riffle.common.protocol.errors import LocalError

Floats = npt.NDArray[np.float64]
Step = tuple[int, float, bool]


class EpisodeShape(Protocol):
    """The form of the episodes of an environment or an app: sizes, rewards, early ends."""

    @property
    def sizes(self) -> Sizes:
        """The sizes X (including the absorbing state, if there is one), A and H."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The least and the greatest reward of a step."""

    @property
    def absorbing(self) -> int | None:
        """The state after an early end, X - 1; None if episodes never end early."""


class Environment(EpisodeShape, Protocol):
    """The environment of one user at a time. `reset` begins the next user's episode.

    Calls never overlap, but they may come from different threads.
    """

    def reset(self, randomness: Randomness) -> int:
        """Begins an episode and returns its first state."""

    def step(self, action: int, randomness: Randomness) -> Step:
        """Takes an action; returns next state, reward, and whether the episode ended early."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The owner's declaration: the possible transitions, and whether all steps are alike.

    The declaration is published, so nobody may derive it from people's episodes. A field that is
    None declares nothing.
    """

    support: Support | None = None
    homogeneous: bool | None = None


@runtime_checkable
class Declared(Protocol):
    """An environment that declares its structure."""

    @property
    def declaration(self) -> Declaration:
        """The declaration, which holds for the whole population, not for one user."""


@dataclass(frozen=True, slots=True)
class TabularMDP:
    """An MDP: P (H, X, A, X), mean rewards r (H, X, A) in [0, 1], start distribution d1 (X,).

    P[h, x, a, y] is P_h(y | x, a). Raises ValueError if shapes disagree, a distribution does not
    sum to one, or a mean is outside [0, 1].
    """

    P: Floats
    r: Floats
    d1: Floats

    def __post_init__(self) -> None:
        H, X, A, Y = self.P.shape
        if Y != X or self.r.shape != (H, X, A) or self.d1.shape != (X,):
            raise ValueError("an MDP has P (H, X, A, X), r (H, X, A) and d1 (X,)")
        for name, rows in (("P", self.P), ("d1", self.d1)):
            wrong = ~np.isclose(rows.sum(-1), 1) | (rows.min(-1) < 0)
            for at in np.argwhere(wrong)[:1].tolist():
                text = f"{name}{at or ''} is {np.array2string(rows[tuple(at)], threshold=9)}"
                raise ValueError(f"{text}; a distribution has no negative entry and sums to 1")
        for at in np.argwhere(~((self.r >= 0) & (self.r <= 1)))[:1].tolist():
            text = f"r{at} is {self.r[tuple(at)]:g}; reward means must lie in [0, 1]"
            raise ValueError(f"{text}: scale them, as (r - low) / (high - low)")

    @property
    def sizes(self) -> Sizes:
        """The sizes X, A and H."""
        H, X, A, _ = self.P.shape
        return Sizes(X=X, A=A, H=H)

    @property
    def declaration(self) -> Declaration:
        """The possible transitions, and whether P and r are the same at every step."""
        possible = self.P > 0
        alike = bool((self.P[0] == self.P).all() and (self.r == self.r[0]).all())
        steps = possible[:1] if (possible == possible[0]).all() else possible
        start = tuple(np.flatnonzero(self.d1).tolist())
        return Declaration(Support(start, tuple(_successors(step) for step in steps)), alike)


def _successors(possible: npt.NDArray[np.bool_]) -> Successors:
    return tuple(
        tuple(tuple(np.flatnonzero(row).tolist()) for row in actions) for actions in possible
    )


@runtime_checkable
class Modelled(Protocol):
    """An environment with a known MDP. Exact values and simulation by population need the MDP."""

    @property
    def mdp(self) -> TabularMDP:
        """The MDP (P, r and d1) of a user drawn at random from the population."""


class TabularEnvironment:
    """Runs episodes of a `TabularMDP`, without early ends. Every step earns its mean reward.

    ``action_names`` are for people who read a policy.
    """

    reward_range = (0.0, 1.0)
    absorbing = None

    def __init__(self, mdp: TabularMDP, action_names: Sequence[str] = ()) -> None:
        self.mdp = mdp
        self.action_names = tuple(action_names)
        self.sizes = mdp.sizes
        self._start = np.cumsum(mdp.d1)
        self._next = np.cumsum(mdp.P, axis=-1)
        self._h = 0
        self._x = 0

    def reset(self, randomness: Randomness) -> int:
        """Draws x ~ d1."""
        self._h, self._x = 0, categorical(randomness, self._start)
        return self._x

    def step(self, action: int, randomness: Randomness) -> Step:
        """Draws x' ~ P_h(. | x, a); returns it with the mean reward r_h(x, a)."""
        h, x = self._h, self._x
        self._h, self._x = h + 1, categorical(randomness, self._next[h, x, action])
        return self._x, float(self.mdp.r[h, x, action]), False


def stationary(P: Floats, r: Floats, d1: Floats, H: int) -> TabularMDP:
    """Returns the MDP with P (X, A, X) and r (X, A) at every step.

    Raises ValueError as `TabularMDP` does, or if the horizon H is below one.
    """
    if H < 1:
        raise ValueError(f"horizon is {H}; it must be at least 1")
    return TabularMDP(np.repeat(P[None], H, axis=0), np.repeat(r[None], H, axis=0), d1)


LEFT, RIGHT = 0, 1
STAY_LEFT_END, MOVE_LEFT_END = 0.4, 0.6
SLIP, STAY, MOVE = 0.05, 0.6, 0.35
STAY_RIGHT_END, SLIP_RIGHT_END = 0.6, 0.4
REWARD_LEFT, REWARD_RIGHT = 0.005, 1.0


def riverswim(X: int = 4, H: int = 6) -> TabularMDP:
    """Returns RiverSwim with X states in a row and horizon H (Osband et al. 2013; 000, Fig. 5).

    A swimmer starts at the left end. "Left" always succeeds, and "right" may fail. At the left end,
    "left" earns .005. At the right end, "right" earns 1. For X=4, H=6 the optimal value is
    0.475791, and always-left earns 0.03. Raises ValueError if X is below two.
    """
    if X < 2:
        raise ValueError(f"RiverSwim needs at least 2 states, not {X}")
    P, r = np.zeros((X, 2, X)), np.zeros((X, 2))
    P[np.arange(X), LEFT, np.maximum(np.arange(X) - 1, 0)] = 1.0
    P[0, RIGHT, [0, 1]] = STAY_LEFT_END, MOVE_LEFT_END
    for x in range(1, X - 1):
        P[x, RIGHT, [x - 1, x, x + 1]] = SLIP, STAY, MOVE
    P[X - 1, RIGHT, [X - 2, X - 1]] = SLIP_RIGHT_END, STAY_RIGHT_END
    r[0, LEFT], r[X - 1, RIGHT] = REWARD_LEFT, REWARD_RIGHT
    return stationary(P, r, np.eye(X)[0], H)


LARGEST_MEAN = 0.99
MAX_CHANNELS = 6
RETUNED_SLOT = 0.5
# Channel 0 is idle more often than channel 1 but changes faster, so the best choice depends on x.
TO_BUSY = (0.30, 0.10, 0.20)
TO_IDLE = (0.50, 0.15, 0.70)
MAX_FILE_BYTES = 256 << 20


def global_means(arms: int, seed: int) -> Floats:
    """Draws the arms' global means r*(a) ~ Uniform(0, 0.99), shape (A,)."""
    return generator_for(seed, "Bandit-v0", arms).uniform(0, LARGEST_MEAN, arms)


def clipped_mean(means: Floats, sigma: float) -> Floats:
    """Returns E[clip(m + xi, 0, 1)], xi ~ N(0, sigma^2), for every mean m in [0, 1] (A,)."""
    if sigma == 0:
        return means.copy()
    u, v = means / sigma, (1 - means) / sigma
    inside = means * (ndtr(v) - ndtr(-u)) + sigma * (_density(u) - _density(v))
    return np.asarray(np.clip(inside + ndtr(-v), 0, 1))


def _density(z: Floats) -> Floats:
    return np.asarray(np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


class BanditEnvironment:
    """A bandit with one pull for each user. Arm a has the mean r*(a).

    For each user and arm, noise xi(a) ~ N(0, sigma^2) is added to the mean, and the sum is clipped
    to [0, 1]. An arm's reward in `mdp` is the average over all users. Raises ValueError if there is
    no arm, a mean is outside [0, 1], or sigma < 0.
    """

    reward_range = (0.0, 1.0)
    absorbing = None

    def __init__(self, means: Floats, sigma: float) -> None:
        if means.size == 0 or means.min() < 0 or means.max() > 1 or not sigma >= 0:
            raise ValueError("a bandit needs arms with means in [0, 1], and sigma >= 0")
        self._means = means
        self._sigma = sigma
        self._user = means
        r = clipped_mean(means, sigma)
        self.mdp = TabularMDP(np.ones((1, 1, means.size, 1)), r[None, None], np.ones(1))
        self.sizes = self.mdp.sizes

    def reset(self, randomness: Randomness) -> int:
        """Draws a user's noise xi(a) for every arm."""
        words = np.frombuffer(randomness.read(8 * self._means.size), dtype="<u8") >> 11
        xi = self._sigma * ndtri((words + 0.5) / (1 << 53))
        self._user = np.clip(self._means + xi, 0, 1)
        return 0

    def step(self, action: int, randomness: Randomness) -> Step:
        """Pulls the arm ``action``; the reward is this user's clipped mean of the arm."""
        return 0, float(self._user[action]), False


def spectrum_access(channels: int = 2, H: int = 6) -> TabularMDP:
    """Returns the MDP of a radio that chooses among C channels over H steps (X = C 2^C, A = C).

    Each channel c follows a Gilbert-Elliott chain: if idle, it turns busy with probability b_c; if
    busy, it turns idle with probability g_c. The radio senses all channels, is tuned to one, and
    chooses one for the next slot. The radio transmits if the chosen channel is idle in that slot.
    If the radio has to retune, it loses half of the slot.

    State x = tuned * 2^C + occupancy, where bit c of the occupancy is 1 if channel c is busy. The
    mean reward is the part of the next slot that the radio can use. At the start the radio is tuned
    to channel 0 and every channel has its stationary law. Raises ValueError for fewer than 2 or
    more than 6 channels.
    """
    if not 2 <= channels <= MAX_CHANNELS:
        raise ValueError(f"SpectrumAccess needs 2 to {MAX_CHANNELS} channels, not {channels}")
    b = np.resize(TO_BUSY, channels)
    g = np.resize(TO_IDLE, channels)
    busy = (np.arange(2**channels)[:, None] >> np.arange(channels)) & 1
    next_busy = np.where(busy == 1, 1 - g, b)
    P, r = _dynamics(_occupancy_law(next_busy, busy), 1 - next_busy)
    d1 = np.zeros(channels * 2**channels)
    d1[: 2**channels] = _occupancy_law((b / (b + g))[None], busy)[0]
    return stationary(P, r, d1, H)


def _occupancy_law(busy_chance: Floats, busy: np.typing.NDArray[np.int64]) -> Floats:
    """Returns the probability (S, 2^C) of each set of busy channels, in each of S situations.

    ``busy_chance`` (S, C) has the probability that a channel is busy.
    """
    chance = np.where(busy[None] == 1, busy_chance[:, None], 1 - busy_chance[:, None])
    return np.asarray(chance.prod(axis=-1))


def _dynamics(occupancy: Floats, idle: Floats) -> tuple[Floats, Floats]:
    """Returns P (X, A, X) and r (X, A) of a radio with C channels.

    For each of the 2^C sets of busy channels, ``occupancy`` (2^C, 2^C) has the law of the next set,
    and ``idle`` (2^C, C) has the chance that a channel is idle next.
    """
    S, C = idle.shape
    P = np.zeros((C, S, C, C, S))
    r = np.zeros((C, S, C))
    for tuned in range(C):
        for a in range(C):
            P[tuned, :, a, a, :] = occupancy
            r[tuned, :, a] = idle[:, a] * (1.0 if a == tuned else RETUNED_SLOT)
    return P.reshape(C * S, C, C * S), r.reshape(C * S, C)


def random_mdp(sizes: Sizes, seed: int) -> TabularMDP:
    """Draws P_h(. | x, a) and d1 ~ Dirichlet(1, ..., 1) and r_h(x, a) ~ Uniform(0, 1)."""
    X, A, H = sizes.X, sizes.A, sizes.H
    generator = generator_for(seed, "RandomMDP-v0", X, A, H)
    P = generator.dirichlet(np.ones(X), size=(H, X, A))
    r = generator.uniform(0, 1, size=(H, X, A))
    return TabularMDP(P, r, generator.dirichlet(np.ones(X)))


def layered_mdp(widths: tuple[int, ...], actions: int, seed: int) -> TabularMDP:
    """Draws an MDP with layers of states: step h leads from layer h to layer h + 1.

    ``widths`` is (X_0, ..., X_H): layer h has X_h states, and X_0 = X_H = 1. P_h(. | x, a) ~
    Dirichlet(1, ..., 1) over layer h + 1, r_h(x, a) ~ Uniform(0, 1). Every layer has X = max X_h
    rows in the arrays. Rows of states that do not exist lead to state 0. Raises ValueError if the
    first or the last width is not 1, or any width is below 1.
    """
    if len(widths) < 2 or min(widths) < 1 or widths[0] != 1 or widths[-1] != 1:
        raise ValueError(f"layers must have sizes such as (1, 3, 3, 1), not {widths}")
    H, W, A = len(widths) - 1, max(widths), actions
    generator = generator_for(seed, "LayeredMDP-v0", *widths, A, "1.0")  # Dirichlet(1.0)
    P = np.zeros((H, W, A, W))
    P[..., 0] = 1.0
    for h in range(H):
        after = widths[h + 1]
        P[h, : widths[h]] = 0.0
        P[h, : widths[h], :, :after] = generator.dirichlet(np.ones(after), (widths[h], A))
    r = generator.uniform(0, 1, size=(H, W, A))
    return TabularMDP(P, r, np.eye(W)[0])


class MDPDocument(Document):
    """An MDP's file: an object of nested lists ``P`` (H, X, A, X), ``r`` (H, X, A) and ``d1`` (X,).

    With ``horizon``, ``P`` (X, A, X) and ``r`` (X, A) are repeated at every step.
    """

    horizon: int | None = Field(default=None, ge=1, le=MAX_HORIZON)
    P: list[Any]
    r: list[Any]
    d1: list[float]

    def mdp(self) -> TabularMDP:
        """Returns the MDP. Raises ValueError if a list is ragged, or the errors of `TabularMDP`."""
        P, r = np.array(self.P, dtype=np.float64), np.array(self.r, dtype=np.float64)
        if self.horizon is not None:
            P, r = (np.repeat(part[None], self.horizon, axis=0) for part in (P, r))
        if P.ndim != 4:
            raise ValueError(f"P has {P.ndim} dimensions, not 4; a stationary MDP needs 'horizon'")
        return TabularMDP(P, r, np.array(self.d1))


def load_mdp(path: str | Path) -> TabularMDP:
    """Reads an MDP. Raises LocalError ``invalid-spec`` if the file is missing, large or wrong."""
    file = Path(path)
    try:
        return MDPDocument.model_validate_json(_read_bounded(file)).mdp()
    except ValidationError as error:
        raise LocalError("invalid-spec", f"MDP file {file}: {first_fault(error)}") from error
    except (MemoryError, OSError, OverflowError, TypeError, ValueError) as error:
        raise LocalError("invalid-spec", f"MDP file {file}: {error}") from error


def _read_bounded(file: Path) -> bytes:
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    return file.read_bytes()
