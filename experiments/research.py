"""The simulator for Python: ``riffle.simulate``, ``riffle.sweep`` and their results.

An environment is a name, an object with Riffle's or Gymnasium's interface, or a function or class
that makes such an object. A learner is a name or a class, such as a subclass of `OwnLearner`. Each
may come in a pair with its parameters: ``("RiverSwim-v0", {"states": 6})``.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from riffle.common.accounting import CalibrationName
from riffle.common.mechanism.parameters import Trust
from riffle.common.process.plugins import unknown_name
from riffle.common.process.tables import csv_text
from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.figures.catalogue import Curve, Figure, Kind, Line
from riffle.experiments.figures.draw import Series, canvas_of, gather
from riffle.experiments.figures.write import seed_rows, table, write
from riffle.experiments.per_episode import PER_EPISODE
from riffle.experiments.presets import Preset, labelled
from riffle.experiments.regret import METHOD, SeedResult, band, share, student_band
from riffle.experiments.study import ADVERSARIAL, NOT_PRIVATE, case_of, check
from riffle.experiments.sweep import BETA, Backend, Rows, Run, compute, run_jobs
from riffle.experiments.sweep import sweep as run_all
from riffle.node_client.environments.tabular import Modelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

SWEEP = "sweep"
DASHES: dict[str, str] = {"shuffle": "-", "central": "--", "local": ":"}
PER_USER = ("reward_mean", "episodes_failed", "first_failure")
AT_EQUAL_PRIVACY = (
    "Every private curve gives each user the same epsilon and beta = {beta:g}, for replacing one "
    "user. Its noise is the least that is proved to do so. Not private: {free}."
)


@dataclass(frozen=True, slots=True)
class RegretCurve:
    """Mean regret at ``episodes`` and its band [low, high], four arrays (c,)."""

    episodes: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The results of one run over its seeds. Bands are 95 % Student t intervals of the mean.

    ``labels`` name learner and environment with their parameters, as in a sweep.
    """

    chosen: Preset
    results: tuple[SeedResult, ...]
    labels: tuple[str, str] | None = None

    def __repr__(self) -> str:
        return "\n".join(f"{k}: {v}" for k, v in self.summary.items() if k != "constants")

    @property
    def learner(self) -> str:
        """The learner's name, or the file and the class of a learner in a file."""
        name = self.chosen.spec.learner
        return Path(self.chosen.learners.get(name, name)).name

    @property
    def curve(self) -> RegretCurve:
        """The regret over time; arrays are empty if the environment's probabilities are unknown."""
        band = student_band([result.cumulative for result in self.results])
        return RegretCurve(np.array(self.results[0].episodes), band.mean, band.low, band.high)

    @property
    def per_seed(self) -> list[dict[str, Any]]:
        """A row for each seed: regret, the learned policy's value, switches and messages."""
        names = ["seed", "regret", "policy_value", "value_share", "policy_switches", "messages"]
        names += PER_USER if self.results[0].episodes_failed is not None else ()
        return [{name: getattr(result, name) for name in names} for result in self.results]

    @property
    def summary(self) -> dict[str, Any]:
        """The means with bands, under the keys that ``riffle simulate`` prints."""
        last = self.results[-1]
        return {
            **(self._case() if self.chosen.spec.learner in ADVERSARIAL else self._run()),
            "seconds": sum(r.seconds for r in self.results),
            "constants": {
                # Without privacy, epsilon is infinite, which JSON cannot express.
                name: "infinity" if value == math.inf else value
                for name, value in last.constants.items()
                if name != "seed"
            },
        }

    def to_frame(self) -> Any:  # noqa: ANN401  (a pandas.DataFrame, if pandas is installed)
        """Returns a `pandas.DataFrame` of all curves, with a row for each seed and checkpoint.

        Raises ImportError if pandas is not installed.
        """
        return frame(self._curve_rows())

    def plot(self, axes: Axes | None = None, label: str | None = None) -> Axes:
        """Draws the mean regret over time and its band into ``axes``, by default the current axes.

        Raises ValueError if the environment's probabilities, and so the regret, are unknown.
        """
        if not self.results[0].episodes:
            raise ValueError("there is no regret: this environment shows no probabilities")
        if axes is None:
            import matplotlib.pyplot as plt  # noqa: PLC0415  (slow to import)

            axes = plt.gca()
        curve = self.curve
        axes.plot(curve.episodes, curve.mean, label=label or (self.labels or [self.learner])[0])
        axes.fill_between(curve.episodes, curve.low, curve.high, alpha=0.2, lw=0)
        axes.set(xlabel="episodes", ylabel="cumulative regret")
        axes.legend()
        return axes

    def save(self, folder: str | Path) -> Path:
        """Writes ``summary.json``, ``seeds.csv`` and ``curves.csv`` into a folder; returns it."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
        (place / "seeds.csv").write_text(csv_text(self.per_seed))
        (place / "curves.csv").write_text(csv_text(self._curve_rows(), ("seed", "episode")))
        return place

    def _curve_rows(self) -> list[dict[str, Any]]:
        spec = self.chosen.spec
        learner, environment = self.labels or (self.learner, spec.environment)
        run = {"learner": learner, "environment": environment, "episodes": spec.episodes}
        run |= {"epsilon": spec.epsilon}
        return [
            {**run, "seed": result.seed, "episode": int(episode), "regret": regret}
            for result in self.results
            for episode, regret in zip(result.episodes, result.cumulative, strict=True)
        ]

    def _run(self) -> dict[str, Any]:
        spec, last = self.chosen.spec, self.results[-1]
        return {
            "learner": self.learner,
            "constants_set": spec.constants,
            "calibration": spec.calibration,
            "environment": spec.environment,
            **{name: getattr(spec, name) for name in ("episodes", "epsilon", "beta", "trust")},
            "families": last.constants.get("families", "not private"),
            "seeds": len(self.results),
            **self._exact_values(),
            "share_optimal_survives": share([r.optimal_survives for r in self.results]),
            "share_eliminated": share([r.eliminated for r in self.results]),
            "policy_switches": max(r.policy_switches or 0 for r in self.results),
            "messages": max(r.messages for r in self.results),
            **self._failures(),
        }

    def _failures(self) -> dict[str, Any]:
        """Returns the mean reward and the failed episodes, if users were simulated one by one."""
        rewards = [r.reward_mean for r in self.results if r.reward_mean is not None]
        first = next((r.first_failure for r in self.results if r.first_failure), None)
        failed = sum(r.episodes_failed or 0 for r in self.results)
        known = (float(np.mean(rewards)), failed, first) if rewards else ()
        return dict(zip(PER_USER, known, strict=False))

    def _case(self) -> dict[str, Any]:
        case = case_of(self.chosen)
        mean, interval = band([result.regret for result in self.results])
        return {
            "learner": case.name,
            "environment": case.environment,
            "adversary": case.adversary,
            "episodes": case.K,
            **{name: getattr(case, name) for name in ("epsilon", "beta", "privacy", "calibration")},
            "seeds": len(self.results),
            "regret_mean": mean,
            "regret_ci": interval,
            "regret_ci_method": METHOD,
            "regret_uniform_mean": float(np.mean([r.uniform_regret for r in self.results])),
        }

    def _exact_values(self) -> dict[str, Any]:
        """Returns regret and values, or nulls if the environment's probabilities are unknown."""
        best = self.results[-1].optimal_value
        mean, interval = band([result.regret for result in self.results])
        values = [result.policy_value for result in self.results]
        exact = {
            "regret_mean": mean,
            "regret_ci": interval,
            "regret_ci_method": METHOD,
            "regret_ceiling": best * self.chosen.spec.episodes,
            "optimal_value": best,
            "policy_value_mean": float(np.mean(values)),
            "policy_value_min": min(values),
            "share_within_5_percent": share([r.within_5_percent for r in self.results]),
        }
        return dict.fromkeys(exact) if math.isnan(best) else exact


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:  # noqa: ANN401
    """Returns rows as a `pandas.DataFrame`. Raises ImportError if pandas is not installed."""
    try:
        import pandas as pd  # noqa: PLC0415  (optional)
    except ImportError as error:
        text = "to_frame needs pandas, which is not installed: pip install pandas"
        raise ImportError(text) from error
    return pd.DataFrame(rows)


