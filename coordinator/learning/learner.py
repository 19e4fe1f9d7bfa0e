"""The contract between a learner and whatever runs it: deployments out, private counts in.

A learner is deterministic. It reads no clock and no global randomness. So a coordinator can restore
a learner: it gives the same counts to a fresh learner of the same `Problem`. The loop is

    while (deployment := learner.next_deployment()) is not None:
        counts = <private counts of deployment.n episodes>
        stage_result = learner.observe(counts)      # None inside a stage

Stage b of SDP-PE has a length L_b, and a multiple of L_b episodes. The precision E bounds the
noise: with high probability, the noise on every counter is within E / 4 (Assumption 4 of 000).
Steps h are 0-based. All arrays are read-only by convention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from riffle.common.mechanism.counters import CounterLayout, Families, Sizes, Support
from riffle.common.mechanism.policy import Mixture

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
PolicyArray = NDArray[np.int64]

Purpose = Literal["crude", "fine", "exploit", "manual"]

NoiseModel = Callable[[int, int | None], float]
"""Takes a batch's n and layer (None: all layers); returns the variance of the noise on one counter.

The variance is known before the batch runs.
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that a learner knows about its run and the environment.

    `d1` (X,) is the start distribution. K counts episodes. (epsilon, beta) is the guarantee of one
    user. `delta` is the probability that the confidence statements fail. `support` and
    `homogeneous` are the environment's declaration: its possible transitions, and whether all steps
    are alike. `seed` is the seed of the learner's own draws.
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
    support: Support | None = None
    homogeneous: bool = False

    def layout(self, layer: int | None) -> CounterLayout:
        """Returns the counters of a batch that counts `layer`, or all layers if `layer` is None."""
        return CounterLayout(self.sizes, self.families, layer, self.support)


@dataclass(frozen=True, slots=True)
class Deployment:
    """An order to run `mixture` for exactly `n` episodes and to count step `layer` (None: all)."""

    stage: int
    purpose: Purpose
    mixture: Mixture
    n: int
    layer: int | None


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Unbiased private counts of one batch, before post-processing.

    `transitions` are (Hs, X, A, X), `visits` and `rewards` are (Hs, X, A). `rewards` is None if
    rewards were not counted. Hs is H if the batch counts all layers, and 1 if it counts one. The
    variances of the noise on the entries have the same shapes. Outside the support, entries and
    variances are 0. `term` is the b of Bernstein's inequality for the noise on each counter
    (`common.mechanism.parameters.BatchNoise`).
    """

    layout: CounterLayout
    n: int
    transitions: FloatArray
    visits: FloatArray
    rewards: FloatArray | None
    transition_variance: FloatArray
    visit_variance: FloatArray
    reward_variance: FloatArray
    term: float = 1.0


@dataclass(frozen=True, slots=True)
class StageResult:
    """The outcome of a stage, for the log, the CSV and the live page.

    `active_before` and `active_after` are the numbers of active policies, or None for an implicit
    active set. `decisions_eliminated` is the number of (h, x, a) that no active policy takes any
    more. `best_value` is the largest estimated value in the active set. Policies that are `radius`
    or more below this value are eliminated. `E` is the precision of the stage's fine counts.
    `infrequent` is the share of tuples (h, x, a, x') in W, the set of tuples too rare to learn.
    `coverage_gap` bounds how far the coverage design is from the optimum of 000, Eq. 4, relative to
    the optimum.
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
    """The learner's answer so far: policy (H, X), its estimated value, and facts about the run.

    `active` is the number of active policies, or None if it is not known. `constants` holds every
    constant that shaped the run, by name. `radius` is None if the learner states none.
    """

    policy: PolicyArray
    value_estimate: float
    active: int | None
    stage: int
    episodes_used: int
    episodes_total: int
    finished: bool
    constants: dict[str, str | int | float | bool] = field(default_factory=dict)
    radius: float | None = None


class Learner(Protocol):
    """A deterministic learning run; see the module's docstring."""

    def next_deployment(self) -> Deployment | None:
        """Returns the next deployment, or None when the run is over.

        Until `observe` is called, every call returns an equal deployment.
        """

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Takes the current deployment's counts. Returns the stage's result if they end the stage.

        Raises LearnerError if nothing is deployed, or if n or the layer of the counts is wrong.
        """

    def summary(self) -> LearnerSummary:
        """Returns the best policy known so far, at any time of the run."""


class LearnerError(ValueError):
    """Raised if a learner cannot go on; the message says why and what to change."""


def batch_counts(
    layout: CounterLayout, n: int, debiased: FloatArray, variance: float, term: float = 1.0
) -> BatchCounts:
    """Returns the counts of a batch of n reports from its debiased counters (C,).

    Families without counters of their own are sums of other counters. `variance` and `term`
    describe the noise on each counter (see `BatchCounts`).

    Raises ValueError if `debiased` does not have exactly `layout.counters` entries.
    """
    if debiased.shape != (layout.counters,):
        raise ValueError(f"expected {layout.counters} counters, got shape {debiased.shape}")
    blocks, terms = layout.split(debiased), 1
    if "joint" in blocks:
        joint, terms = blocks["joint"], 2
        transitions, rewards = joint.sum(axis=-1), joint[..., 1].sum(axis=-1)
    else:
        transitions, rewards = blocks["transitions"], blocks.get("rewards")
    visits = blocks.get("visits")
    noise: FloatArray = np.where(layout.possible, variance, 0.0)
    of_one, of_row = np.asarray(noise.max(axis=-1)), np.asarray(noise.sum(axis=-1))
    return BatchCounts(
        layout=layout,
        n=n,
        transitions=transitions,
        visits=transitions.sum(axis=-1) if visits is None else visits,
        rewards=rewards,
        transition_variance=terms * noise,
        visit_variance=terms * of_row if visits is None else of_one,
        reward_variance=of_row if "joint" in blocks else of_one,
        term=term,
    )


def to_json(value: StageResult | LearnerSummary) -> str:
    """Returns a learner's answer as JSON: arrays as nested lists, numbers as in `json_float`."""
    fields = asdict(value).items()
    plain = {k: json_float(v) if isinstance(v, float) else v for k, v in fields}
    return json.dumps(plain, default=_to_list)


def json_float(value: float) -> float | str:
    """Returns a number as JSON can hold it: "Infinity", "-Infinity" and "NaN" are strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _to_list(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
