"""The contract between a learner and whatever runs it: deployments out, private counts in.

A learner (SDP-PE of document 000, and every later one) is a deterministic state machine. It reads
no clock and no global randomness, so replaying the same observations into a fresh learner of the
same `Problem` reproduces its state exactly; that is how a coordinator recovers. The loop is

    while (deployment := learner.next_deployment()) is not None:
        counts = ...n = deployment.n private episodes...
        stage_result = learner.observe(counts)      # None inside a stage

Letters: X states, A actions, H steps, K episodes, b the stage, L_b its length, E the precision of
Assumption 4 (000, section III-A). Steps h are 0-based. All arrays are read-only by convention.

`batch_counts` turns debiased counters into the counts that a learner takes, for every choice of
families. A family that is not sent is a sum of one that is: with `lean`, N(x,a) = sum_x' N(x,a,x');
with `joint`, N(x,a,x') = sum_r N(x,a,x',r) and R(x,a) = sum_x' N(x,a,x',1). Variances add over the
terms. `to_json` writes a learner's answers for the store and for events.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from riffle.common.mechanism.counters import CounterLayout, Families, Sizes
from riffle.common.mechanism.policy import Mixture

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
PolicyArray = NDArray[np.int64]

Purpose = Literal["crude", "fine", "exploit", "manual"]

NoiseModel = Callable[[int, int | None], float]
"""Variance of the noise on one counter in a batch of n reports of one layer, or of all (None).

It is known before the batch runs: a learner chooses n by it, and computes E of Assumption 4."""


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a learner knows of its run and of the environment.

    d1 has shape (X,) and sums to one; K counts episodes; (epsilon, beta) is the guarantee of one
    user; delta is the failure probability of the confidence statements; `seed` keys the learner's
    own draws (parametric bootstrap), which are post-processing and protect nobody.
    """

    sizes: Sizes
    d1: FloatArray
    K: int
    epsilon: float
    beta: float
    delta: float
    families: Families
    noise: NoiseModel
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Deployment:
    """An order to run `mixture` for exactly `n` episodes that feed one layer, or all (None)."""

    stage: int
    purpose: Purpose
    mixture: Mixture
    n: int
    layer: int | None


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Unbiased private counts of one batch, before post-processing.

    transitions (Hs, X, A, X), visits (Hs, X, A), rewards (Hs, X, A) or None when out of scope, with
    Hs = H for scope "all" and 1 for one layer. The variances are those of the noise on one entry of
    each array. With the families `lean` and `joint`, no visits are sent: they are sums of the sent
    counts over x' (and r). So visits and transitions agree exactly, and share their noise. `term`
    is the b of Bernstein's inequality, the size of one term of the noise; it is the same for all
    entries (`common.mechanism.parameters.BatchNoise`).
    """

    layout: CounterLayout
    n: int
    transitions: FloatArray
    visits: FloatArray
    rewards: FloatArray | None
    transition_variance: float
    visit_variance: float
    reward_variance: float
    term: float = 1.0


@dataclass(frozen=True, slots=True)
class StageResult:
    """The outcome of a stage, for the log, the CSV and the live page.

    active_before and active_after count policies that differ from the start distribution, None when
    an implicit active set cannot be counted; decisions_eliminated counts the (h, x, a) that no
    active policy takes any more, known for both kinds; radius is the elimination threshold in value
    units; best_value the largest estimated value in the active set; E the precision of the stage's
    fine counts; infrequent the share of tuples (h, x, a, x') in W; coverage_gap the certificate
    sup_mu sum d_mu/d_pi over its bound, minus one (Eq. 4).
    """

    stage: int
    L_b: int
    episodes: int
    active_before: int | None
    active_after: int | None
    eliminated: int | None
    decisions_eliminated: int
    radius: float
    best_value: float
    E: float
    infrequent: float
    coverage_gap: float
    coverage_iterations: int
    policy: PolicyArray


@dataclass(frozen=True, slots=True)
class LearnerSummary:
    """The learner's answer so far: policy (H, X), its estimated value, and how it came about.

    `active` counts active policies, None where that is not known. `constants` holds every constant
    that shaped the run, by name.
    """

    policy: PolicyArray
    value_estimate: float
    active: int | None
    stage: int
    episodes_used: int
    episodes_total: int
    finished: bool
    constants: dict[str, str | int | float | bool] = field(default_factory=dict)


class Learner(Protocol):
    """One learning run. Deterministic; see the module's docstring for the loop."""

    def next_deployment(self) -> Deployment | None:
        """Returns what to deploy now, or None when the run is over.

        Idempotent: without an `observe` in between it returns an equal deployment.
        """

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Takes the counts of the current deployment; returns the stage's result when it ends.

        Raises LearnerError when nothing is deployed or when the counts have another n or layer.
        """

    def summary(self) -> LearnerSummary:
        """Returns the best policy known so far; available at any time."""


class LearnerError(ValueError):
    """A learner cannot go on; the message says why and what to change."""


def batch_counts(
    layout: CounterLayout, n: int, debiased: FloatArray, variance: float, term: float = 1.0
) -> BatchCounts:
    """Returns the counts of a batch of n reports from its debiased counters (C,).

    `variance` is that of the noise on each counter, `term` the size of the noise's terms.

    Raises ValueError when there are not exactly `layout.counters` of them.
    """
    if debiased.shape != (layout.counters,):
        raise ValueError(f"expected {layout.counters} counters, got shape {debiased.shape}")
    blocks, X = layout.split(debiased), layout.sizes.X
    if "joint" in blocks:
        joint = blocks["joint"]
        transitions, rewards = joint.sum(axis=-1), joint[..., 1].sum(axis=-1)
        terms, reward_terms = 2, X
    else:
        transitions, rewards = blocks["transitions"], blocks.get("rewards")
        terms, reward_terms = 1, 1
    visits = blocks.get("visits")
    return BatchCounts(
        layout=layout,
        n=n,
        transitions=transitions,
        visits=transitions.sum(axis=-1) if visits is None else visits,
        rewards=rewards,
        transition_variance=terms * variance,
        visit_variance=terms * X * variance if visits is None else variance,
        reward_variance=reward_terms * variance,
        term=term,
    )


def to_json(value: StageResult | LearnerSummary) -> str:
    """Returns a learner's answer as JSON, arrays as nested lists, numbers by `json_float`."""
    fields = asdict(value).items()
    plain = {k: json_float(v) if isinstance(v, float) else v for k, v in fields}
    return json.dumps(plain, default=_to_list)


def json_float(value: float) -> float | str:
    """Returns a number as JSON can hold it: "Infinity", "-Infinity" and "NaN" are strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _to_list(value: object) -> object:
    """Returns an array as lists; raises TypeError for what JSON cannot hold."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
