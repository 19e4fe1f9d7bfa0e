"""Learners by name: Riffle's own learners, external learners, and manual mode.

Another package adds a learner by an entry point in the group ``riffle.learners``. The setting
``learners`` adds a learner from a Python file (`common.process.plugins`). An added learner is a
class or function that takes the `Problem`, and the learner's options by name.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from riffle.common.accounting import CalibrationError
from riffle.common.mechanism.counters import Sizes
from riffle.common.process import plugins
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.batches.counts import value_estimate
from riffle.coordinator.batches.issue import noise_variance
from riffle.coordinator.learners.own import ExternalLearner, OwnLearner
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    Learner,
    LearnerError,
    LearnerSummary,
    Problem,
)
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.learning.sdp_pe.conference import ConferenceSDPPE
from riffle.coordinator.learning.sdp_pe.constants import CONSTANTS, Constants
from riffle.coordinator.learning.sdp_pe.schedule import Schedule, schedule_for
from riffle.coordinator.learning.ucbvi_shuffle import Options as UCBVIOptions
from riffle.coordinator.learning.ucbvi_shuffle import UCBVIShuffle
from riffle.coordinator.specs import MANUAL, MAX_EPISODES, Option, RunSpec

GROUP = "riffle.learners"

Options = Mapping[str, Option]
C = TypeVar("C", Constants, UCBVIOptions)
Factory = Callable[[Problem, str, Options], Learner]

TRIALS, LEAST_STEP = 10, 1.5
"""The number of larger K to try for a refused run, and the least factor from one K to the next."""

LEAST_GROWTH = 1.1
"""Larger K are tried only if stages grow at least by this factor."""


class Registry:
    """The learners that this coordinator can run.

    ``files`` maps names to ``path/file.py:Class`` or, in simulations, to the class itself.

    Raises LocalError ``invalid-spec`` if a file cannot be used, or if a name is already taken.
    """

    def __init__(
        self,
        extra: Mapping[str, Factory] | None = None,
        files: Mapping[str, str | plugins.Constructor] | None = None,
    ) -> None:
        self._known: dict[str, Factory] = {**BUILT_IN, **(extra or {})}
        for name, code in (files or {}).items():
            if name in self._known:
                raise LocalError("invalid-spec", f"{code}: {name!r} is the name of another")
            maker = plugins.load_file(code) if isinstance(code, str) else code
            self._known[name] = partial(_external, maker)
        self._offered = plugins.entry_points_of(GROUP)

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self._known, *self._offered})

    def build(self, spec: RunSpec) -> Learner:
        """Returns a fresh learner for a run.

        Raises RemoteError ``invalid-spec`` if there is no such learner, or if the learner refuses
        its options or the problem. Raises RemoteError ``batch-too-small`` if the noise of a batch
        cannot be made.
        """
        if spec.learner in self._known:
            factory = self._known[spec.learner]
        elif spec.learner in self._offered:
            factory = partial(_external, plugins.load_entry_point(self._offered[spec.learner]))
        else:
            raise RemoteError(
                "invalid-spec", plugins.unknown_name("learner", spec.learner, self.names)
            )
        try:
            return factory(problem(spec), spec.constants, spec.options)
        except LearnerError as error:
            raise refusal(spec, error) from error


def _external(maker: plugins.Constructor, problem: Problem, _: str, options: Options) -> Learner:
    return ExternalLearner(maker, problem, options)


def refusal(spec: RunSpec, error: LearnerError) -> RemoteError:
    """Returns a LearnerError as RemoteError ``invalid-spec``, with the learner's name added."""
    return RemoteError("invalid-spec", f"{spec.learner}: {error}")


