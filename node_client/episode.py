"""One user's episode: H steps of the drawn policy in the node's environment.

Rewards of the declared range [low, high] become the mean (R - low) / (high - low) in [0, 1], and
one Bernoulli bit with that mean: a report holds bits, and E[bit] is the scaled reward. After an
early end the user stays in the environment's absorbing state with zero reward bits until step H.

Whatever goes wrong raises `EpisodeFailed`, which carries nothing of the episode, on purpose: it
may be logged by whoever catches it.
"""

import math

import numpy as np

from riffle.common.counters import Episode
from riffle.common.policy import Policies
from riffle.common.randomness import Randomness, bernoulli
from riffle.node_client.environments.environment import Environment


class EpisodeFailed(Exception):  # noqa: N818
    """The environment raised, or gave what it may not give. Says nothing of the episode."""


def run_episode(
    environment: Environment,
    policy: Policies,
    reward_range: tuple[float, float],
    randomness: Randomness,
) -> Episode:
    """Run policy (H, X) for one user.

    Raises:
        EpisodeFailed: the environment failed; no cause is attached, since a cause could hold data.
    """
    try:
        return play(environment, policy, reward_range, randomness)
    except Exception:  # a user's environment may raise anything
        failed = EpisodeFailed("the environment failed")
    raise failed


def reward_mean(reward: float, reward_range: tuple[float, float]) -> float:
    """A reward as a mean in [0, 1].

    Raises:
        ValueError: it is not in the declared range.
    """
    low, high = reward_range
    mean = (reward - low) / (high - low)
    if not (math.isfinite(mean) and 0 <= mean <= 1):
        raise ValueError("a reward is outside the declared range")
    return mean


def play(
    environment: Environment,
    policy: Policies,
    reward_range: tuple[float, float],
    randomness: Randomness,
) -> Episode:
    """The same, with errors that may hold the user's data: not for nodes, only for simulations."""
    H, X = policy.shape
    states = np.empty(H + 1, dtype=np.int64)
    actions = np.empty(H, dtype=np.int64)
    rewards = np.zeros(H, dtype=np.int64)
    states[0] = _checked(environment.reset(randomness), X)
    over = False
    for h in range(H):
        actions[h] = policy[h, states[h]]
        if over:
            states[h + 1] = states[h]
            continue
        state, reward, over = environment.step(int(actions[h]), randomness)
        rewards[h] = bernoulli(randomness, reward_mean(reward, reward_range))
        states[h + 1] = _checked(_absorbing(environment) if over else state, X)
    return Episode(states, actions, rewards)


def _checked(state: int, X: int) -> int:
    if not 0 <= state < X:
        raise ValueError("a state is outside the declared states")
    return state


def _absorbing(environment: Environment) -> int:
    if environment.absorbing is None:
        raise ValueError("an episode ended early in an environment that declared it never would")
    return environment.absorbing
