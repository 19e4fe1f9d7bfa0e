"""Riffle's own environments besides RiverSwim (`tabular`).

- Bandit-v0: the multi-armed bandit of paper 000, section VI (X = 1, H = 1); users differ.
- SpectrumAccess-v0: dynamic spectrum access, the application that paper 000 opens with.
- RandomMDP-v0: an MDP drawn from a seed, for tests and sweeps.
- LayeredMDP-v0: a loop-free layered MDP drawn from a seed (paper 004, section 2.1).
- File-v0: an MDP from a JSON file.

The same seed and sizes give the same environment on every machine.
"""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError
from scipy.special import ndtr, ndtri

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.randomness import Randomness, generator_for
from riffle.common.protocol.descriptor import MAX_HORIZON, Document, first_fault
from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.tabular import Floats, Step, TabularMDP

LARGEST_MEAN = 0.99
MAX_CHANNELS = 6
RETUNED_SLOT = 0.5
# The first channel is idle more often than the second but changes faster: the best depends on x.
TO_BUSY = (0.30, 0.10, 0.20)
TO_IDLE = (0.50, 0.15, 0.70)
MAX_FILE_BYTES = 256 << 20


def global_means(arms: int, seed: int) -> Floats:
    """Draws the arms' global means r*(a) ~ Uniform(0, 0.99), shape (A,)."""
    return generator_for(seed, "Bandit-v0", arms).uniform(0, LARGEST_MEAN, arms)


def clipped_mean(means: Floats, sigma: float) -> Floats:
    """Returns E[clip(m + xi, 0, 1)], xi ~ N(0, sigma^2), for every mean m in [0, 1] (A,).

    With u = m / sigma, v = (1 - m) / sigma and the normal law Phi with density phi, this is
    m (Phi(v) - Phi(-u)) + sigma (phi(u) - phi(v)) + 1 - Phi(v).
    """
    if sigma == 0:
        return means.copy()
    u, v = means / sigma, (1 - means) / sigma
    inside = means * (ndtr(v) - ndtr(-u)) + sigma * (_density(u) - _density(v))
    return np.asarray(np.clip(inside + ndtr(-v), 0, 1))


def _density(z: Floats) -> Floats:
    return np.asarray(np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


class BanditEnvironment:
    """A bandit with one pull per user; a user's means are r(a) = r*(a) + xi(a), xi ~ N(0, sigma^2).

    xi is drawn for every user and arm; the reward bit is Bernoulli(clip(r(a), 0, 1)). For a random
    user, the bit is Bernoulli(E[clip(r*(a) + xi, 0, 1)]). `mdp` holds these means, and V* is the
    largest of them. Raises ValueError if there is no arm, a mean is outside [0, 1], or sigma < 0.
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
        """Draws a user's xi(a) for every arm: the inverse normal law at a uniform 53-bit number."""
        words = np.frombuffer(randomness.read(8 * self._means.size), dtype="<u8") >> 11
        xi = self._sigma * ndtri((words + 0.5) / (1 << 53))
        self._user = np.clip(self._means + xi, 0, 1)
        return 0

    def step(self, action: int, randomness: Randomness) -> Step:
        """Pulls an arm; the reward is this user's clipped mean."""
        return 0, float(self._user[action]), False


def spectrum_access(channels: int = 2, H: int = 6) -> TabularMDP:
    """Returns the MDP of a radio that chooses among C channels over H steps (X = C 2^C, A = C).

    Channel c is idle or busy by a Gilbert-Elliott chain (it turns busy with probability b_c, idle
    with g_c). The radio senses all channels, is tuned to one, and chooses one for the next slot. It
    transmits if that channel is idle then; after retuning, only half of the slot is left. A choice
    has a cost now and an effect later, which makes this a proper MDP.

    State x = tuned * 2^C + occupancy, where bit c of the occupancy is 1 if channel c is busy.
    P(x' | x, a): tuned' = a, and channels move independently. r(x, a) = Pr[channel a idle next | x]
    * (1 if a = tuned else 1/2). At the start the radio is tuned to channel 0 and every channel has
    its stationary law. Raises ValueError for fewer than 2 or more than 6 channels.
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
    return TabularMDP(np.repeat(P[None], H, axis=0), np.repeat(r[None], H, axis=0), d1)


def _occupancy_law(busy_chance: Floats, busy: np.typing.NDArray[np.int64]) -> Floats:
    """Returns the law (S, 2^C) of the next occupancy from the chances (S, C) to be busy."""
    chance = np.where(busy[None] == 1, busy_chance[:, None], 1 - busy_chance[:, None])
    return np.asarray(chance.prod(axis=-1))


def _dynamics(occupancy: Floats, idle: Floats) -> tuple[Floats, Floats]:
    """Returns P (X, A, X) and r (X, A) from occupancy law (2^C, 2^C) and idle chances (2^C, C)."""
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
    """Draws an MDP with layers of ``widths`` (X_0, ..., X_H), X_0 = X_H = 1, one step a layer.

    P_h(. | x, a) ~ Dirichlet(1, ..., 1) over layer h + 1, r_h(x, a) ~ Uniform(0, 1). States are
    numbered from 0 in every layer, and X = max X_h. A state that a layer does not have is never
    reached; it leads to state 0. Raises ValueError if ``widths`` are not such layers.
    """
    if len(widths) < 2 or min(widths) < 1 or widths[0] != 1 or widths[-1] != 1:
        raise ValueError(f"layers must have sizes such as (1, 3, 3, 1), not {widths}")
    H, W, A = len(widths) - 1, max(widths), actions
    generator = generator_for(seed, "LayeredMDP-v0", *widths, A, "1.0")  # the concentration
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

    With ``horizon``, ``P`` (X, A, X) and ``r`` (X, A) are repeated at every step. Unknown fields
    are refused; `TabularMDP` checks shapes and sums.
    """

    horizon: int | None = Field(default=None, ge=1, le=MAX_HORIZON)
    P: list[Any]
    r: list[Any]
    d1: list[float]

    def mdp(self) -> TabularMDP:
        """Returns the MDP. Raises ValueError if a list is ragged, and as `TabularMDP` does."""
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
