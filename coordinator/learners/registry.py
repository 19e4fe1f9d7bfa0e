"""Learners by name: those of Riffle, and those that other packages offer.

Another package adds a learner with an entry point in the group ``riffle.learners``: a class, or a
function, that takes the `Problem` and its options by name; the entry point's name is then a run's
``learner``. So does a Python file that whoever starts this process names
(`common.process.plugins`).

Rebuild a run's learner after a crash, by replaying what it has observed.

A learner is deterministic (`coordinator.learning.learner`), so a fresh one that is shown the stored
private counts in order is in the state of the lost one. The stored deployments are the truth: each
must be what the replayed learner asks for, else the run must not go on.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial

from pydantic import TypeAdapter, ValidationError

from riffle.common.accounting import CalibrationError
from riffle.common.process.plugins import (
    Constructor,
    entry_points_of,
    load_entry_point,
    load_file,
    unknown_name,
)
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.batches.issue import PlannedNoise
from riffle.coordinator.learners.manual import ManualLearner
from riffle.coordinator.learners.own import Brought
from riffle.coordinator.learning.learner import Learner, LearnerError, Problem
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.learning.sdp_pe.conference import ConferenceSDPPE
from riffle.coordinator.learning.sdp_pe.presets import PRESETS, Constants
from riffle.coordinator.learning.sdp_pe.schedule import Schedule, schedule_for
from riffle.coordinator.specs import MANUAL, MAX_EPISODES, Option, RunSpec

GROUP = "riffle.learners"

Options = Mapping[str, Option]
Factory = Callable[[Problem, str, Options], Learner]

TRIALS, LEAST_STEP = 10, 1.5
"""How many larger K are tried for one that would do, and by how much each at least is larger."""

LEAST_GROWTH = 1.1
"""Stages that hardly grow are as many as K is large, and as small for every K: none is tried."""


class Registry:
    """Learners that this coordinator can run; ``files`` are name -> ``path/file.py:Class``.

    Raises:
        LocalError: ``invalid-spec``: a file cannot be used, or has a built-in learner's name.
    """

    def __init__(
        self, extra: Mapping[str, Factory] | None = None, files: Mapping[str, str] | None = None
    ) -> None:
        self._known: dict[str, Factory] = {**BUILT_IN, **(extra or {})}
        for name, reference in (files or {}).items():
            if name in self._known:
                raise LocalError("invalid-spec", f"{reference}: {name!r} is the name of another")
            self._known[name] = partial(_brought, load_file(reference))
        self._offered = entry_points_of(GROUP)

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self._known, *self._offered})

    def build(self, spec: RunSpec) -> Learner:
        """A fresh learner for a run.

        Raises:
            RemoteError: ``invalid-spec`` when there is no such learner, its options are not valid,
                it refuses the problem, or it was brought and makes a mistake at once;
                ``batch-too-small`` from the noise it asked about.
        """
        factory = self._factory(spec.learner)
        try:
            return factory(problem(spec), spec.preset, spec.options)
        except LearnerError as error:
            raise refusal(spec, error) from error

    def _factory(self, name: str) -> Factory:
        if name in self._known:
            return self._known[name]
        if name in self._offered:
            return partial(_brought, load_entry_point(self._offered[name]))
        raise RemoteError("invalid-spec", unknown_name("learner", name, self.names))


def _brought(maker: Constructor, problem: Problem, _: str, options: Options) -> Learner:
    """A learner of somebody else's; it has no presets, and options are its parameters."""
    return Brought(maker, problem, options)


def refusal(spec: RunSpec, error: LearnerError) -> RemoteError:
    """What a run ends with, or is refused with, whose learner cannot go on: the learner's words."""
    return RemoteError("invalid-spec", f"{spec.learner}: {error}")


def problem(spec: RunSpec) -> Problem:
    """What a learner is told of a run."""
    return Problem(
        sizes=spec.sizes,
        d1=spec.d1,
        K=spec.episodes,
        epsilon=spec.epsilon,
        beta=spec.beta,
        delta=spec.delta,
        families=spec.families,
        noise=PlannedNoise(spec),
        seed=spec.seed,
    )


def sdp_pe(problem: Problem, preset: str, options: Options) -> Learner:
    """SDP-PE with a preset's constants, some of them replaced."""
    return _checked(SDPPE, problem, _constants(preset, options))


