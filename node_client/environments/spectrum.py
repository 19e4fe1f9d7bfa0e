"""SpectrumAccess-v0: dynamic spectrum access, the application `000` opens with.

C channels belong to primary users who come and go: channel c is idle or busy and follows a
Gilbert-Elliott chain (idle to busy with probability b_c, busy to idle with g_c). A secondary radio
senses all channels and is tuned to one. At a step it chooses the channel for the next slot; it
transmits with success when that channel is idle then, and a radio that had to retune has only half
of the slot left. So a choice costs now and places the radio for later: a proper MDP.

State x = tuned * 2^C + occupancy, bit c of the occupancy being 1 when channel c is busy:
X = C 2^C, A = C. P(x' | x, a): tuned' = a, channels move independently. The reward's mean is
r(x, a) = Pr[channel a idle next | x] * (1 if a = tuned else 1/2). At the start the radio is tuned
to channel 0 and every channel has its stationary law.
"""

import numpy as np

from riffle.node_client.environments.tabular import Floats, TabularMDP

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
