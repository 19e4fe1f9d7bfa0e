"""A Gymnasium environment of one's own, as the users' world: cross a bridge, do not fall off.

    riffle simulate --per-user --environment examples/own_gymnasium.py:make --seeds 2
    riffle up --environment examples/own_gymnasium.py:make --episodes 2000 --out runs/bridge

Gymnasium's own need no file: `gymnasium:FrozenLake-v1`. Regret needs an environment with a table.
"""

from typing import Any

import gymnasium
from gymnasium.spaces import Discrete

from riffle import GymnasiumEnvironment

Info = dict[str, object]


class Bridge(gymnasium.Env[Any, Any]):
    """Three planks; action 0 walks, action 1 runs, which is faster and may end in the water."""

    observation_space, action_space = Discrete(3), Discrete(2)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[int, Info]:
        """Begin at the first plank."""
        super().reset(seed=seed)
        self.plank = 0
        return self.plank, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, Info]:
        """One plank, or two; whoever arrives dry is rewarded."""
        fell = action == 1 and self.np_random.random() < 0.3
        self.plank += 1 + action
        arrived = self.plank > 2
        return min(self.plank, 2), float(arrived and not fell), fell or arrived, False, {}


def make(horizon: int = 3) -> GymnasiumEnvironment:
    """The bridge for users who take at most `horizon` steps; rewards are in [0, 1]."""
    return GymnasiumEnvironment(Bridge(), horizon, 0.0, 1.0)
