"""Gymnasium environments that publish their table have a known MDP."""

import types
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.randomness import SystemRandomness
from riffle.common.protocol.errors import LocalError
from riffle.experiments.regret import policy_value
from riffle.node_client.environments.gymnasium import adapt
from riffle.node_client.environments.registry import declaration_of, exact_mdp, make
from riffle.node_client.environments.tabular import Declaration, TabularMDP
from riffle.node_client.episode import play


class Lake:
    """A corridor of three states that publishes its table; action 1 moves on half of the time."""

    observation_space = types.SimpleNamespace(n=np.int64(3), start=np.int64(0))
    action_space = types.SimpleNamespace(n=np.int64(2), start=np.int64(0))
    initial_state_distrib = np.array([1.0, 0.0, 0.0])
    P = {
        x: {
            0: [(1.0, x, 0.0, False)],
            1: [(0.5, x, 0.0, False), (0.5, x + 1, 2.0 * (x == 1), x == 1)],
        }
        for x in range(2)
    } | {2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, 0.0, True)]}}

    def reset(self, *, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError

    def step(self, action: int, /) -> tuple[int, float, bool, bool, dict[str, Any]]:
        raise NotImplementedError


def test_an_environment_that_publishes_its_table_has_an_mdp() -> None:
    mdp = exact_mdp(adapt(Lake(), horizon=2, reward_low=0.0, reward_high=2.0))
    assert mdp.sizes == Sizes(X=4, A=2, H=2)
    np.testing.assert_array_equal(mdp.P[0, 1, 1], [0.0, 0.5, 0.0, 0.5])
    assert mdp.r[0, 1, 1] == 0.5
    always = np.ones((2, 4), dtype=np.int64)
    assert policy_value(mdp, always) == 0.25


def test_a_time_limit_within_the_horizon_hides_the_table() -> None:
    limited = Lake()
    limited.spec = types.SimpleNamespace(max_episode_steps=2)  # type: ignore[attr-defined]
    with pytest.raises(LocalError, match="simulated with --per-user, not by population"):
        exact_mdp(adapt(limited, horizon=2, reward_low=0.0, reward_high=2.0))
    declared = declaration_of(adapt(limited, horizon=2, reward_low=0.0, reward_high=2.0))
    assert declared == Declaration(), "a limit may end an episode anywhere"


def test_frozen_lakes_table_is_its_law() -> None:
    lake = make("gymnasium:FrozenLake-v1", horizon=8)
    mdp = exact_mdp(lake)
    policy = np.full((8, 17), 2, dtype=np.int64)
    runs = [play(lake, policy, (0.0, 1.0), SystemRandomness()) for _ in range(2000)]
    for h, x in ((3, 16), (3, 1), (7, 16)):  # 16: absorbed
        seen = np.mean([episode.states[h + 1] == x for episode in runs])
        exact = _visits(mdp, policy)[h + 1, x]
        assert abs(seen - exact) < 5 * np.sqrt(0.25 / 2000)  # 5 deviations: 6e-7 each


def test_frozen_lake_declares_its_table() -> None:
    """On ice a move goes three ways. No step begins in a hole or at the goal."""
    declared = declaration_of(make("gymnasium:FrozenLake-v1", horizon=20))
    assert declared.homogeneous
    counted, dense = (
        CounterLayout(Sizes(17, 4, 20), "joint", None, support).counters
        for support in (declared.support, None)
    )
    assert 5 * counted < dense
    lake = make("gymnasium:FrozenLake-v1", horizon=20)
    layout = CounterLayout(lake.sizes, "joint", None, declared.support)
    for action in range(4):
        policy = np.full((20, 17), action, dtype=np.int64)
        for _ in range(50):
            layout.check(play(lake, policy, (0.0, 1.0), SystemRandomness()))


def _visits(mdp: TabularMDP, policy: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    d = [mdp.d1]
    for h in range(mdp.sizes.H):
        d.append(d[-1] @ mdp.P[h, np.arange(mdp.sizes.X), policy[h]])
    return np.array(d)


def test_arguments_go_to_gymnasium() -> None:
    lake = make("gymnasium:FrozenLake-v1", map_name="8x8", is_slippery=False, horizon=16)
    assert lake.sizes == Sizes(65, 4, 16)
    assert set(np.unique(exact_mdp(lake).P)) == {0.0, 1.0}, "no ice"
    cliff = make("gymnasium:CliffWalking-v1", reward_low=-100, reward_high=-1)
    assert exact_mdp(cliff).r.max() == 1.0


@pytest.mark.parametrize("kind", ["class", "made", "function"])
def test_an_environment_may_be_a_python_object(kind: str) -> None:
    toy_text = pytest.importorskip("gymnasium.envs.toy_text")
    gymnasium = pytest.importorskip("gymnasium")
    if kind == "class":
        made = make(toy_text.FrozenLakeEnv, map_name="8x8", horizon=9)
    elif kind == "made":
        made = make(gymnasium.make("FrozenLake-v1", map_name="8x8"), horizon=9)
    else:
        made = make(
            lambda size: make("gymnasium:FrozenLake-v1", map_name=size, horizon=9), size="8x8"
        )
    assert made.sizes == Sizes(65, 4, 9)
    assert make(made) is made
    with pytest.raises(LocalError, match="no parameter 'nonsense'"):
        make(made, nonsense=1)
