"""Measures each departure of SDP-PE from 000, and the bars: the tables of docs/ablation.md.

    python -m benchmarks.bench_ablation bars        # the bars, beside private UCBVI
    python -m benchmarks.bench_ablation bars-large  # private UCBVI at K = 2,000,000, slow
    python -m benchmarks.bench_ablation epsilons    # five environments, five epsilons
    python -m benchmarks.bench_ablation departures  # every field where practical is not paper
    python -m benchmarks.bench_ablation constants   # the schedule's three numbers, moved by a third

``--first`` and ``--seeds`` choose the seeds; the default, 7000 to 7019, was not used for tuning.
The benchmark runs in one process. The tables show the mean pseudo-regret with half the width of its
95 % Student t band over seeds. They also show three shares of runs: pi* survives to the end, some
policy is eliminated, the learned policy is within 5 % of V*. RandomMDP-v0 is another MDP with every
seed; the other environments are fixed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from riffle.common.protocol.descriptor import MAX_MESSAGES
from riffle.common.protocol.errors import RiffleError
from riffle.coordinator.learning.sdp_pe.constants import PAPER, PRACTICAL
from riffle.coordinator.specs import Option, RunSpec, declaring
from riffle.experiments.presets import Preset
from riffle.experiments.regret import SeedResult, band, share
from riffle.experiments.study import run_seed
from riffle.node_client.environments.registry import Parameter, exact_mdp, make

Options = dict[str, Option]
WORLDS: dict[str, dict[str, Parameter]] = {
    "RiverSwim-v0": {"states": 4, "horizon": 6},
    "Bandit-v0": {"actions": 20},
    "SpectrumAccess-v0": {"channels": 2, "horizon": 3},
    "RandomMDP-v0": {"states": 3, "actions": 2, "horizon": 4},
    "LayeredMDP-v0": {"widths": "1-3-3-3-1"},
}
EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0)
CHOSEN = ("growth", "visits_per_noise", "exploit_share")
FACTORS = (0.75, 1.33)

# Options that an option at its paper value needs, too.
NEEDED: dict[str, Options] = {
    "memory": {"crude_every_stage": True},
    "radius": {"likely_share": 0.0, "radius_scale": 1.0},
    "schedule": {"first_stage": 2},
    "visits_per_noise": {"first_stage": 2},
}
TOGETHER: dict[str, tuple[str, ...]] = {
    "levels, threshold_scale": ("levels", "threshold_scale"),
    "pool, memory, crude_every_stage": ("pool", "memory", "crude_every_stage"),
    "schedule, growth, first_stage": ("schedule", "growth", "first_stage"),
    "best_share, likely_share": ("best_share", "likely_share"),
}
# In a world of one state and one step, these options change nothing, or no more than another does.
IDLE_ON_BANDIT = {
    "auxiliary_share",
    "smallest_n",
    "threshold_scale",
    "least_visits",
    "add_on",
    "crude_add_on",
    "pool",
    "crude_share",
    "levels, threshold_scale",
    "pool, memory, crude_every_stage",
    "homogeneous",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: a learner with its options in one world; ``support``: the world declares its own."""

    world: str = "RiverSwim-v0"
    K: int = 20_000
    epsilon: float = 1.0
    learner: str = "sdp-pe"
    trust: str = "shuffle"
    families: str = "joint"
    options: Options = field(default_factory=dict)
    support: bool = False

    def run(self, seed: int) -> SeedResult:
        """Runs one seed as `riffle simulate` does."""
        world = WORLDS.get(self.world, {}) | (
            {"seed": seed} if self.world == "RandomMDP-v0" else {}
        )
        mdp = exact_mdp(make(self.world, **world))
        support = mdp.declaration.support if self.support else None
        spec = RunSpec.model_validate(
            {
                "name": "ablation",
                "learner": self.learner,
                "environment": self.world,
                "states": mdp.sizes.X,
                "actions": mdp.sizes.A,
                "horizon": mdp.sizes.H,
                "start": tuple(mdp.d1.tolist()),
                "episodes": self.K,
                "epsilon": self.epsilon,
                "beta": 1e-5,
                "dishonest_fraction": 0.0,
                "trust": self.trust,
                "families": self.families,
                **declaring(self.options, support, homogeneous=False),
                "max_messages": MAX_MESSAGES,
            }
        )
        return run_seed(Preset(spec, world), seed)