def problem(spec: RunSpec) -> Problem:
    """Returns the facts about a run that its learner may use."""
    return Problem(
        sizes=spec.sizes,
        d1=spec.d1,
        K=spec.episodes,
        epsilon=spec.epsilon,
        beta=spec.beta,
        delta=spec.delta,
        families=spec.families,
        noise=partial(noise_variance, spec),
        seed=spec.seed,
        support=spec.support,
        homogeneous=spec.homogeneous,
    )


def sdp_pe(kind: type[SDPPE], problem: Problem, constants: str, options: Options) -> Learner:
    """Makes SDP-PE (paper 000 or 003). Options replace single constants of the named set.

    Raises RemoteError ``batch-too-small`` if the noise of a batch cannot be made. If a large enough
    K was found, the error names it.
    """
    chosen = _replace(CONSTANTS[constants], options)

    def check(problem: Problem) -> None:
        _check_batches(problem, schedule_for(problem, chosen, kind.fine_batches))

    _check_noise(problem, check, chosen.growth)
    return kind(problem, chosen)


def _check_noise(problem: Problem, check: Callable[[Problem], object], growth: float) -> None:
    """Calls ``check``. If ``check`` refuses a batch as too small, adds advice to the error."""
    try:
        check(problem)
    except RemoteError as error:
        if (factor := _missing_factor(error)) is None:
            raise
        K = _sufficient_K(problem, check, factor) if growth >= LEAST_GROWTH else None
        advice = (
            f"batches grow with the run's episodes: {K} episodes would be accepted"
            if K
            else "more episodes alone may not do: the option smallest_n makes batches larger"
        )
        raise RemoteError(error.slug, f"{error.detail}; {advice}") from error


def _sufficient_K(
    problem: Problem, check: Callable[[Problem], object], factor: float
) -> int | None:
    """Returns a larger, round K for which batches are large enough; None if no such K is found.

    A larger K may add a stage, which makes the stages before it smaller. So each K is tried before
    it is returned.
    """
    K = problem.K
    for _ in range(TRIALS):
        K = _two_digits(K * max(factor, LEAST_STEP))
        if K > MAX_EPISODES:
            return None
        try:
            check(replace(problem, K=K))
        except RemoteError as error:
            if (missing := _missing_factor(error)) is None:
                return None
            factor = missing
        else:
            return K
    return None


def _missing_factor(error: RemoteError) -> float | None:
    """Returns how many times larger a refused batch must be; None if the error does not say."""
    cause = error.__cause__
    return cause.times if isinstance(cause, CalibrationError) else None


def _two_digits(number: float) -> int:
    digit: int = 10 ** max(len(str(math.ceil(number))) - 2, 0)
    return math.ceil(number / digit) * digit


def pe(problem: Problem, constants: str, options: Options) -> Learner:
    """Makes SDP-PE that expects no noise, for simulations of a population without protection.

    `pe` has the stages and the radius of SDP-PE, so it is not APEVE (Qiao et al. 2022). On the
    services, nodes still add noise, so a run is as private as any other.
    """
    silent = replace(problem, noise=lambda n, layer: 0.0)
    return SDPPE(silent, _replace(CONSTANTS[constants], options))


def ucbvi_shuffle(problem: Problem, _: str, options: Options) -> Learner:
    """Makes batched UCBVI (`UCBVIShuffle`). Options replace its default constants.

    Raises RemoteError ``batch-too-small`` as `sdp_pe` does.
    """
    constants = _replace(UCBVIOptions(), options)
    _check_noise(problem, lambda larger: UCBVIShuffle(larger, constants), constants.growth)
    return UCBVIShuffle(problem, constants)


def choose(sizes: Sizes) -> tuple[str, str]:
    """Returns the learner for a problem of these sizes, and a sentence that says why.

    The choice uses measurements (docs/algorithm.md), and nothing that users reveal.
    """
    if sizes.X == 1:
        return "sdp-pe", "with one state there is nothing to plan, and elimination loses less"
    return "ucbvi-shuffle", "with several states it loses least in most measured settings"


