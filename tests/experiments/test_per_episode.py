"""Per-episode learners: equal to the NumPy oracle, draw by draw; regret; errors."""

from __future__ import annotations

import importlib.util
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from riffle.common.mechanism.counters import Sizes
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.learning.privatizers import NoiseLevels
from riffle.coordinator.learning.ucbvi_parameters import Bonus, BonusName
from riffle.experiments.per_episode import (
    PER_EPISODE,
    Setting,
    run,
)
from riffle.experiments.regret import SeedResult, optimal_value, policy_value
from riffle.node_client.environments.tabular import TabularMDP, random_mdp, riverswim
from tests.experiments.per_episode_oracle import learner_of, run_oracle, sample_episode

compiled = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra `experiments` (numba)"
)
BONUSES: tuple[BonusName, ...] = ("practical", "paper")
WORLDS = {"riverswim": riverswim(), "random": random_mdp(Sizes(5, 3, 4), 1)}


@compiled
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("levels", ["paper", "exact"])
@pytest.mark.parametrize("bonus", BONUSES)
@pytest.mark.parametrize("name", PER_EPISODE)
def test_the_compiled_loops_equal_the_oracle_draw_by_draw(
    name: str, bonus: BonusName, levels: NoiseLevels, world: str
) -> None:
    mdp, K = WORLDS[world], 120
    options = {} if bonus == "paper" else {"noise_scale": 0.05}
    setting = Setting(name, mdp, K, 1.0, 1e-5, 3, levels, Bonus(bonus, **options))
    policies, regret = run_oracle(setting)
    fast = run(
        name,
        mdp,
        K,
        seed=3,
        calibration=levels,
        constants=bonus,
        options=options,
        checkpoints=range(1, K + 1),
    )
    assert np.allclose(fast.cumulative, regret, atol=1e-9)
    assert np.array_equal(fast.policy, policies[-1])
    changes = sum(not np.array_equal(a, b) for a, b in pairwise(policies))
    assert fast.policy_switches == changes


@cache
def riverswim_run(name: str, levels: NoiseLevels, K: int, seed: int) -> SeedResult:
    return run(name, riverswim(), K, seed=seed, calibration=levels)


def mean_regret(name: str, levels: NoiseLevels, K: int = 20_000) -> float:
    return float(np.mean([riverswim_run(name, levels, K, seed).regret for seed in range(3)]))


@compiled
def test_regret_on_riverswim_is_in_its_known_ranges() -> None:
    ceiling = optimal_value(riverswim()) * 20_000
    # Ranges hold the values of independent implementations (means of a few seeds).
    assert mean_regret("ucbvi", "exact") < 400
    assert 5_000 < mean_regret("ucbvi-jdp", "exact") < 7_500
    assert 8_000 < mean_regret("ucbvi-jdp", "paper") < ceiling
    assert 8_000 < mean_regret("ucbvi-ldp", "paper") < ceiling
    assert 8_000 < mean_regret("ucbvi-ldp", "exact") < ceiling


@compiled
def test_regret_stops_growing_without_privacy_and_slows_down_under_joint_dp() -> None:
    free = riverswim_run("ucbvi", "exact", 200_000, 0)
    assert free.regret < 1.3 * free.cumulative[9] + 50
    jdp = riverswim_run("ucbvi-jdp", "exact", 200_000, 0)
    assert jdp.regret < 3 * jdp.cumulative[9]


@compiled
@pytest.mark.parametrize("seed", range(3))
def test_a_small_random_mdp_is_solved(seed: int) -> None:
    mdp = random_mdp(Sizes(X=2, A=2, H=2), seed)
    result = run("ucbvi", mdp, 30_000, seed=seed)
    assert policy_value(mdp, np.array(result.policy)) >= optimal_value(mdp) - 0.02
    assert result.regret < 0.01 * 30_000


@compiled
def test_the_literal_bonus_learns_nothing_in_time() -> None:
    result = run("ucbvi", riverswim(), 5_000, constants="paper")
    assert result.policy_switches == 0
    assert result.regret == pytest.approx(5_000 * (optimal_value(riverswim()) - 0.03))


@compiled
def test_runs_repeat_by_seed_and_print_their_constants() -> None:
    one, again = (run("ucbvi-jdp", riverswim(), 500, seed=8) for _ in range(2))
    other = run("ucbvi-jdp", riverswim(), 500, seed=9)
    assert np.array_equal(one.cumulative, again.cumulative)
    assert not np.array_equal(one.cumulative, other.cumulative)
    assert one.constants | {"noise_parameter": 0} == {
        "name": "practical",
        "bonus_scale": 0.1,
        "noise_scale": 0.01,
        "least_visits": 1.0,
        "delta": 0.05,
        "seed": 8,
        "epsilon": 1.0,
        "beta": 1e-5,
        "calibration": "exact",
        "families": "lean",
        "noise": "gaussian",
        "noise_parameter": 0,
    }


@compiled
def test_one_episode_is_enough_and_has_no_noise_to_draw() -> None:
    for name in PER_EPISODE:
        assert run(name, riverswim(), 1).episodes == (1,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "ucbvj"},
            r"no learner 'ucbvj'; did you mean 'ucbvi'\? known are ucbvi, ucbvi-jdp",
        ),
        ({"K": 0}, "K is 0"),
        ({"checkpoints": [5, 101]}, r"must lie in 1\.\.100"),
        ({"constants": "best"}, "no constants 'best'; known: paper, practical"),
        (
            {"options": {"scale": 1.0}},
            r"no option 'scale'; did you mean 'noise_scale'\?",
        ),
        ({"options": {"bonus_scale": "much"}}, "option"),
    ],
)
def test_invalid_requests_are_refused_with_the_reason(
    changes: dict[str, object], message: str
) -> None:
    wanted: dict[str, object] = {"name": "ucbvi", "mdp": riverswim(), "K": 100, **changes}
    with pytest.raises(LocalError, match=message):
        run(**wanted)  # type: ignore[arg-type]


def test_without_numba_the_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "riffle.coordinator.learning.ucbvi", None)
    monkeypatch.delattr("riffle.coordinator.learning.ucbvi", raising=False)
    with pytest.raises(LocalError, match=r"riffle-rl\[experiments\]"):
        run("ucbvi", riverswim(), 10)


def test_the_oracles_episodes_follow_the_mdp() -> None:
    mdp: TabularMDP = WORLDS["random"]
    policy = np.zeros((mdp.sizes.H, mdp.sizes.X), dtype=np.int64)
    generator = np.random.default_rng(0)
    starts = np.array([sample_episode(mdp, policy, generator).states[0] for _ in range(2_000)])
    seen = np.bincount(starts, minlength=mdp.sizes.X) / 2_000
    # Four standard deviations of a share.
    assert np.abs(seen - mdp.d1).max() < 4 * np.sqrt(0.25 / 2_000)


def test_the_oracle_of_a_setting_has_its_number_of_episodes() -> None:
    setting = Setting("ucbvi-ldp", riverswim(), 40, 1.0, 1e-5, 0, "exact", Bonus())
    assert learner_of(setting).K == 40
