"""Episodes: sizes, scaling of rewards, early ends, failures that reveal nothing."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riffle import node_client
from riffle.common.mechanism.counters import CounterLayout, Sizes, Support
from riffle.common.mechanism.randomness import SeededRandomness, SystemRandomness
from riffle.node_client.environments.registry import make
from riffle.node_client.episode import play, reward_mean, run_episode, slot_report
from tests.node_client import world

UNIT = (0.0, 1.0)


class Scripted:
    """Has two states and an absorbing third; returns the given outcomes step by step."""

    sizes = Sizes(X=3, A=2, H=3)
    absorbing: int | None = 2

    def __init__(self, *steps: Any, low: float = 0.0, high: float = 1.0, start: int = 0) -> None:
        self.reward_range = (low, high)
        self._steps = list(steps)
        self._start = start

    def reset(self, randomness: Any) -> int:
        return self._start

    def step(self, action: int, randomness: Any) -> tuple[int, float, bool]:
        outcome = self._steps.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        result: tuple[int, float, bool] = outcome
        return result


POLICY = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 1]])


def test_actions_follow_the_policy_and_states_the_environment() -> None:
    environment = Scripted((1, 0.0, False), (0, 1.0, False), (1, 1.0, False))
    episode = play(environment, POLICY, UNIT, SystemRandomness())
    assert episode.states.tolist() == [0, 1, 0, 1]
    assert episode.actions.tolist() == [0, 0, 0]
    assert episode.rewards.tolist() == [0, 1, 1]
    assert repr(episode) == "Episode(private)"


def test_an_early_end_stays_in_the_absorbing_state_with_zero_rewards() -> None:
    environment = Scripted((1, 1.0, True), low=-1.0, high=1.0)
    episode = play(environment, POLICY, (-1.0, 1.0), SystemRandomness())
    assert episode.states.tolist() == [0, 2, 2, 2]
    assert episode.actions.tolist() == [0, 1, 1]
    assert episode.rewards.tolist() == [1, 0, 0]


FAULTS: dict[str, Scripted] = {
    "raises": Scripted(RuntimeError("SECRET")),
    "state too large": Scripted((3, 0.0, False)),
    "state negative": Scripted((-1, 0.0, False)),
    "first state": Scripted(start=9),
    "reward too large": Scripted((0, 1.5, False)),
    "reward too small": Scripted((0, -0.1, False)),
    "reward nan": Scripted((0, float("nan"), False)),
    "reward infinite": Scripted((0, float("inf"), False)),
    "not a triple": Scripted((0, 1.0)),
}


@pytest.mark.parametrize("environment", FAULTS.values(), ids=FAULTS.keys())
def test_a_failure_reveals_nothing(environment: Scripted) -> None:
    assert run_episode(environment, POLICY, UNIT, SystemRandomness()) is None


def test_an_undeclared_early_end_is_a_failure() -> None:
    environment = Scripted((1, 1.0, True))
    environment.absorbing = None
    assert run_episode(environment, POLICY, UNIT, SystemRandomness()) is None


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6), share=st.floats(0, 1, allow_nan=False))
def test_every_declared_reward_has_a_mean(low: float, width: float, share: float) -> None:
    high = low + width
    reward = min(max(low + share * (high - low), low), high)
    assert 0 <= reward_mean(reward, (low, high)) <= 1
    assert reward_mean(low, (low, high)) == 0
    assert reward_mean(high, (low, high)) == 1


def test_reward_bits_have_the_scaled_mean() -> None:
    """Binomial test, two-sided, error 1e-6: rewards 0.5 of [-1, 3] are bits of mean 3/8."""
    from scipy.stats import binomtest

    draws, total = 4_000, 0
    for _ in range(draws):
        environment = Scripted(*[(0, 0.5, False)] * 3, low=-1.0, high=3.0)
        episode = play(environment, POLICY, (-1.0, 3.0), SystemRandomness())
        total += int(episode.rewards.sum())
    assert binomtest(total, 3 * draws, 3 / 8).pvalue > 1e-6


@settings(deadline=None, max_examples=60)
@given(
    X=st.integers(1, 5),
    A=st.integers(1, 4),
    H=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    families=st.sampled_from(["paper", "lean", "joint"]),
    data=st.data(),
)
def test_any_episode_encodes_within_its_slots(
    X: int, A: int, H: int, seed: int, families: Any, data: st.DataObject
) -> None:
    environment = make("RandomMDP-v0", states=X, actions=A, horizon=H, seed=seed)
    layer = data.draw(st.none() | st.integers(0, H - 1))
    policy = SeededRandomness.keyed(seed, "policy").generator.integers(0, A, (H, X))
    episode = play(environment, policy, UNIT, SeededRandomness.keyed(seed, "run"))
    layout = CounterLayout(Sizes(X, A, H), families, layer)
    messages = layout.encode(episode)
    assert np.array_equal(episode.actions, policy[np.arange(H), episode.states[:H]])
    assert messages.size <= layout.data_slots
    assert np.unique(messages).size == messages.size
    assert messages.min() >= 0
    assert messages.max() < layout.counters


def test_an_episode_outside_the_support_is_reported_like_a_failed_one() -> None:
    """Not one message differs from those of a failed episode, and the layout may count one step."""
    possible = Support((0,), ((((0,), (0,)),) * 4,))
    for layer, slots in ((None, 2), (0, 1)):
        changes = {"support": possible, "layer": layer, "data_slots": slots}
        batch = world.descriptor(**changes, test_seed=5)
        for states, inside in (((0, 0, 0), True), ((0, 0, 1), False), ((1, 0, 0), False)):
            moves = [(state, 1.0, False) for state in states[1:]]
            environment = Scripted(*moves, start=states[0])
            environment.sizes = world.SIZES
            episode, symbols = slot_report(batch, environment, 3, test_entry=True)
            _, failed = slot_report(batch, None, 3, test_entry=True)
            assert (episode is not None) == inside
            assert np.array_equal(symbols, failed) == (not inside)


def test_no_node_runs_an_episode_whose_error_may_reveal_it() -> None:
    """Errors of `play` hold data: it is for simulations, and here only `run_episode` calls it."""
    package = Path(node_client.__file__).parent
    texts = {file.name: file.read_text() for file in package.rglob("*.py")}
    assert [name for name in texts if re.search(r"\bplay\b", texts[name])] == ["episode.py"]
    assert texts["episode.py"].count(" play(") == 2, "its definition and one call"