def _replace(base: C, options: Options) -> C:
    """Returns ``base`` with options applied; raises LearnerError for a wrong name or value."""
    constants = asdict(base)
    settable = sorted(set(constants) - {"name"})
    unknown = sorted(set(options) - set(settable))
    if unknown:
        raise LearnerError(plugins.unknown_name("option", unknown[0], settable))
    try:
        document = json.dumps({**constants, **options})
        return TypeAdapter(type(base)).validate_json(document, strict=True)
    except ValidationError as error:
        raise LearnerError(f"option {first_fault(error)}") from error


def _check_batches(problem: Problem, schedule: Schedule) -> None:
    """Raises the error of `problem.noise` if a batch of `schedule` is too small."""
    smallest_crude = min(n for stage in schedule.stages for n in stage.crude)
    problem.noise(smallest_crude, 0)
    problem.noise(min(stage.fine for stage in schedule.stages), None)
    if schedule.exploit > 0:
        problem.noise(schedule.exploit, 0)


def sdp_pe_in(learner: Learner) -> SDPPE | None:
    """Returns the SDP-PE learner that ``learner`` is or wraps, or None for any other learner."""
    inner = learner.learner if isinstance(learner, ExternalLearner) else learner
    return inner if isinstance(inner, SDPPE) else None


def batches(learner: Learner) -> set[tuple[int, int | None]]:
    """Returns (n, layer) of the batches that a learner's schedule fixes from the start.

    Layer 0 means any single layer. SDP-PE's exploiting batch is left out.
    """
    if isinstance(learner, UCBVIShuffle):
        return learner.batches
    inner = sdp_pe_in(learner)
    if inner is None:
        return set()
    stages = inner.schedule.stages
    return {(n, 0) for stage in stages for n in stage.crude} | {(s.fine, None) for s in stages}


class ManualLearner(OwnLearner):
    """A `Learner` for deployments from outside. `submit` takes one deployment at a time.

    The best mixture is the one whose estimated value has the largest lower bound. The answer is its
    most probable policy. Whoever submits deployments sees only private counts, so choosing
    deployments costs no privacy.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._pending: Deployment | None = None
        self._lower_bound = -math.inf

    def submit(self, deployment: Deployment) -> None:
        """Takes the next deployment; raises LearnerError if another deployment is under way."""
        if self._pending is not None:
            raise LearnerError("a deployment is under way; wait until it is counted")
        self._pending = deployment

    def next_deployment(self) -> Deployment | None:
        """Returns the submitted deployment until its counts are observed; otherwise None."""
        return self._pending

    def observe(self, counts: BatchCounts) -> None:
        """Takes the counts. Returns None, because manual mode has no stages."""
        super().observe(counts)
        deployment, self._pending = self._pending, None
        estimate = value_estimate(counts, self.problem.delta)
        if deployment is None or estimate is None:
            return
        lower_bound = estimate.value - estimate.radius
        if lower_bound > self._lower_bound:
            mixture, self._lower_bound = deployment.mixture, lower_bound
            self.policy = mixture.policies[int(mixture.weights.argmax())]
            self.value = estimate.value

    def summary(self) -> LearnerSummary:
        """Returns the learned policy and the estimate of its value, as known so far."""
        radius = None if math.isinf(self._lower_bound) else self.value - self._lower_bound
        return replace(super().summary(), finished=self.left <= 0, radius=radius)


def manual(problem: Problem, _: str, options: Options) -> Learner:
    """Makes the learner of manual mode, which has no options."""
    if options:
        raise LearnerError("manual mode has no options")
    return ManualLearner(problem)


BUILT_IN: dict[str, Factory] = {
    "sdp-pe": partial(sdp_pe, SDPPE),
    "sdp-pe-conference": partial(sdp_pe, ConferenceSDPPE),
    "pe": pe,
    "ucbvi-shuffle": ucbvi_shuffle,
    MANUAL: manual,
}
