"""The work of ``riffle simulate``: chooses the simulator of a learner, and builds the answer.

Learners of batches are simulated by population, or user by user. UCBVI and its private variants
plan before every episode. The two algorithms of paper 004 learn on layered MDPs from the losses of
an adversary.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from riffle.common.process.plugins import unknown_name
from riffle.common.protocol.descriptor import MAX_MESSAGES, first_fault
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.specs import MANUAL
from riffle.deploy.cli.options import RunOptions, SimulationOptions, read_pairs
from riffle.deploy.output import progress, steps
from riffle.experiments import per_user
from riffle.experiments.adversarial import AdversarialResult, run
from riffle.experiments.adversaries import ALGORITHMS, LAYERED, WIDTHS, Case
from riffle.experiments.bands import METHOD
from riffle.experiments.per_episode import PER_EPISODE
from riffle.experiments.presets import Preset
from riffle.experiments.study import CALIBRATIONS, band, map_seeds, study
from riffle.node_client.environments.registry import exact_mdp, make
from riffle.node_client.environments.tabular import Modelled

OPTIONS = ("adversary", "privacy", "scale", "eta", "estimator")
"""The fields of `Case` that --option may set; for LayeredMDP-v0, --param may too."""
SETTABLE = ("widths", "actions", *OPTIONS)
"""The fields of `Case` that may be set if the environment is LayeredMDP-v0."""
DEFAULTS: dict[str, Any] = {
    "K": 2_000,
    "epsilon": 1.0,
    "beta": 1e-5,
    "privacy": "central",
    "calibration": "tight",
    "seed": 0,
    "widths": "-".join(map(str, WIDTHS)),
}
SPEC_CALIBRATIONS = {name: in_spec for in_spec, name in CALIBRATIONS.items()}
ADVERSARIAL_CALIBRATIONS = {"tight": "correct", "paper": "paper"}


def simulate(options: RunOptions, how: SimulationOptions, *, preset_given: bool) -> dict[str, Any]:
    """Returns the results over all seeds as the document that the command prints.

    ``preset_given``: the caller named a preset, which paper 004's learners refuse.

    Raises ValueError if an option does not fit the learner or a value is out of range, and
    LocalError or RemoteError if the learner or environment does not exist or refuses its options.
    """
    learner = options.learner
    if how.per_user and learner in {*PER_EPISODE, *ALGORITHMS}:
        raise ValueError(f"--per-user is not for {learner}, which has no batches")
    for name, value in (("run-id", how.run_id), ("test-seed", how.test_seed)):
        if value is not None and not how.per_user:
            raise ValueError(f"--{name} is for --per-user")
    if learner in ALGORITHMS:
        return _simulate_adversarial(options, how, preset_given=preset_given)
    calibration = None if how.calibration is None else SPEC_CALIBRATIONS[how.calibration]
    if not how.per_user and options.dishonest_fraction is None:
        options = replace(options, dishonest_fraction=0.0)
    # The papers' first batches are so small that a report has more messages than a run allows.
    most = MAX_MESSAGES if options.constants == "paper" and not how.per_user else None
    chosen = options.apply(
        calibration=calibration, run_id=how.run_id, test_seed=how.test_seed, max_messages=most
    )
    if learner in PER_EPISODE:
        if options.families is not None:
            raise ValueError(f"--families is not for {learner}: --calibration decides it")
        if options.trust is not None:
            raise ValueError(f"--trust is not for {learner}: its name says whom it trusts")
    else:
        _build_once(chosen)
    return _simulate_users(chosen, how) if how.per_user else _simulate_population(chosen, how)


def rows_of(document: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Returns the document as rows of a table, without long values; constants come last."""
    constants: dict[str, object] = document["constants"]
    hidden = {"constants", "batches", "policy"}
    rows = [(key, value) for key, value in document.items() if key not in hidden]
    return rows + [(f"constants.{key}", value) for key, value in constants.items()]


def _build_once(chosen: Preset) -> None:
    """Builds the learner, so that an unknown one or a wrong option is refused before any work."""
    registry, name = Registry(files=chosen.learners), chosen.spec.learner
    known = sorted({*registry.names, *PER_EPISODE, *ALGORITHMS} - {MANUAL})
    if name not in known:
        raise ValueError(unknown_name("simulated learner", name, known))
    registry.build(chosen.spec)


