"""Bandit-v0: the multi-armed bandit of `000`, section VI (X = 1, H = 1), with users who differ.

The global means are r*(a) ~ Uniform(0, 0.99), drawn once from ``seed``. A user's local means are
r(a) = r*(a) + xi(a), xi(a) ~ N(0, sigma^2) for every user and arm; the reward bit is
Bernoulli(clip(r(a), 0, 1)). Over the population a pull of arm a therefore is
Bernoulli(E[clip(r*(a) + xi, 0, 1)]), which is what `mdp` holds and what V* is the largest of.

With m = r*(a), u = m / sigma, v = (1 - m) / sigma, Phi and phi the normal law and its density:
E[clip(m + xi, 0, 1)] = m (Phi(v) - Phi(-u)) + sigma (phi(u) - phi(v)) + 1 - Phi(v).

SpectrumAccess-v0: dynamic spectrum access, the application `000` opens with.

C channels belong to primary users who come and go: channel c is idle or busy and follows a
Gilbert-Elliott chain (idle to busy with probability b_c, busy to idle with g_c). A secondary radio
senses all channels and is tuned to one. At a step it chooses the channel for the next slot; it
transmits with success when that channel is idle then, and a radio that had to retune has only half
of the slot left. So a choice costs now and places the radio for later: a proper MDP.

State x = tuned * 2^C + occupancy, bit c of the occupancy being 1 when channel c is busy:
X = C 2^C, A = C. P(x' | x, a): tuned' = a, channels move independently. The reward's mean is
r(x, a) = Pr[channel a idle next | x] * (1 if a = tuned else 1/2). At the start the radio is tuned
to channel 0 and every channel has its stationary law.

RandomMDP-v0: an MDP drawn from a seed, for tests and sweeps.

P_h(. | x, a) ~ Dirichlet(1, ..., 1), r_h(x, a) ~ Uniform(0, 1), d1 ~ Dirichlet(1, ..., 1), every
step on its own; the same seed and sizes give the same MDP on every machine.

Loop-free layered MDPs drawn from a seed (004, section 2.1).

States come in layers of sizes (X_0, ..., X_H), X_0 = X_H = 1, and every transition leads to the
next layer: P_h(. | x, a) ~ Dirichlet(c, ..., c) over layer h + 1, r_h(x, a) ~ Uniform(0, 1). States
are numbered from 0 in every layer, so an MDP has X = max X_h states; at layers with fewer, the rest
are never reached and lead to state 0. Steps are the layers: H of them.

File-v0: an MDP from a JSON file.

The file is one object: ``P`` (H, X, A, X), ``r`` (H, X, A), ``d1`` (X,) as nested lists. With
``horizon`` in it, ``P`` (X, A, X) and ``r`` (X, A) are repeated at every step. Unknown fields are
refused.
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
from riffle.node_client.environments.tabular import Floats, TabularMDP

LARGEST_MEAN = 0.99


def clipped_mean(means: Floats, sigma: float) -> Floats:
    """E[clip(m + N(0, sigma^2), 0, 1)] for every mean m in [0, 1] (A,)."""
    if sigma == 0:
        return means.copy()
    u, v = means / sigma, (1 - means) / sigma
    inside = means * (ndtr(v) - ndtr(-u)) + sigma * (_density(u) - _density(v))
    return np.asarray(np.clip(inside + ndtr(-v), 0, 1))


def global_means(arms: int, seed: int) -> Floats:
    """r*(a) ~ Uniform(0, 0.99), shape (A,)."""
    return generator_for(seed, "Bandit-v0", arms).uniform(0, LARGEST_MEAN, arms)


class BanditEnvironment:
    """One pull a user, whose arms differ from the population's by N(0, sigma^2).

    Raises:
        ValueError: no arms, a mean outside [0, 1], or a negative sigma.
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
        """Draw a user: xi(a) for every arm, by the inverse of the normal law at 53 bits."""
        words = np.frombuffer(randomness.read(8 * self._means.size), dtype="<u8") >> 11
        xi = self._sigma * ndtri((words + 0.5) / (1 << 53))
        self._user = np.clip(self._means + xi, 0, 1)
        return 0

    def step(self, action: int, randomness: Randomness) -> tuple[int, float, bool]:
        """Pull an arm: this user's clipped mean."""
        return 0, float(self._user[action]), False


