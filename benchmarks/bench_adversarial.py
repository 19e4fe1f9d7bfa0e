"""Compares the two forms of Eq. 4.1 of 004: the corrected estimator and the paper's.

Run `python -m benchmarks.bench_adversarial`. It runs the two-armed case of
`tests.experiments.two_arms` at epsilon 1,000, and then the world of the figures (layers 1-3-3-3-1,
K = 2,000) at several epsilon. Numbers are means over 20 seeds with two-sided 95 % Student t bands.
Differences are taken seed by seed. Bar: with the corrected estimator, the regret of an episode
falls with K and is below uniform play's.
"""

from __future__ import annotations

from itertools import pairwise

from riffle.experiments.adversarial import run
from riffle.experiments.adversaries import Adversary, Case, Estimator
from riffle.experiments.regret import band
from tests.experiments import two_arms

SEEDS = 20
LENGTHS = (500, 2_000, 8_000)
ESTIMATORS: tuple[Estimator, ...] = ("correct", "paper")
ADVERSARIES: tuple[Adversary, ...] = ("stochastic", "switching", "drifting")


def text(values: list[float]) -> str:
    """Returns mean and band in four digits."""
    mean, interval = band(values)
    assert interval is not None
    return f"{mean:.4g} [{interval[0]:.4g}, {interval[1]:.4g}]"


def two_armed() -> bool:
    """Prints the regret per episode of the two-armed case; returns whether the bar is met."""
    correct, uniform = [], []
    for K in LENGTHS:
        runs = {e: [two_arms.regret(K, s, e) for s in range(SEEDS)] for e in ESTIMATORS}
        none = [two_arms.regret(K, seed, "correct", "none")[0] for seed in range(SEEDS)]
        columns = {str(name): [mine for mine, _ in pairs] for name, pairs in runs.items()}
        columns["uniform"] = [theirs for _, theirs in runs["correct"]]
        correct.append(band(columns["correct"])[0])
        uniform.append(band(columns["uniform"])[0])
        shown = "; ".join(f"{name} {text(values)}" for name, values in columns.items())
        print(f"two arms, K = {K:,}: {shown}; not private {text(none)}", flush=True)
    falls = all(late < early for early, late in pairwise(correct))
    return falls and all(mine < theirs for mine, theirs in zip(correct, uniform, strict=True))


def figures_world(epsilon: float, adversary: Adversary) -> None:
    """Prints how far both forms' regrets exceed uniform play's, and the forms' difference."""
    excess = {e: [_excess(epsilon, adversary, e, s) for s in range(SEEDS)] for e in ESTIMATORS}
    apart = [mine - theirs for mine, theirs in zip(excess["correct"], excess["paper"], strict=True)]
    shown = "; ".join(f"{name} {text(values)}" for name, values in excess.items())
    title = f"epsilon {epsilon:g}, {adversary}, minus uniform"
    print(f"{title}: {shown}; apart {text(apart)}", flush=True)


def _excess(epsilon: float, adversary: Adversary, estimator: Estimator, seed: int) -> float:
    result = run(
        Case(
            "uob-lbps", 2_000, epsilon, 1e-5, "central", "exact", seed, adversary,
            estimator=estimator,
        )
    )  # fmt: skip
    return result.regret - result.uniform_regret


def main() -> None:
    met = two_armed()
    for epsilon in (1.0, 10.0, 100.0):
        for adversary in ADVERSARIES:
            figures_world(epsilon, adversary)
    raise SystemExit(0 if met else "the bar is missed")


if __name__ == "__main__":
    main()