def _simulate_population(chosen: Preset, how: SimulationOptions) -> dict[str, Any]:
    # Refuses an environment without an exact MDP before any work.
    exact_mdp(make(chosen.spec.environment, **chosen.environment))
    with steps("seeds", how.seeds) as shown:
        return study(
            chosen.spec,
            chosen.environment,
            how.seeds,
            workers=how.workers,
            on_result=lambda _: shown.step(),
            learners=chosen.learners,
        ).as_dict()


def _simulate_users(chosen: Preset, how: SimulationOptions) -> dict[str, Any]:
    spec = chosen.spec
    with steps("episodes", how.seeds * spec.episodes) as shown:
        outcome = per_user.study(
            spec,
            chosen.environment,
            how.seeds,
            workers=how.workers,
            on_users=shown.step,
            learners=chosen.learners,
        )
    if not isinstance(make(spec.environment, **chosen.environment), Modelled):
        text = "no regret and no exact values: this environment shows no transition probabilities"
        progress.print(text, highlight=False, soft_wrap=True)
    return per_user.summarize(spec, outcome)


def _simulate_adversarial(
    options: RunOptions, how: SimulationOptions, *, preset_given: bool
) -> dict[str, Any]:
    """Runs an algorithm of paper 004; each seed has its own losses, and its own LayeredMDP-v0."""
    unused = (options.trust, options.families, options.constants)
    layered = options.env in (None, LAYERED)
    if preset_given or any(value is not None for value in unused) or (layered and options.horizon):
        raise ValueError(
            f"{options.learner} learns from an adversary's losses: --preset, --trust, --families "
            f"and --constants are not for it, nor is --horizon on {LAYERED}; --option adversary, "
            "privacy, scale, eta or estimator are, and --param widths or actions"
        )
    case = _case(options, how)
    results: list[AdversarialResult] = []
    with steps("seeds", how.seeds) as shown:
        for result in map_seeds(partial(_run_seed, case), how.seeds, how.workers):
            results.append(result)
            shown.step()
    mean, interval = band([result.total for result in results])
    recorded = {key: getattr(case, key) for key in ("epsilon", "beta", "privacy", "calibration")}
    return {
        "learner": case.name,
        "environment": case.environment,
        "adversary": case.adversary,
        "episodes": case.K,
        **recorded,
        "seeds": how.seeds,
        "regret_mean": mean,
        "regret_ci": interval,
        "regret_ci_method": METHOD,
        "regret_uniform_mean": float(np.mean([result.uniform_regret for result in results])),
        "seconds": sum(result.seconds for result in results),
        # Without privacy, epsilon is infinite, which JSON cannot express.
        "constants": {
            name: "infinity" if value == math.inf else value
            for name, value in results[-1].constants.items()
            if name != "seed"
        },
    }


def _case(options: RunOptions, how: SimulationOptions) -> Case:
    """Returns the case to run: the command's options over `DEFAULTS`."""
    layered = options.env in (None, LAYERED)
    pairs = (read_pairs(options.param) if layered else {}) | read_pairs(options.option)
    settable = SETTABLE if layered else OPTIONS
    for name in sorted(pairs.keys() - set(settable)):
        raise ValueError(unknown_name("parameter or option", name, settable))
    if not layered:
        pairs = _environment(options) | {"adversary": "rewards"} | pairs
    own = {
        "K": options.episodes,
        "epsilon": options.epsilon,
        "beta": options.beta,
        "calibration": how.calibration,
    }
    values = DEFAULTS | {name: value for name, value in own.items() if value is not None} | pairs
    if values["calibration"] not in ADVERSARIAL_CALIBRATIONS:
        raise ValueError(f"--calibration {values['calibration']} is not for {options.learner}")
    values |= {
        "name": options.learner,
        "widths": str(values["widths"]).split("-"),
        "calibration": ADVERSARIAL_CALIBRATIONS[values["calibration"]],
    }
    try:
        return TypeAdapter(Case).validate_python(values)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error


def _environment(options: RunOptions) -> dict[str, Any]:
    """Returns id and parameters of an environment with a known MDP, which is made once to check."""
    chosen = RunOptions(env=options.env, param=options.param, horizon=options.horizon).apply()
    exact_mdp(make(chosen.spec.environment, **chosen.environment))
    parameters = tuple(chosen.environment.items())
    return {"environment": chosen.spec.environment, "parameters": parameters}


def _run_seed(case: Case, seed: int) -> AdversarialResult:
    return run(replace(case, seed=seed))