def _density(z: Floats) -> Floats:
    return np.asarray(np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


MAX_CHANNELS = 6
RETUNED_SLOT = 0.5
# Quiet-but-flighty channels first, busy-but-steady ones last: the best channel depends on x.
TO_BUSY = (0.30, 0.10, 0.20)
TO_IDLE = (0.50, 0.15, 0.70)


def spectrum_access(channels: int = 2, H: int = 6) -> TabularMDP:
    """The MDP of C channels (X = C 2^C, A = C) over H steps.

    Raises:
        ValueError: fewer than 2 or more than 6 channels.
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
    """Law (S, 2^C) of the next occupancy from each channel's chance of being busy (S, C)."""
    chance = np.where(busy[None] == 1, busy_chance[:, None], 1 - busy_chance[:, None])
    return np.asarray(chance.prod(axis=-1))


def _dynamics(occupancy: Floats, idle: Floats) -> tuple[Floats, Floats]:
    """P (X, A, X) and r (X, A) from the occupancy's law (2^C, 2^C) and idle chances (2^C, C)."""
    S, C = idle.shape
    P = np.zeros((C, S, C, C, S))
    r = np.zeros((C, S, C))
    for tuned in range(C):
        for a in range(C):
            P[tuned, :, a, a, :] = occupancy
            r[tuned, :, a] = idle[:, a] * (1.0 if a == tuned else RETUNED_SLOT)
    return P.reshape(C * S, C, C * S), r.reshape(C * S, C)


def random_mdp(sizes: Sizes, seed: int) -> TabularMDP:
    """The MDP of ``seed`` with these sizes."""
    X, A, H = sizes.X, sizes.A, sizes.H
    generator = generator_for(seed, "RandomMDP-v0", X, A, H)
    P = generator.dirichlet(np.ones(X), size=(H, X, A))
    r = generator.uniform(0, 1, size=(H, X, A))
    return TabularMDP(P, r, generator.dirichlet(np.ones(X)))


def layered_mdp(
    widths: tuple[int, ...], actions: int, seed: int, concentration: float = 1.0
) -> TabularMDP:
    """The layered MDP of ``seed``.

    Small ``concentration`` makes transitions nearly deterministic, large makes them uniform.

    Raises:
        ValueError: fewer than two layers, a layer without states, or ends that are no singletons.
    """
    if len(widths) < 2 or min(widths) < 1 or widths[0] != 1 or widths[-1] != 1:
        raise ValueError(f"layers must have sizes such as (1, 3, 3, 1), not {widths}")
    H, W, A = len(widths) - 1, max(widths), actions
    generator = generator_for(seed, "LayeredMDP-v0", *widths, A, str(concentration))
    P = np.zeros((H, W, A, W))
    P[..., 0] = 1.0
    for h in range(H):
        after = np.full(widths[h + 1], concentration)
        P[h, : widths[h]] = 0.0
        P[h, : widths[h], :, : widths[h + 1]] = generator.dirichlet(after, (widths[h], A))
    r = generator.uniform(0, 1, size=(H, W, A))
    start = np.zeros(W)
    start[0] = 1.0
    return TabularMDP(P, r, start)


MAX_FILE_BYTES = 256 << 20


class MDPDocument(Document):
    """The file as read; `TabularMDP` checks shapes and sums."""

    horizon: int | None = Field(default=None, ge=1, le=MAX_HORIZON)
    P: list[Any]
    r: list[Any]
    d1: list[float]

    def mdp(self) -> TabularMDP:
        """The MDP.

        Raises:
            ValueError: lists are ragged, shapes disagree, or a distribution does not sum to one.
        """
        P, r = np.array(self.P, dtype=np.float64), np.array(self.r, dtype=np.float64)
        if self.horizon is not None:
            P, r = (np.repeat(part[None], self.horizon, axis=0) for part in (P, r))
        if P.ndim != 4:
            raise ValueError(f"P has {P.ndim} dimensions, not 4; a stationary MDP needs 'horizon'")
        return TabularMDP(P, r, np.array(self.d1))


def load(path: str | Path) -> TabularMDP:
    """Read an MDP.

    Raises:
        LocalError: ``invalid-spec``: the file is missing, too large, or not such an MDP.
    """
    file = Path(path)
    try:
        return MDPDocument.model_validate_json(_bounded(file)).mdp()
    except ValidationError as error:
        raise LocalError("invalid-spec", f"MDP file {file}: {first_fault(error)}") from error
    except (MemoryError, OSError, OverflowError, TypeError, ValueError) as error:
        raise LocalError("invalid-spec", f"MDP file {file}: {error}") from error


def _bounded(file: Path) -> bytes:
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    return file.read_bytes()