def simulate(
    env: object,
    learner: object = "sdp-pe",
    *,
    epsilon: float = 1.0,
    episodes: int = 10_000,
    seeds: int | Sequence[int] = 10,
    beta: float = BETA,
    trust: Trust = "shuffle",
    calibration: CalibrationName = "exact",
    constants: Literal["practical", "paper"] = "practical",
    workers: int | None = None,
) -> Result:
    """Simulates a learner in an environment, with seeds 0 to ``seeds`` - 1 or a list of seeds.

    With the exact calibration, a private learner's whole run is (``epsilon``, ``beta``)-DP, for
    replacing any one of the K = ``episodes`` users.
    ``workers`` processes run the seeds, by default one process for each core. With practical
    constants, the learner uses the structure that the environment declares. An environment without
    known probabilities is simulated user by user, and the results have no regret.

    Raises ValueError or RiffleError if a name is unknown, a value is out of range, or a batch is
    too small for the guarantee. The message names the value and says what to change.
    """
    jobs = _seeds(seeds)
    figure = grid(env, learner, epsilon, episodes, trust, beta, exact=False)
    (run, *more), line = figure.runs, figure.curves[0].line
    if more:
        raise ValueError("simulate runs one learner in one environment; riffle.sweep runs several")
    declared = constants == "practical"
    run = replace(run, calibration=calibration, constants=constants, declared=declared)
    check(run.chosen)
    backend = Backend(workers or os.cpu_count() or 1)
    results = tuple(run_jobs(partial(compute, run), jobs, backend))
    result = Result(run.chosen, results, (line.learner, line.world))
    if (known := result.summary).get("episodes_failed"):
        text = f"{known['episodes_failed']} episodes failed and are noise in the counts, the first"
        warnings.warn(f"{text} with {known['first_failure']}", stacklevel=2)
    return result


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """The results of a grid of runs. Private runs have one beta; their trust models may differ."""

    figure: Figure
    series: tuple[Series, ...]
    seeds: Sequence[int]

    def __repr__(self) -> str:
        return self.table

    @property
    def per_seed(self) -> list[dict[str, Any]]:
        """A row for each run and seed: parameters, regret and the learned policy's value."""
        return list(seed_rows(self.series))

    @property
    def table(self) -> str:
        """A Markdown table of the regret with its bands, and every constant."""
        return table(self.figure, self.series, self.seeds)

    def to_frame(self) -> Any:  # noqa: ANN401  (a pandas.DataFrame, if pandas is installed)
        """Returns `per_seed` as a `pandas.DataFrame`; raises ImportError without pandas."""
        return frame(self.per_seed)

    def plot(self) -> Canvas:
        """Returns a matplotlib figure: means with bands, one panel for each environment."""
        return canvas_of(self.figure, self.series, self.seeds)

    def save(self, folder: str | Path) -> Path:
        """Writes CSV, picture, table and manifest into ``folder``. Returns the folder's path."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        write(self.figure, self.series, self.seeds, place, {})
        return place


def sweep(
    env: object,
    learner: object = "sdp-pe",
    *,
    epsilon: float | Sequence[float] = 1.0,
    episodes: int | Sequence[int] = 10_000,
    trust: Trust | Sequence[Trust] = "shuffle",
    seeds: int | Sequence[int] = 10,
    beta: float = BETA,
    out: str | Path | None = None,
    workers: int | None = None,
    address: str | None = None,
) -> Sweep:
    """Simulates every combination of environments, learners, epsilons, episodes and trust models.

    Each argument is as for `simulate`, or a list of such arguments. A dictionary of environments or
    learners gives them labels. ``out`` is a folder that stores each finished run. Later calls with
    this folder do not repeat these runs. ``address`` is the scheduler of a Dask cluster to use.

    Raises the errors of `simulate`, but a batch that is too small for the guarantee is only a gap
    in the table.
    """
    figure = grid(env, learner, epsilon, episodes, trust, beta)
    chosen = _seeds(seeds)
    jobs = [(run, seed) for run in figure.runs for seed in chosen]
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    rows = Rows(None if out is None else Path(out) / "rows.jsonl")
    run_all(jobs, rows, Backend(workers or os.cpu_count() or 1, address), lambda _: None)
    result = Sweep(figure, gather(figure, rows, chosen), chosen)
    if out is not None:
        result.save(out)
    return result


def grid(
    env: object,
    learner: object,
    epsilon: float | Sequence[float],
    episodes: int | Sequence[int],
    trust: str | Sequence[str],
    beta: float = BETA,
    *,
    exact: bool = True,
) -> Figure:
    """Returns a sweep as a figure over several epsilons, or else several K, or else time.

    Raises the errors of `simulate` and, if ``exact``, ValueError for environments without regret.
    """
    worlds, learners = labelled(env), labelled(learner)
    epsilons, Ks, trusts = _several(epsilon), _several(episodes), _several(trust)
    if not all((worlds, learners, epsilons, Ks, trusts)):
        raise ValueError("give at least one environment, learner, epsilon, K and trust model")
    for model in set(trusts) - set(DASHES):
        raise ValueError(unknown_name("trust model", model, DASHES))
    by_epsilon = len(epsilons) > 1
    kind: Kind = "epsilon" if by_epsilon else "episodes" if len(Ks) > 1 else "time"
    none = ("privacy", "none")
    free = {name for name, (code, own) in learners.items() if code in NOT_PRIVATE or none in own}
    curves = []
    for (world, (environment, parameters)), (number, (name, (code, options))) in product(
        worlds.items(), enumerate(learners.items())
    ):
        run = Run(code, environment, parameters, Ks[0], None, options=options, beta=beta,
                  declared=True)  # fmt: skip
        budgets = (None,) * len(epsilons) if name in free else epsilons
        models = trusts if code not in {*ADVERSARIAL, *PER_EPISODE, *NOT_PRIVATE} else ("shuffle",)
        for model, fixed in product(models, Ks if by_epsilon else (None,)):
            at = product(budgets, Ks if fixed is None else (fixed,))
            runs = tuple(replace(run, epsilon=e, K=K, trust=model) for e, K in at)
            chosen, *_ = [run.chosen for run in runs]  # makes all presets, to check them
            check(replace(runs[0], K=max(Ks)).chosen)  # a smaller K may be too small: a gap
            if exact and not isinstance(chosen.make(), Modelled):
                text = "a sweep compares regret, but this environment shows no probabilities"
                raise ValueError(f"{world}: {text}; simulate runs it user by user")
            label = name + (f", {model}" if len(models) > 1 else "")
            label += f", K = {fixed:,}" if fixed is not None and len(Ks) > 1 else ""
            panel = world if len(worlds) > 1 else ""
            label += f"; {panel}" if panel else ""
            line = Line(label, name, number % 10, dashes=DASHES[model], panel=panel, world=world)
            curves.append(Curve(line, runs, tuple(map(float, epsilons if by_epsilon else Ks))))
    note = AT_EQUAL_PRIVACY.format(beta=beta, free=", ".join(sorted(free)) or "none")
    return Figure(SWEEP, f"{', '.join(worlds)}: regret", kind, tuple(curves), note)


def _seeds(seeds: int | Sequence[int]) -> Sequence[int]:
    """Returns seeds 0 to ``seeds`` - 1, or those in a list. Raises ValueError for anything else."""
    given = np.asarray(seeds)
    if given.dtype.kind in "iu" and given.size > 0:  # integers
        if given.ndim == 0 and given > 0:
            return range(int(given))
        if given.ndim == 1 and given.min() >= 0 and np.unique(given).size == given.size:
            return [int(seed) for seed in given]
    raise ValueError(f"seeds is a number of runs, at least 1, or different seeds, not {seeds!r}")


def _several(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return tuple(value) if isinstance(value, list | tuple | range) else (value,)
