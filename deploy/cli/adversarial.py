"""The two algorithms of 004 in ``riffle simulate``: losses of an adversary, layered MDPs."""

import math
from dataclasses import asdict, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError

from riffle.common.descriptor import first_fault
from riffle.common.plugins import no_such
from riffle.deploy.cli.output import steps
from riffle.experiments.adversarial import WIDTHS, AdversarialResult, Algorithm, Case, run
from riffle.experiments.figures.bands import METHOD
from riffle.experiments.study import band, each_seed

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
ENVIRONMENT = "LayeredMDP-v0"
ADVICE = (
    "{} learns on "
    f"{ENVIRONMENT} from an adversary's losses: --preset, --env, --horizon, --trust, "
    "--families and --constants are not for it; --param widths, actions or adversary and --option "
    "privacy, scale or eta are"
)
SETTABLE = ("widths", "actions", "adversary", "privacy", "scale", "eta")
DEFAULTS: dict[str, Any] = {
    "K": 2_000,
    "epsilon": 1.0,
    "beta": 1e-5,
    "privacy": "central",
    "calibration": "tight",
    "seed": 0,
    "widths": "-".join(map(str, WIDTHS)),
}
CALIBRATIONS = {"tight": "correct", "paper": "paper"}


def document(
    given: dict[str, Any], options: dict[str, Any], seeds: int, workers: int
) -> dict[str, Any]:
    """Seeds 0..seeds-1 of one case, each with its own MDP and losses.

    Both `given`, from the command's own options with None for the unsaid, and `options` by name are
    fields of `Case`.

    Raises:
        ValueError: there is no such option, or a value is wrong; the message names it.
    """
    for name in sorted(options.keys() - set(SETTABLE)):
        raise ValueError(no_such("parameter or option", name, SETTABLE))
    said = {name: value for name, value in given.items() if value is not None}
    case = _case({**DEFAULTS, **said, **options})
    results = _each(case, seeds, workers)
    mean, interval = band([result.total for result in results])
    recorded = {key: getattr(case, key) for key in ("epsilon", "beta", "privacy", "calibration")}
    return {
        "learner": case.name,
        "environment": ENVIRONMENT,
        "adversary": case.adversary,
        "episodes": case.K,
        **recorded,
        "seeds": seeds,
        "regret_mean": mean,
        "regret_ci": interval,
        "regret_ci_method": METHOD,
        "regret_uniform_mean": float(np.mean([result.uniform_regret for result in results])),
        "seconds": sum(result.seconds for result in results),
        # JSON has no infinity; without privacy epsilon is that.
        "constants": {
            k: "infinity" if v == math.inf else v
            for k, v in results[-1].constants.items()
            if k != "seed"
        },
    }


def _each(case: Case, seeds: int, workers: int) -> list[AdversarialResult]:
    found = []
    with steps("seeds", seeds) as shown:
        for result in each_seed(partial(_one, case), seeds, workers):
            found.append(result)
            shown.step()
    return found


def _case(values: dict[str, Any]) -> Case:
    widths = str(values["widths"]).split("-")
    calibration = CALIBRATIONS[values["calibration"]]
    try:
        return TypeAdapter(Case).validate_python(
            {**values, "widths": widths, "calibration": calibration}
        )
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error


def _one(case: Case, seed: int) -> AdversarialResult:
    return run(**asdict(replace(case, seed=seed)))