def sdp_pe_conference(problem: Problem, preset: str, options: Options) -> Learner:
    """The conference variant of SDP-PE (003)."""
    return _checked(ConferenceSDPPE, problem, _constants(preset, options))


def _checked(kind: type[SDPPE], problem: Problem, constants: Constants) -> Learner:
    """One whose batches are large enough; who asks for a run chooses K, and no batch's n.

    Raises:
        RemoteError: ``batch-too-small``, with a K that would do, or that none was found.
    """
    try:
        learner = kind(problem, constants)
        _check_batches(problem, learner.schedule)
    except RemoteError as error:
        if (times := _times(error)) is None:
            raise
        enough = _enough(kind, problem, constants, times)
        advice = (
            f"batches grow with the run's episodes: {enough} episodes would do"
            if enough
            else "more episodes alone may not do: the option smallest_n makes batches larger"
        )
        raise RemoteError(error.slug, f"{error.detail}; {advice}") from error
    return learner


def _enough(kind: type[SDPPE], problem: Problem, constants: Constants, times: float) -> int | None:
    """A larger K, to two digits, whose batches are large enough; None where none was found.

    Batches grow with K, but not in proportion: one more stage makes those before it smaller, and
    the first of a preset may be as large for every K. So no K is told that has not been tried.
    """
    if constants.growth < LEAST_GROWTH:
        return None
    K = problem.K
    for _ in range(TRIALS):
        K = _two_digits(K * max(times, LEAST_STEP))
        if K > MAX_EPISODES:
            return None
        larger = replace(problem, K=K)
        try:
            _check_batches(larger, schedule_for(larger, constants, kind.fine_batches))
        except RemoteError as error:
            if (found := _times(error)) is None:
                return None
            times = found
        else:
            return K
    return None


def _times(error: RemoteError) -> float | None:
    """How many times larger a refused batch has to be, where that is known."""
    cause = error.__cause__
    return cause.times if isinstance(cause, CalibrationError) else None


def _two_digits(number: float) -> int:
    """The number, rounded up to two digits."""
    digit: int = 10 ** max(len(str(math.ceil(number))) - 2, 0)
    return math.ceil(number / digit) * digit


def pe(problem: Problem, preset: str, options: Options) -> Learner:
    """For the simulator: SDP-PE that expects no noise, for a population that is not protected.

    Nodes add noise all the same: on the services it is as private as its batches, and merely wrong
    about how much noise there is.
    """
    return SDPPE(replace(problem, noise=_no_noise), _constants(preset, options))


def _no_noise(n: int, layer: int | None) -> float:
    return 0.0


def _constants(preset: str, options: Options) -> Constants:
    constants = asdict(PRESETS[preset])
    settable = sorted(set(constants) - {"name"})
    unknown = sorted(set(options) - set(settable))
    if unknown:
        raise LearnerError(unknown_name("option", unknown[0], settable))
    try:
        document = json.dumps({**constants, **options})
        return TypeAdapter(Constants).validate_json(document, strict=True)
    except ValidationError as error:
        raise LearnerError(f"option {first_fault(error)}") from error


def _check_batches(problem: Problem, schedule: Schedule) -> None:
    """Ask for the noise of the smallest batches now, so that one too small is refused at once."""
    smallest_crude = min(n for stage in schedule.stages for n in stage.crude)
    problem.noise(smallest_crude, 0)
    problem.noise(min(stage.fine for stage in schedule.stages), None)
    if schedule.exploit > 0:
        problem.noise(schedule.exploit, 0)


def sdp_pe_in(learner: Learner) -> SDPPE | None:
    """The SDP-PE that this learner is, also where somebody brought one that builds on it."""
    inner = learner.learner if isinstance(learner, Brought) else learner
    return inner if isinstance(inner, SDPPE) else None


def batches(learner: Learner) -> set[tuple[int, int | None]]:
    """Sizes and scopes of the batches that a learner is known to ask for; none of others."""
    inner = sdp_pe_in(learner)
    if inner is None:
        return set()
    stages = inner.schedule.stages
    return {(n, 0) for stage in stages for n in stage.crude} | {(s.fine, None) for s in stages}


def manual(problem: Problem, _: str, options: Options) -> Learner:
    """Manual mode; it has no options."""
    if options:
        raise LearnerError("manual mode has no options")
    return ManualLearner(problem)


BUILT_IN: dict[str, Factory] = {
    "sdp-pe": sdp_pe,
    "sdp-pe-conference": sdp_pe_conference,
    "pe": pe,
    MANUAL: manual,
}
