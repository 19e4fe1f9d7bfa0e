"""Every environment follows its MDP, by exact binomial tests with error 1e-6 a test function.

Every outcome is tested with Bonferroni's bound, not by chi-square: some outcomes are so rare that a
chi-square tail at 1e-6 would be wrong by orders of magnitude.
"""

from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from riffle.common.mechanism.randomness import SystemRandomness
from riffle.node_client.environments.registry import exact_mdp, make
from riffle.node_client.environments.tabular import (
    BanditEnvironment,
    clipped_mean,
    global_means,
    riverswim,
    spectrum_access,
)

ALPHA = 1e-6
TABULAR: list[tuple[str, dict[str, Any]]] = [
    ("RiverSwim-v0", {"states": 4, "horizon": 6}),
    ("SpectrumAccess-v0", {"channels": 2, "horizon": 3}),
    ("RandomMDP-v0", {"states": 3, "actions": 2, "horizon": 3, "seed": 5}),
]


@pytest.mark.parametrize(("name", "parameters"), TABULAR, ids=[name for name, _ in TABULAR])
def test_transitions_and_starts_follow_the_matrices(name: str, parameters: dict[str, Any]) -> None:
    environment, source = make(name, **parameters), SystemRandomness()
    mdp = exact_mdp(environment)
    X, A, H = environment.sizes.X, environment.sizes.A, environment.sizes.H
    counts = np.zeros((H, X, A, X), dtype=np.int64)
    starts = np.zeros(X, dtype=np.int64)
    actions = np.frombuffer(source.read(4_000 * H), dtype=np.uint8).reshape(-1, H) % A
    for row in actions:
        x = environment.reset(source)
        starts[x] += 1
        for h, a in enumerate(row):
            y, reward, over = environment.step(int(a), source)
            counts[h, x, a, y] += 1
            assert (reward, over) == (mdp.r[h, x, a], False)
            x = y
    assert_law(np.vstack([starts[None], counts.reshape(-1, X)]), np.vstack([mdp.d1, flat(mdp.P)]))


def flat(P: Any) -> Any:
    return P.reshape(-1, P.shape[-1])


def assert_law(counts: Any, law: Any) -> None:
    """Tests counts (R, X) against laws (R, X): every outcome of every row, error 1e-6 in all."""
    assert counts[law == 0].sum() == 0
    totals = counts.sum(axis=1)
    cells = [(i, y) for i, y in np.argwhere((law > 0) & (law < 1)) if totals[i] > 0]
    assert cells
    p_values = [binomtest(int(counts[c]), int(totals[c[0]]), law[c]).pvalue for c in cells]
    assert min(p_values) > ALPHA / len(cells)


def optimal_value(mdp: Any) -> float:
    V = np.zeros(mdp.sizes.X)
    for h in reversed(range(mdp.sizes.H)):
        V = (mdp.r[h] + mdp.P[h] @ V).max(axis=1)
    return float(mdp.d1 @ V)


def test_riverswim_has_its_published_value() -> None:
    assert optimal_value(riverswim(4, 6)) == pytest.approx(0.475791, abs=5e-7)
    always_left = 6 * 0.005
    assert always_left == pytest.approx(0.03)


def test_spectrum_choices_matter_later() -> None:
    """Greedy on the next slot is not optimal: retuning places the radio for later slots."""
    mdp = spectrum_access(2, 6)
    V = np.zeros(mdp.sizes.X)
    greedy = mdp.r.argmax(axis=-1)
    rows = np.arange(mdp.sizes.X)
    for h in reversed(range(6)):
        V = mdp.r[h, rows, greedy[h]] + mdp.P[h, rows, greedy[h]] @ V
    assert optimal_value(mdp) > float(mdp.d1 @ V) + 0.01
    assert mdp.sizes.X == 8
    assert spectrum_access(3, 2).sizes.X == 24


def test_spectrum_starts_stationary() -> None:
    mdp = spectrum_access(2, 2)
    after = (mdp.d1 @ mdp.P[0, :, 0, :]).reshape(2, 4).sum(axis=0)
    assert np.allclose(after, mdp.d1.reshape(2, 4).sum(axis=0))


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.5])
def test_bandit_users_average_to_the_population(sigma: float) -> None:
    """Binomial test an arm with the node's own reward bits, error 1e-6 over the arms."""
    environment, source = BanditEnvironment(np.array([0.02, 0.5, 0.97]), sigma), SystemRandomness()
    for a in range(3):
        ones = 0
        for _ in range(3_000):
            environment.reset(source)
            _, mean, _ = environment.step(a, source)
            assert 0 <= mean <= 1
            ones += int.from_bytes(source.read(8), "little") < mean * 2**64
        assert binomtest(ones, 3_000, environment.mdp.r[0, 0, a]).pvalue > ALPHA / 3


@pytest.mark.parametrize("m", [0.0, 0.2, 0.99, 1.0])
@pytest.mark.parametrize("sigma", [0.05, 0.3, 2.0])
def test_clipped_mean_against_quadrature(m: float, sigma: float) -> None:
    z = np.linspace(-12, 12, 400_001)
    density = np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
    integral = np.trapezoid(np.clip(m + sigma * z, 0, 1) * density, z)
    assert clipped_mean(np.array([m]), sigma)[0] == pytest.approx(integral, abs=1e-8)


def test_global_means_are_as_in_the_paper() -> None:
    means = global_means(20, seed=1)
    assert means.shape == (20,)
    assert 0 <= means.min() < means.max() <= 0.99
    assert np.array_equal(means, global_means(20, seed=1))
    assert not np.array_equal(means, global_means(20, seed=2))


def test_users_of_a_bandit_differ_and_stay_the_same_within_an_episode() -> None:
    environment, source = make("Bandit-v0"), SystemRandomness()
    environment.reset(source)
    first = environment.step(3, source)[1]
    assert environment.step(3, source)[1] == first
    environment.reset(source)
    assert environment.step(3, source)[1] != first