Row = tuple[str, tuple[Setting, ...]]


def cells(setting: Setting, seeds: range) -> tuple[str, ...]:
    """Returns the regret and the three shares, or the reason for which the learner is refused."""
    try:
        runs = [setting.run(seed) for seed in seeds]
    except RiffleError as error:
        return (f"refused: {error}", "", "", "")
    mean, interval = band([run.regret for run in runs])
    shares = (
        share([run.optimal_survives for run in runs]),
        share([run.eliminated for run in runs]),
        share([run.within_5_percent for run in runs]),
    )
    percent = ("-" if value is None else f"{100 * value:.0f} %" for value in shares)
    half = "-" if interval is None else f"{mean - interval[0]:,.0f}"
    return (f"{mean:,.0f} +- {half}", *percent)


def departures() -> dict[str, Options]:
    """Returns options that undo each departure: every field alone, then fields that go together.

    `name` is no departure. `first_stage` matters only with the paper's schedule. Every row runs a
    second time without `exploit_share`.
    """
    differing = [f.name for f in fields(PAPER) if getattr(PAPER, f.name) != _value(f.name)]
    alone = {
        name: {name: getattr(PAPER, name), **NEEDED.get(name, {})}
        for name in differing
        if name not in {"name", "first_stage", "exploit_share"}
    }
    groups = {label: {n: getattr(PAPER, n) for n in names} for label, names in TOGETHER.items()}
    return {"practical": {}, **alone, **groups, "homogeneous": {"homogeneous": True}}


def _value(name: str) -> Option:
    value: Option = getattr(PRACTICAL, name)
    return value


def bars() -> Iterator[Row]:
    for K in (20_000, 200_000, 2_000_000):
        for learner in ("sdp-pe", "pe", "ucbvi-jdp", "ucbvi-ldp"):
            if K <= 200_000 or learner in {"sdp-pe", "pe"}:
                yield f"RiverSwim-v0 | {K:,} | {learner}", (Setting(K=K, learner=learner),)
    bandit = "Bandit-v0"
    for learner in ("sdp-pe", "pe", "ucbvi-jdp", "ucbvi-ldp"):
        yield f"{bandit} | 20,000 | {learner}", (Setting(bandit, learner=learner),)
    yield f"{bandit} | 20,000 | sdp-pe, trust local", (Setting(bandit, trust="local"),)


def bars_large() -> Iterator[Row]:
    for learner in ("ucbvi-jdp", "ucbvi-ldp"):
        yield f"RiverSwim-v0 | 2,000,000 | {learner}", (Setting(K=2_000_000, learner=learner),)


def epsilons() -> Iterator[Row]:
    for world in WORLDS:
        for epsilon in EPSILONS:
            yield f"{world} | {epsilon:g}", (Setting(world, epsilon=epsilon),)


def ablation() -> Iterator[Row]:
    for world in ("RiverSwim-v0", "Bandit-v0"):
        for label, options in departures().items():
            if world == "Bandit-v0" and label in IDLE_ON_BANDIT:
                continue
            with_share = Setting(world, options=options)
            without = Setting(world, options={**options, "exploit_share": 0.0})
            yield f"{world} | {_shown(label, options)}", (with_share, without)
        for families in ("lean", "paper"):
            yield f"{world} | families {families}", (Setting(world, families=families),)


def _shown(label: str, options: Options) -> str:
    """Returns `label` with the values that are set; fields named in the label come first."""
    given = ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in options.items()
    )
    return given or label


def constants() -> Iterator[Row]:
    for world in WORLDS:
        yield f"{world} | practical", (Setting(world),)
        for name in CHOSEN:
            for factor in FACTORS:
                value = round(factor * float(_value(name)), 3)
                yield f"{world} | {name} {value:g}", (Setting(world, options={name: value}),)


TABLES = {
    "bars": bars,
    "bars-large": bars_large,
    "epsilons": epsilons,
    "departures": ablation,
    "constants": constants,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--first", type=int, default=7000, help="first seed")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    for label, settings in TABLES[given.table]():
        row = [cell for setting in settings for cell in cells(setting, seeds)]
        print("|", label, "|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
