"""`riffle.simulate` and `riffle.sweep`: results, own parts, scripts without a main guard."""

import importlib
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import riffle
from riffle.common.protocol.errors import LocalError, RiffleError
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


LEARNER = """
import riffle
import rate

class Own(riffle.OwnLearner):
    def next_deployment(self):
        return self.deploy(self.explorers(rate.TRIED + 0), self.left) if self.left else None
"""


class Own:
    """A learner's module that imports a helper, both edited between sweeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("mine", LEARNER)
        self.write("rate", "TRIED = 32 + 0\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    def sweep(self, learner: object = None, **arguments: Any) -> list[float]:
        learner = learner or importlib.import_module("mine").Own
        done = riffle.sweep(
            shop(), {"own": learner}, episodes=500, seeds=2, out=self.folder / "out", **arguments
        )
        return [row["regret"] for row in done.per_seed]

    def reload(self) -> None:
        for name in ("rate", "mine"):
            importlib.reload(sys.modules[name])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits within a second are seen
    yield Own(tmp_path)
    for name in ("mine", "rate"):
        sys.modules.pop(name, None)


def test_workers_that_live_on_never_run_code_of_before_a_reload(own: Own) -> None:
    old = own.sweep(workers=2)
    own.write("rate", "TRIED = 2\n")
    own.reload()
    new = own.sweep(workers=2)
    alone = riffle.simulate(shop(), sys.modules["mine"].Own, episodes=500, seeds=2, workers=1)
    assert old != new == [row["regret"] for row in alone.per_seed]


def test_results_are_stored_under_the_code_that_ran_not_under_the_edited_file(own: Own) -> None:
    old = own.sweep(workers=1)
    own.write("rate", "TRIED = 2\n")
    assert own.sweep(workers=1) == old, "the old module still runs"
    own.reload()
    assert own.sweep(workers=1) != old


def test_a_worker_refuses_a_file_that_was_edited_but_not_loaded_again(own: Own) -> None:
    own.sweep(workers=1)
    own.write("rate", "TRIED = 2\n")
    for run in (riffle.sweep, riffle.simulate):
        with pytest.raises(LocalError, match=r"own .*load them again.*workers=1"):
            run(shop(), sys.modules["mine"].Own, episodes=400, seeds=2, workers=2)


@pytest.mark.parametrize("name", ["rate", "mine"])
def test_a_result_is_not_reused_after_a_file_of_the_learner_changed(own: Own, name: str) -> None:
    file = f"{own.folder}/mine.py:Own"
    old = own.sweep(file, workers=1)
    own.write(name, (own.folder / f"{name}.py").read_text().replace("+ 0", "- 30"))
    sys.modules.pop("rate")
    assert own.sweep(file, workers=1) != old


class Stops(riffle.OwnLearner):
    """Explores for a fifth of the episodes and ends; its answer is poor unless it says so."""

    answer = 0

    def next_deployment(self) -> riffle.Deployment | None:
        return self.deploy(self.explorers(), 100) if self.batches == 0 else None

    def observe(self, counts: riffle.BatchCounts) -> None:
        super().observe(counts)
        self.policy = np.full((3, 2), self.answer)


class GoesOn(Stops):
    def next_deployment(self) -> riffle.Deployment | None:
        commit = self.deploy(self.policy, self.left) if self.left else None
        return super().next_deployment() or commit


def test_episodes_after_an_early_end_are_charged_with_the_answer() -> None:
    results = [
        riffle.simulate(shop(), learner, episodes=500, seeds=1) for learner in (Stops, GoesOn)
    ]
    early, whole = (result.curve for result in results)
    np.testing.assert_allclose(early.mean, whole.mean)
    assert early.episodes[-1] == 500


class Sampled:
    """Its first action earns 2, and no reward may exceed 1."""

    sizes, reward_range, absorbing = riffle.Sizes(X=2, A=2, H=2), (0.0, 1.0), None

    def reset(self, randomness: object) -> int:
        return 0

    def step(self, action: int, randomness: object) -> tuple[int, float, bool]:
        return 1, 2.0 - action, False


class Always(Explore):
    def __init__(self, problem: riffle.Problem, action: int) -> None:
        super().__init__(problem, action=action)
        self.explored = np.full((2, 2), action)

    def explorers(self, count: int = 64) -> Any:
        return self.explored


SAMPLED: dict[str, Any] = {"episodes": 100, "epsilon": 20, "beta": 1e-3, "workers": 1}


def test_failed_episodes_are_in_the_result_and_warned_of() -> None:
    with pytest.warns(UserWarning, match="episodes failed .* first with ValueError: a reward of 2"):
        result = riffle.simulate(Sampled, Explore, seeds=2, **SAMPLED)
    assert 0 < result.summary["episodes_failed"] < 200
    assert result.summary["first_failure"].startswith("ValueError: a reward of 2")
    assert {"reward_mean", "episodes_failed", "first_failure"} < result.per_seed[1].keys()
    fine = riffle.simulate(Sampled, (Always, {"action": 1}), seeds=1, **SAMPLED)
    assert (fine.summary["episodes_failed"], fine.summary["reward_mean"]) == (0, 2.0)


def test_a_run_of_failed_episodes_is_refused() -> None:
    with pytest.raises(RiffleError, match="every episode failed, the first with ValueError"):
        riffle.simulate(Sampled, (Always, {"action": 0}), seeds=1, **SAMPLED)


def test_a_sweep_refuses_an_environment_without_regret() -> None:
    with pytest.raises(ValueError, match=r"sampled: .* shows no probabilities; simulate runs it"):
        riffle.sweep(Sampled, Explore, seeds=1, **SAMPLED)


def test_given_seeds_are_the_same_runs_as_counted_seeds(tmp_path: Path) -> None:
    one = riffle.simulate(shop(), Explore, episodes=500, seeds=4).per_seed
    last: Any = np.arange(2, 4)
    assert riffle.simulate(shop(), Explore, episodes=500, seeds=last).per_seed == one[2:]
    riffle.sweep(shop(), Explore, episodes=500, seeds=1, out=tmp_path)
    sweep = riffle.sweep(shop(), Explore, episodes=500, seeds=[3, 1], out=tmp_path)
    assert [row["regret"] for row in sweep.per_seed] == [one[3]["regret"], one[1]["regret"]]
    assert "mean over 2 seeds" in sweep.table
    assert json.loads((tmp_path / "sweep.json").read_text())["seeds"] == [3, 1]


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1], [0.5], "12", 0, None, True, [[1], [2]]])
def test_seeds_are_a_number_of_runs_or_different_seeds(seeds: Any) -> None:
    for run in (riffle.simulate, riffle.sweep):
        with pytest.raises(ValueError, match="seeds is a number of runs, at least 1, or"):
            run(shop(), Explore, seeds=seeds)


def test_rows_have_the_callers_labels_and_the_policys_value() -> None:
    sweep = riffle.sweep(
        {"my shop": shop()}, {"few": (Explore, {}), "many": GoesOnIfPrivate}, episodes=500, seeds=1
    )
    rows = sweep.per_seed
    assert [row["learner"] for row in rows] == ["few", "many"]
    assert {row["environment"] for row in rows} == {"my shop"}
    assert rows[1]["policy_value"] == pytest.approx(1.8)


def test_curves_of_one_run_have_the_labels_of_a_sweep() -> None:
    """Else two learners that differ in a parameter would be one in a joined table."""
    result = riffle.simulate(shop(), ("pe", {"exploit_share": 0.5}), episodes=300, seeds=1)
    row = result._curve_rows()[0]
    assert row["learner"] == "pe, exploit_share = 0.5"
    assert row["episodes"] == 300
    assert result.plot().get_legend_handles_labels()[1][-1] == row["learner"]


@pytest.mark.parametrize("kind", ["epsilon", "episodes"])
def test_a_sweep_without_any_result_has_a_table_of_reasons_and_a_picture(
    tmp_path: Path, kind: str
) -> None:
    several = {"epsilon": [1e-3, 2e-3]} if kind == "epsilon" else {"episodes": [300, 400]}
    common: dict[str, Any] = {"epsilon": 1e-3, "episodes": 300, "seeds": 1, "workers": 1}
    sweep = riffle.sweep("RiverSwim-v0", "sdp-pe", **common | several, out=tmp_path)
    assert not sweep.per_seed
    assert "## Not computed" in (tmp_path / "sweep.md").read_text()
    assert (tmp_path / "sweep.png").exists()


def test_a_K_that_is_too_small_for_a_learner_is_a_gap() -> None:
    """One learner needs more users than another; the other's results are still there."""
    sweep = riffle.sweep(
        "RiverSwim-v0", ["sdp-pe", "pe"], episodes=[20, 2_000], epsilon=20, seeds=1, workers=1
    )
    assert {(row["learner"], row["episodes"]) for row in sweep.per_seed} == {
        ("sdp-pe", 2_000),
        ("pe", 2_000),
    }
    assert "K=20 leaves" in sweep.table


