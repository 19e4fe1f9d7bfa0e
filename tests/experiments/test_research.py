"""`riffle.simulate` and `riffle.sweep`: results, own parts, scripts without a main guard."""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import riffle
from riffle.common.protocol.errors import RiffleError
from riffle.experiments import research
from tests.examples.test_examples import EXAMPLES

SCRIPT = """
import numpy as np
import riffle

class Explore(riffle.OwnLearner):
    def next_deployment(self):
        return self.deploy(self.explorers(), self.left) if self.left else None

P, r = np.zeros((2, 2, 2)), np.zeros((2, 2))
P[:, 0, 0] = P[:, 1, 1] = 1
r[1] = 0.5, 0.9
shop = riffle.TabularEnvironment(riffle.stationary(P, r, np.array([1.0, 0]), 3))
result = riffle.simulate(shop, Explore, episodes=500, seeds=2, workers=2)
sweep = riffle.sweep(shop, [Explore, "pe"], epsilon=[1.0, 2.0], episodes=500, seeds=2, workers=2)
print([row["regret"] for row in result.per_seed + sweep.per_seed])
"""


def shop() -> riffle.TabularEnvironment:
    P, r = np.zeros((2, 2, 2)), np.zeros((2, 2))
    P[:, 0, 0] = P[:, 1, 1] = 1
    r[1] = 0.5, 0.9
    return riffle.TabularEnvironment(riffle.stationary(P, r, np.array([1.0, 0]), 3))


class Explore(riffle.OwnLearner):
    def next_deployment(self) -> riffle.Deployment | None:
        return self.deploy(self.explorers(), self.left) if self.left else None


@pytest.mark.parametrize("typed", ["file", "stdin"])
def test_a_script_needs_no_main_guard_and_brings_its_own_classes(
    typed: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, *(["script.py"] if typed == "file" else ["-"])]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input=SCRIPT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one = riffle.simulate(shop(), Explore, episodes=500, seeds=2, workers=1)
    sweep = riffle.sweep(
        shop(), [Explore, "pe"], epsilon=[1.0, 2.0], episodes=500, seeds=2, workers=1
    )
    assert done.stdout.strip() == str([row["regret"] for row in one.per_seed + sweep.per_seed])


def test_a_result_has_curve_seeds_and_summary(tmp_path: Path) -> None:
    result = riffle.simulate("RiverSwim-v0", "pe", episodes=600, seeds=3, workers=1)
    assert result.summary["seeds"] == len(result.per_seed) == 3
    mean = np.mean([row["regret"] for row in result.per_seed])
    assert result.curve.mean[-1] == pytest.approx(mean) == result.summary["regret_mean"]
    assert result.curve.episodes[-1] == 600
    assert (result.curve.low <= result.curve.mean).all()
    saved = result.save(tmp_path / "results")
    assert {file.name for file in saved.iterdir()} == {"summary.json", "seeds.csv", "curves.csv"}
    assert (saved / "curves.csv").read_text().count("\n") == 1 + 3 * 100
    axes = result.plot(label="mine")
    assert axes.get_legend_handles_labels()[1] == ["mine"]


def test_a_result_is_a_frame_where_pandas_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = riffle.simulate(shop(), "pe", episodes=300, seeds=1, workers=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        result.to_frame()
    pandas: Any = types.ModuleType("pandas")
    pandas.DataFrame = list
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert result.to_frame()[-1]["episode"] == 300
    assert {"learner", "environment", "epsilon", "seed", "regret"} < result.to_frame()[0].keys()


def test_learners_of_004_run_on_an_own_mdp() -> None:
    result = riffle.simulate(shop(), ("uc-o-reps", {"privacy": "none"}), episodes=20, seeds=1)
    assert result.summary["adversary"] == "rewards"
    assert result.summary["regret_uniform_mean"] > 0


def test_an_environment_without_probabilities_has_no_regret() -> None:
    bridge = f"{EXAMPLES}/own_gymnasium.py:make"
    result = riffle.simulate(bridge, Explore, episodes=100, epsilon=20, beta=1e-3, seeds=1)
    assert result.summary["regret_mean"] is None
    assert 0 < (result.results[0].reward_mean or 0) < 1
    with pytest.raises(ValueError, match="shows no probabilities"):
        result.plot()


def test_what_the_environment_declares_is_used() -> None:
    spec = riffle.simulate(shop(), "pe", episodes=300, seeds=1).chosen.spec
    assert spec.homogeneous
    assert spec.support is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"learner": "sdp-pi"}, "did you mean 'sdp-pe'"),
        ({"learner": ("sdp-pe", {"growht": 2})}, "did you mean 'growth'"),
        ({"learner": "manual"}, "no simulated learner 'manual'"),
        ({"episodes": 0}, "episodes: .* not 0"),
        ({"epsilon": -1.0}, "epsilon: .* not -1.0"),
        ({"env": "RiverSwin-v0"}, "did you mean 'RiverSwim-v0'"),
        ({"env": ("RiverSwim-v0", {"staets": 3})}, "did you mean 'states'"),
        ({"env": 3}, "no environment"),
    ],
)
def test_a_mistake_is_reported_before_any_work(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, RiffleError), match=says):
        riffle.simulate(**{"env": "RiverSwim-v0", "seeds": 10**9, **arguments})
    with pytest.raises((ValueError, RiffleError), match=says):
        riffle.sweep(**{"env": "RiverSwim-v0", "seeds": 10**9, **arguments})


def test_an_empty_sweep_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one environment"):
        riffle.sweep({}, "pe")


def test_a_sweep_is_at_equal_privacy(tmp_path: Path) -> None:
    sweep = riffle.sweep(
        {"shop": shop(), "river": ("RiverSwim-v0", {"horizon": 3})},
        ["pe", "ucbvi-shuffle"],
        epsilon=[1.0, 4.0],
        trust=["shuffle", "local"],
        episodes=400,
        seeds=2,
        workers=1,
        out=tmp_path,
    )
    labels = [curve.line.label for curve in sweep.series]
    models = ["pe", "ucbvi-shuffle, shuffle", "ucbvi-shuffle, local"]
    assert labels == [f"{name}; {world}" for world in ("shop", "river") for name in models]
    free, private = (
        {row["epsilon"] for row in sweep.per_seed if row["learner"] == name}
        for name in ("pe", "ucbvi-shuffle")
    )
    assert (free, private) == ({None}, {1.0, 4.0})
    assert "beta = 1e-05" in sweep.table
    assert "Not private: pe." in sweep.table
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2 * (2 + 2 * 4)
    assert sweep.plot().get_axes()[0].get_title() == "shop"


def test_two_learners_of_one_file_have_their_own_labels_and_results(tmp_path: Path) -> None:
    body = "    def next_deployment(self):\n        return None\n"
    text = "import riffle\n" + "".join(f"class {n}(riffle.OwnLearner):\n{body}" for n in "AB")
    (tmp_path / "own.py").write_text(text)
    both = [f"{tmp_path}/own.py:{name}" for name in "AB"]
    figure = research.grid(shop(), both, 1.0, 500, "shuffle", 1e-5)
    assert [curve.line.label for curve in figure.curves] == ["own.py:A", "own.py:B"]
    assert len({run.key for run in figure.runs}) == 2
