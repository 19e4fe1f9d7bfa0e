"""External learners: the base class for writing them, and the wrapper that runs them.

A learner extends `OwnLearner` and writes two methods:

    class Mine(OwnLearner):
        def next_deployment(self): ...      # what to deploy in this state, or None at the end
        def observe(self, counts): ...      # super().observe(counts), then learn from them

`next_deployment` is called more than once, so it must depend only on what `observe` has seen. After
a crash, a fresh learner gets the same counts again and must ask for the same deployments. So every
random draw must come from `problem.seed`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.common.process import plugins
from riffle.common.protocol.errors import RiffleError
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    FloatArray,
    Learner,
    LearnerError,
    LearnerSummary,
    PolicyArray,
    Problem,
    Purpose,
    StageResult,
    to_json,
)
from riffle.coordinator.learning.planning import plan
from riffle.coordinator.learning.postprocess import consistent, estimate_rewards

__all__ = ["BatchCounts", "Deployment", "OwnLearner", "Problem", "StageResult", "estimate", "plan"]

Constant = str | int | float | bool


class OwnLearner(ABC):
    """Base class of learners; a subclass defines `next_deployment` and extends `observe`.

    ``left`` counts the episodes not yet observed, and ``batches`` counts the observed batches;
    ``policy`` (H, X) and ``value`` are the answer so far. `summary` reports the ``constants``.
    """

    def __init__(self, problem: Problem, **constants: Constant) -> None:
        self.problem = problem
        self.left = problem.K
        self.batches = 0
        self.policy: PolicyArray = np.zeros((problem.sizes.H, problem.sizes.X), dtype=np.int64)
        self.value = 0.0
        self._constants = constants

    @abstractmethod
    def next_deployment(self) -> Deployment | None:
        """Returns the next deployment, made with `deploy`, or None when the run is over."""

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Checks the counts and subtracts their episodes from ``left``. Subclasses call this first.

        Raises LearnerError if n or the layer differs from what `next_deployment` asks for.
        """
        present = self.next_deployment()
        if present is None or (present.n, present.layer) != (counts.n, counts.layout.layer):
            raise LearnerError(f"asked for {present}, got counts of {counts.n} of {counts.layout}")
        self.left -= counts.n
        self.batches += 1
        return None

    def summary(self) -> LearnerSummary:
        """Returns the answer so far."""
        return LearnerSummary(
            policy=self.policy,
            value_estimate=self.value,
            active=0,
            stage=self.batches,
            episodes_used=self.problem.K - self.left,
            episodes_total=self.problem.K,
            finished=self.next_deployment() is None,
            constants=self._constants,
        )

    def deploy(
        self,
        policies: ArrayLike,
        n: int,
        probabilities: ArrayLike | None = None,
        layer: int | None = None,
    ) -> Deployment:
        """Makes a deployment of a policy (H, X), or of policies (M, H, X).

        ``probabilities`` (M,) are uniform by default. ``layer`` is the step to count, None for all.

        Raises LearnerError if n is not in 1..left, or the policies do not fit this problem.
        """
        n = operator.index(n)  # NumPy's integers too
        if not 1 <= n <= self.left:
            raise LearnerError(f"cannot deploy {n} episodes; {self.left} of K are left")
        stacked = np.asarray(policies, dtype=np.int64)
        stacked = stacked[None] if stacked.ndim == 2 else stacked
        weights = np.ones(len(stacked)) if probabilities is None else probabilities
        try:
            mixture = Mixture.from_probabilities(stacked, weights)
            mixture.check(self.problem.sizes)
        except ValueError as error:
            raise LearnerError(f"deployment {self.batches}: {error}") from error
        return Deployment(self.batches + 1, "fine", mixture, n, layer)

    def explorers(self, count: int = 64) -> PolicyArray:
        """Returns (M, H, X): a constant policy for each action, then ``count`` random policies."""
        sizes = self.problem.sizes
        generator = generator_for(self.problem.seed, "explorers")
        random = generator.integers(sizes.A, size=(count, sizes.H, sizes.X))
        always = np.arange(sizes.A)[:, None, None] * np.ones_like(random[:1])
        return np.concatenate([always, random])

    def improve(self, counts: BatchCounts) -> None:
        """Estimates a model from counts. The model's best policy and its value are the new answer.

        If the environment declares that all steps are alike, counts are summed over steps.
        """
        best = plan(*estimate(counts, alike=self.problem.homogeneous), self.problem.d1)
        self.policy, self.value = best.policy, float(best.value)


def estimate(counts: BatchCounts, *, alike: bool = False) -> tuple[FloatArray, FloatArray]:
    """Estimates P (H, X, A, X) and r (H, X, A) from a batch that counts all layers.

    Eq. 7 of paper 000 makes the counts consistent; then P and r are ratios of counts. With
    ``alike`` (`Problem.homogeneous`), counts and variances are summed over steps first.

    Visit counts are raised to one standard deviation of their noise, and to at least 1. So noise on
    a rarely visited (x, a) does not look like a reward. Rows of P may then sum to less than one.

    Raises LearnerError if the batch counted only one layer, because it then counted no rewards.
    """
    if counts.rewards is None:
        raise LearnerError("a model needs counts of all layers: deploy with layer=None")
    possible = counts.layout.possible
    arrays = [counts.transitions, counts.visits, counts.rewards, counts.visit_variance]
    if alike:
        H, possible = counts.layout.sizes.H, np.asarray(possible.any(axis=0))
        arrays = [np.repeat(array.sum(axis=0)[None], H, axis=0) for array in arrays]
    transitions, visits, rewards, variance = arrays
    N = consistent(transitions, visits, 0.0, add_on=False, possible=possible)
    visits = np.maximum(N.visits, np.maximum(1.0, np.sqrt(variance)))
    return N.transitions / visits[..., None], estimate_rewards(rewards, visits)


PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
METHODS = ("next_deployment", "observe", "summary")

P = ParamSpec("P")
T = TypeVar("T")


class ExternalLearner:
    """A `Learner` that wraps ``learner``, checks what ``learner`` returns, and explains errors.

    ``maker`` makes ``learner`` from the problem and the options. The first deployment is checked at
    once, before a run is created.

    Raises LearnerError if an option is unknown, ``maker`` returns no learner, or the first
    deployment is not valid.
    """

    def __init__(
        self, maker: plugins.Constructor, problem: Problem, options: Mapping[str, object]
    ) -> None:
        self._problem = problem
        self._left = problem.K
        self.learner: Learner = _make(maker, problem, options)
        self.next_deployment()

    def next_deployment(self) -> Deployment | None:
        """Checks and returns the learner's deployment."""
        deployment = _call(self.learner, self.learner.next_deployment)
        if deployment is None:
            return None
        _check_kind("next_deployment", deployment, Deployment, "a Deployment, or None at the end")
        _check_deployment(deployment, self._problem.sizes)
        if deployment.n > self._left:
            raise LearnerError(
                f"next_deployment asks for {deployment.n} episodes where {self._left} of K are "
                "left: does observe count them, as super().observe(counts) does?"
            )
        return deployment

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Gives the learner the counts; checks and returns its stage result."""
        stage = _call(self.learner, self.learner.observe, counts)
        self._left -= counts.n
        if stage is not None:
            _check_kind("observe", stage, StageResult, "a StageResult at a stage's end, or None")
            _check_answer("observe", stage, self._problem.sizes)
        return stage

    def summary(self) -> LearnerSummary:
        """Checks and returns the learner's answer."""
        summary = _call(self.learner, self.learner.summary)
        _check_kind("summary", summary, LearnerSummary, "a LearnerSummary")
        _check_answer("summary", summary, self._problem.sizes)
        return summary


def _make(maker: plugins.Constructor, problem: Problem, options: Mapping[str, object]) -> Learner:
    settable = _call(maker, plugins.parameter_names, maker)[1:]
    for name in sorted(set(options) - set(settable)):
        raise LearnerError(plugins.unknown_name("option", name, settable))
    learner: Learner = _call(maker, maker, problem, **options)
    missing = [name for name in METHODS if not callable(getattr(learner, name, None))]
    if missing:
        kind = type(learner).__name__
        text = f"a {kind} is no learner, it has no {', no '.join(missing)}"
        raise LearnerError(f"{text}: make it a subclass of riffle.OwnLearner")
    return learner


def _call(code: object, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls external code. Turns its exceptions into LearnerErrors that name the code's line."""
    try:
        return call(*args, **kwargs)
    except LearnerError as error:
        place = plugins.place_of(error, plugins.source_file(code), within=True)
        raise LearnerError(f"{error}{place}") from error
    except (RiffleError, MemoryError):  # their own text says what is wrong
        raise
    except Exception as error:
        raise LearnerError(plugins.describe_error(error, plugins.source_file(code))) from error


def _check_kind(method: str, value: object, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise LearnerError(f"{method} returned {type(value).__name__}, which is not {wanted}")


def _check_deployment(deployment: Deployment, sizes: Sizes) -> None:
    _check_kind("next_deployment", deployment.mixture, Mixture, "a Mixture, as Deployment.mixture")
    _check_policies("next_deployment", deployment.mixture.policies, sizes)
    for name, value, fits, wanted in (
        ("n", deployment.n, _is_int(deployment.n) and deployment.n > 0, "a positive int"),
        ("stage", deployment.stage, _is_int(deployment.stage), "an int"),
        ("purpose", deployment.purpose, deployment.purpose in PURPOSES,
         f"one of {', '.join(PURPOSES)}"),
        ("layer", deployment.layer, deployment.layer is None or _is_int(deployment.layer, sizes.H),
         f"None, or an int in 0..{sizes.H - 1}"),
    ):  # fmt: skip
        if not fits:
            raise LearnerError(f"next_deployment: {name} must be {wanted}, not {value!r}")


def _check_answer(method: str, answer: StageResult | LearnerSummary, sizes: Sizes) -> None:
    _check_policies(method, answer.policy, sizes, dimensions=2)
    try:
        to_json(answer)
    except (TypeError, ValueError) as error:
        raise LearnerError(f"{method}: {type(answer).__name__}: {error}") from error


def _check_policies(method: str, policies: object, sizes: Sizes, dimensions: int = 3) -> None:
    """Raises LearnerError for a wrong shape, dtype or action. NumPy would silently cut decimals."""
    shape = (sizes.H, sizes.X)
    wanted = f"{method}: a policy must be an array {shape} of integers (dtype=int)"
    if not isinstance(policies, np.ndarray):
        raise LearnerError(f"{wanted}, not a {type(policies).__name__}")
    fits = policies.ndim == dimensions and policies.shape[-2:] == shape
    if not fits or policies.dtype.kind not in "iu":
        raise LearnerError(f"{wanted}, not {policies.dtype} of shape {policies.shape}")
    if not np.isin(policies, range(sizes.A)).all():
        raise LearnerError(f"{method}: a policy has an action outside 0..{sizes.A - 1}")


def _is_int(value: object, below: int | None = None) -> bool:
    """Returns whether a value is a Python int, as JSON needs; with `below`, also in 0..below-1."""
    return type(value) is int and (below is None or 0 <= value < below)