def test_each_K_of_a_panel_has_its_own_ceiling() -> None:
    sweep = riffle.sweep(shop(), "pe", episodes=[300, 600], epsilon=[1.0, 2.0], seeds=1, workers=1)
    (panel,) = sweep.plot().axes
    lines = {line.get_label(): np.asarray(line.get_ydata(), float)[0] for line in panel.lines}
    ceilings = {name: y for name, y in lines.items() if "ceiling" in str(name)}
    assert [*ceilings] == ["ceiling, V* K for K = 300", "ceiling, V* K for K = 600"]
    one, two = ceilings.values()
    assert two == pytest.approx(2 * one)


def test_the_table_has_switches_and_shares_of_every_epsilon() -> None:
    sweep = riffle.sweep(
        shop(), GoesOnIfPrivate, epsilon=[1.0, 2.0], episodes=500, seeds=1, workers=1
    )
    row, _ = [line for line in sweep.table.splitlines() if line.startswith("| goes-on")]
    assert row.endswith("| 1 / 0 | 100% / 0% |")


class GoesOnIfPrivate(GoesOn):
    """Commits to the best policy if epsilon is 1; otherwise all is explored."""

    answer = 1

    def next_deployment(self) -> riffle.Deployment | None:
        if self.problem.epsilon == 1:
            return super().next_deployment()
        return self.deploy(self.explorers(), self.left) if self.left else None

    def observe(self, counts: riffle.BatchCounts) -> None:
        super().observe(counts)
        self.policy *= int(self.problem.epsilon == 1)


def test_mistakes_of_a_local_run_are_local_errors() -> None:
    for run in (riffle.simulate, riffle.sweep):
        with pytest.raises(LocalError, match="option") as caught:
            run(shop(), (Explore, {"share": 1}), episodes=500)
        assert caught.value.__suppress_context__
    with pytest.raises(LocalError, match="n=") as caught:
        riffle.simulate(shop(), Explore, episodes=5, epsilon=0.01, seeds=1)


def test_a_printed_result_is_its_summary() -> None:
    result = riffle.simulate(shop(), Explore, episodes=500, seeds=1)
    text = str(result)
    assert text == repr(result)
    assert "regret_mean: " in text
    assert "cumulative" not in text


def test_the_learner_of_a_file_is_named_by_its_class(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.partition("P, r =")[0])
    result = riffle.simulate(shop(), f"{tmp_path}/mine.py:Explore", episodes=500, seeds=1)
    assert result.summary["learner"] == "mine.py:Explore"
