"""Simulates one seed of a run (`run_seed`) in an environment with a known MDP.

The services' learners run on the population-level simulator (`simulator`). Learners that plan
before every episode (UCBVI and its private variants) run through `per_episode`. The learners of
paper 004 run through `adversarial`.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from riffle.common.mechanism.counters import CounterLayout
from riffle.common.mechanism.parameters import Padding
from riffle.common.mechanism.policy import Mixture
from riffle.common.process.plugins import unknown_name
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.batches.issue import calibrated
from riffle.coordinator.learners.registry import refusal, sdp_pe_in
from riffle.coordinator.learning.learner import Deployment, Learner, LearnerError
from riffle.coordinator.learning.planning import Model, plan
from riffle.coordinator.specs import MANUAL, RunSpec
from riffle.experiments import adversarial, per_episode
from riffle.experiments.adversaries import ALGORITHMS, LAYERED, UNIFORM, WIDTHS, Case
from riffle.experiments.per_episode import PER_EPISODE, checkpoints_of
from riffle.experiments.presets import Preset
from riffle.experiments.regret import (
    Constant,
    SeedResult,
    optimal_value,
    policy_value,
    regret,
    switches,
)
from riffle.experiments.simulator import Calibrate, Mechanism, Run, simulate
from riffle.node_client.environments.registry import exact_mdp
from riffle.node_client.environments.tabular import TabularMDP

ADVERSARIAL = frozenset({*ALGORITHMS, UNIFORM})
NOT_PRIVATE = frozenset({"ucbvi", "pe", UNIFORM})
CASE_OPTIONS = ("adversary", "privacy", "scale", "eta", "estimator")  # of paper 004's learners


def run_seed(chosen: Preset, seed: int) -> SeedResult:
    """Runs one seed on the simulator that the learner needs.

    Raises LocalError ``invalid-spec`` if the environment has no known MDP or an option is not
    valid. Raises RemoteError ``invalid-spec`` or ``batch-too-small`` if the coordinator would raise
    it.
    """
    started, spec = time.perf_counter(), chosen.spec
    if spec.learner in ADVERSARIAL:
        return replace(adversarial.run(case_of(chosen, seed)), seed=seed)
    mdp = exact_mdp(chosen.make())
    if spec.learner in PER_EPISODE:
        result = per_episode.run(
            spec.learner,
            mdp,
            spec.episodes,
            epsilon=spec.epsilon,
            beta=spec.beta,
            seed=spec.seed + seed,
            calibration=spec.calibration,
            constants=spec.constants,
            options=spec.options,
        )
        return replace(result, seed=seed)
    learner = chosen.registry().build(spec.model_copy(update={"seed": spec.seed + seed}))
    try:
        run = simulate(mdp, learner, spec.families, mechanism_of(spec), seed, spec.support)
    except LearnerError as error:
        raise refusal(spec, error) from error
    return result_of(spec, seed, run, mdp, time.perf_counter() - started)


def check(chosen: Preset) -> None:
    """Builds the learner once, so that a mistake is refused before any work.

    Raises ValueError if there is no such learner, and RiffleError if the learner refuses an option.
    Does not notice batches that are too small.
    """
    registry, name = chosen.registry(), chosen.spec.learner
    known = sorted({*registry.names, *PER_EPISODE, *ADVERSARIAL} - {MANUAL})
    if name not in known:
        raise ValueError(unknown_name("simulated learner", name, known))
    if name in ADVERSARIAL:
        case_of(chosen)
    elif name in PER_EPISODE:
        spec = chosen.spec
        per_episode.checked(name, spec.calibration, spec.constants, spec.options)
    else:
        try:
            registry.build(chosen.spec)
        except RemoteError as error:
            if error.slug != "batch-too-small":
                raise LocalError(error.slug, error.detail) from None


def mechanism_of(spec: RunSpec) -> Calibrate:
    """Returns the function that calibrates batches. Batches of the learner `pe` get no noise."""

    def mechanism(layout: CounterLayout, n: int) -> Mechanism:
        if spec.learner == "pe":
            return Mechanism(None, Padding(layout.data_slots, 0))
        result = calibrated(spec, n, layout.layer)
        return Mechanism(result.noise, result.padding)

    return mechanism


def result_of(
    spec: RunSpec, seed: int, run: Run, mdp: TabularMDP | None, seconds: float
) -> SeedResult:
    """Returns the result of a batched run. ``mdp`` is None if the probabilities are unknown.

    If the learner ended early, its answer is deployed for the episodes that are left.
    """
    left = spec.episodes - sum(deployment.n for deployment in run.deployments)
    if left > 0:
        answer = Mixture.single(run.summary.policy)
        rest = Deployment(run.summary.stage, "exploit", answer, left, None)
        run = replace(run, deployments=[*run.deployments, rest])
    eliminated = any(stage.eliminated or stage.decisions_eliminated for stage in run.stages)
    return SeedResult(
        seed=seed,
        policy_switches=switches(run.deployments),
        messages=run.messages,
        seconds=seconds,
        policy=run.summary.policy.tolist(),
        constants={**run.summary.constants, **_recorded(spec)},
        eliminated=None if sdp_pe_in(run.learner) is None else eliminated,
        value_estimate=run.summary.value_estimate,
        **({} if mdp is None else _exact(spec, run, mdp)),
    )


def _exact(spec: RunSpec, run: Run, mdp: TabularMDP) -> dict[str, Any]:
    """Returns the results of a batched run that need the true MDP."""
    curve, points = regret(mdp, run.deployments), checkpoints_of(spec.episodes)
    # Within a deployment every episode has the same regret, so the curve is piecewise linear.
    known = np.append(0.0, curve.episodes), np.append(0.0, curve.cumulative)
    return {
        "regret": curve.total,
        "optimal_value": optimal_value(mdp),
        "policy_value": policy_value(mdp, run.summary.policy),
        "optimal_survives": optimal_survives(run.learner, mdp),
        "episodes": tuple(map(float, points)),
        "cumulative": tuple(np.interp(points, *known).tolist()),
    }


def _recorded(spec: RunSpec) -> dict[str, Constant]:
    known: dict[str, Constant] = {"families": spec.families, "delta": spec.delta}
    known["homogeneous"] = spec.homogeneous
    known["support"] = "none" if spec.support is None else "declared"
    if spec.learner in NOT_PRIVATE:
        return known
    known["calibration"] = spec.calibration
    return known | {"epsilon": spec.epsilon, "beta": spec.beta}


def optimal_survives(learner: Learner, mdp: TabularMDP) -> bool | None:
    """Returns whether a policy of value V* is active; None for a learner without an active set."""
    inner = sdp_pe_in(learner)
    if inner is None:
        return None
    best = plan(mdp.P, mdp.r, mdp.d1)
    # Several policies may be optimal, as they may differ in states that they never visit.
    active_value = float(inner.phi.best(Model(mdp.P, mdp.r)).value)
    return inner.phi.contains(best.policy) or active_value >= float(best.value) - 1e-9


def case_of(chosen: Preset, seed: int = 0) -> Case:
    """Returns the `Case` of a run with a learner of 004. Its options must be in `CASE_OPTIONS`.

    In any environment but LayeredMDP-v0, the option `adversary` is `rewards` by default. Raises
    LocalError ``invalid-spec`` if an option is unknown or out of range, or the environment has no
    known MDP.
    """
    spec, layered = chosen.spec, chosen.spec.environment == LAYERED
    for name in sorted(spec.options.keys() - set(CASE_OPTIONS)):
        raise LocalError("invalid-spec", unknown_name("option", name, CASE_OPTIONS))
    if spec.calibration == "conference":
        text = f"calibration 'conference' (003) is not for {spec.learner}"
        raise LocalError("invalid-spec", text)
    if not layered:
        exact_mdp(chosen.make())
    world: dict[str, Any] = {"own": chosen.own_environment, "adversary": "rewards"}
    world["parameters"] = tuple(chosen.environment.items())
    if layered:
        world = {"actions": 2, **chosen.environment}
        world["widths"] = str(world.get("widths", "-".join(map(str, WIDTHS)))).split("-")
    values = {
        "name": spec.learner,
        "K": spec.episodes,
        "epsilon": spec.epsilon,
        "beta": spec.beta,
        "privacy": "central",
        "calibration": spec.calibration,
        "environment": spec.environment,
        **world,
        "seed": spec.seed + seed,
        **spec.options,
    }
    try:
        return TypeAdapter(Case).validate_python(values)
    except ValidationError as error:
        raise LocalError("invalid-spec", first_fault(error)) from error
