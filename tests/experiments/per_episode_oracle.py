"""The NumPy oracle of learners that plan before every episode, run episode by episode."""

from __future__ import annotations

import numpy as np

from riffle.common.mechanism.counters import Episode
from riffle.common.mechanism.randomness import generator_for
from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.ucbvi_parameters import layout_of
from riffle.experiments.per_episode import DELTA, Setting
from riffle.experiments.regret import optimal_value, policy_value
from riffle.node_client.environments.tabular import TabularMDP
from tests.coordinator.learning.ucbvi_oracle import UCBVI, PrivateUCBVI, privatizer_of


def learner_of(setting: Setting) -> UCBVI:
    """Returns the oracle of a setting."""
    sizes, trust = setting.mdp.sizes, setting.trust
    if trust is None:
        return UCBVI(sizes, setting.K, DELTA, setting.bonus)
    layout = layout_of(sizes, setting.calibration)
    noise = generator_for(setting.seed, "noise")
    privatizer = privatizer_of(trust, setting.noise, layout, setting.K, noise)
    return PrivateUCBVI(sizes, setting.K, layout, privatizer, DELTA, setting.bonus)


def run_oracle(setting: Setting) -> tuple[list[PolicyArray], FloatArray]:
    """Returns the policy of every episode, and the cumulative regret after it (K,)."""
    learner = learner_of(setting)
    generator = generator_for(setting.seed, "episodes")
    best = optimal_value(setting.mdp)
    policies: list[PolicyArray] = []
    for _ in range(setting.K):
        policies.append(learner.policy())
        learner.observe(sample_episode(setting.mdp, policies[-1], generator))
    return policies, np.cumsum([best - policy_value(setting.mdp, policy) for policy in policies])


def sample_episode(mdp: TabularMDP, policy: PolicyArray, generator: np.random.Generator) -> Episode:
    """Draws one episode: uniforms for the start, then next state and reward bit of each step."""
    H = mdp.sizes.H
    states, rewards = np.zeros(H + 1, dtype=np.int64), np.zeros(H, dtype=np.int64)
    actions = np.zeros(H, dtype=np.int64)
    states[0] = _pick(mdp.d1, generator)
    for h in range(H):
        x, a = states[h], policy[h, states[h]]
        actions[h], states[h + 1] = a, _pick(mdp.P[h, x, a], generator)
        rewards[h] = generator.random() < mdp.r[h, x, a]
    return Episode(states, actions, rewards)


def _pick(probabilities: FloatArray, generator: np.random.Generator) -> int:
    cumulative = np.cumsum(probabilities)
    index = np.searchsorted(cumulative, generator.random(), side="right")
    return min(int(index), len(cumulative) - 1)
