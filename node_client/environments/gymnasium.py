"""Gymnasium environments with discrete spaces, as environments of a node.

The library is optional and imported only for ids of the form ``gymnasium:<id>``. States are the
values of the observation space and one absorbing state, for episodes that end early.

Some environments, such as Gymnasium's toy texts, publish a table: ``initial_state_distrib`` and
``P[x][a]``, a list of (probability, x', reward, terminated).
"""

import importlib
from typing import Any, TypeAlias

import numpy as np

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.randomness import Randomness
from riffle.common.protocol.errors import LocalError
from riffle.node_client.environments.tabular import Step, TabularMDP, stationary

GymnasiumLike: TypeAlias = Any
"""A `gymnasium.Env`. Riffle uses ``reset``, ``step``, both spaces, and a table if there is one."""


class GymnasiumEnvironment:
    """A Gymnasium environment with rewards in [low, high] and at most ``horizon`` steps.

    Observations and actions are numbered from 0, whatever the ``start`` of their space is. Raises
    LocalError ``invalid-spec`` if a space is not discrete.
    """

    def __init__(self, env: GymnasiumLike, horizon: int, low: float, high: float) -> None:
        self._env = env
        self._states = _discrete(env.observation_space, "observation")
        self._actions = _discrete(env.action_space, "action")
        self.absorbing = int(self._states.n)
        self.sizes = Sizes(X=self.absorbing + 1, A=int(self._actions.n), H=horizon)
        self.reward_range = (low, high)

    @property
    def native(self) -> object:
        """The Gymnasium environment without the library's wrappers."""
        return _unwrapped(self._env)

    def reset(self, randomness: Randomness) -> int:
        """Begins an episode. Gymnasium's own generator gets a seed from ``randomness``."""
        observation, _ = self._env.reset(seed=int.from_bytes(randomness.read(8), "little"))
        return int(observation) - int(self._states.start)

    def step(self, action: int, randomness: Randomness) -> Step:
        """Takes an action. If Gymnasium terminates or truncates the episode, it ends early."""
        native = action + int(self._actions.start)
        observation, reward, terminated, truncated, _ = self._env.step(native)
        state = int(observation) - int(self._states.start)
        return state, float(reward), bool(terminated or truncated)


class TabledGymnasium(GymnasiumEnvironment):
    """A Gymnasium environment that publishes a table P of transitions. ``mdp`` is made from P."""

    def __init__(self, env: GymnasiumLike, horizon: int, low: float, high: float) -> None:
        super().__init__(env, horizon, low, high)
        _check_range(_unwrapped(env).P, low, high)
        X, A = self.sizes.X, self.sizes.A
        P, r = np.zeros((X, A, X)), np.zeros((X, A))
        P[self.absorbing, :, self.absorbing] = 1.0
        for x, actions in _unwrapped(env).P.items():
            for a, outcomes in actions.items():
                for p, y, reward, terminated in outcomes:
                    P[x, a, self.absorbing if terminated else y] += p
                    r[x, a] += p * (reward - low) / (high - low)
        d1 = np.append(np.asarray(_unwrapped(env).initial_state_distrib, dtype=np.float64), 0.0)
        self.mdp: TabularMDP = stationary(P, r, d1, horizon)


def adapt(
    env: GymnasiumLike, horizon: int = 20, reward_low: float = 0.0, reward_high: float = 1.0
) -> GymnasiumEnvironment:
    """Wraps a Gymnasium environment for Riffle. Adds ``mdp`` if the environment has a table.

    Tables ignore time limits, so there is no MDP if a limit could end an episode within the
    horizon.
    """
    low, high = reward_low, reward_high
    limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    native = _unwrapped(env)
    tabled = isinstance(getattr(native, "P", None), dict)
    tabled = tabled and hasattr(native, "initial_state_distrib")
    if tabled and (limit is None or horizon < limit):
        return TabledGymnasium(env, horizon, low, high)
    return GymnasiumEnvironment(env, horizon, low, high)


def make_gymnasium(
    name: str,
    *,
    horizon: int = 20,
    reward_low: float = 0.0,
    reward_high: float = 1.0,
    **arguments: Any,  # noqa: ANN401  (Gymnasium checks them)
) -> GymnasiumEnvironment:
    """Makes the Gymnasium environment ``name``, with rewards in [reward_low, reward_high].

    Raises LocalError ``invalid-spec`` if Gymnasium is not installed, does not know the name, or
    refuses an argument.
    """
    try:
        library = importlib.import_module("gymnasium")
    except ImportError as error:
        raise LocalError(
            "invalid-spec", f"environment gymnasium:{name} needs the package 'gymnasium'"
        ) from error
    try:
        env = library.make(name, **arguments)
    except Exception as error:  # all of Gymnasium's dozen error types are handled alike
        raise LocalError("invalid-spec", f"gymnasium cannot make {name!r}: {error}") from error
    return adapt(env, horizon, reward_low, reward_high)


def _check_range(table: dict[int, dict[int, list[Any]]], low: float, high: float) -> None:
    """Raises LocalError ``invalid-spec`` if a reward of the table is outside [low, high]."""
    rewards = [row[2] for actions in table.values() for rows in actions.values() for row in rows]
    least, most = float(min(rewards)), float(max(rewards))
    if least < low or most > high:
        raise LocalError(
            "invalid-spec",
            f"its rewards go from {least:g} to {most:g}, which is outside [{low:g}, {high:g}]: "
            f"declare them, --param reward_low={least:g} --param reward_high={most:g}",
        )


def _unwrapped(env: GymnasiumLike) -> GymnasiumLike:
    return getattr(env, "unwrapped", env)


def _discrete(space: Any, kind: str) -> Any:  # noqa: ANN401
    if not hasattr(space, "n") or not hasattr(space, "start"):
        raise LocalError(
            "invalid-spec",
            f"the {kind} space is {space}; it must be Discrete: docs/own.md shows a wrapper that "
            "discretises a Box, and one that flattens a Tuple or MultiDiscrete",
        )
    return space
