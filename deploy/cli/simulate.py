"""The two algorithms of 004 in ``riffle simulate``: losses of an adversary, layered MDPs.

``riffle simulate``: any learner without a network, at any population size.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import typer
from pydantic import TypeAdapter, ValidationError

from riffle.common.process.plugins import unknown_name
from riffle.common.protocol.descriptor import first_fault
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.specs import MANUAL
from riffle.deploy.cli import options as specs
from riffle.deploy.output import Format, Output, emit, one_line_errors, progress, steps, table
from riffle.deploy.presets import Preset
from riffle.experiments import per_user as per_user_study
from riffle.experiments.adversarial import (
    ALGORITHMS,
    WIDTHS,
    AdversarialResult,
    Case,
    run,
)
from riffle.experiments.bands import METHOD
from riffle.experiments.per_episode import PER_EPISODE
from riffle.experiments.study import CALIBRATIONS, band, each_seed, study
from riffle.node_client.environments.registry import exact_mdp, make
from riffle.node_client.environments.tabular import Modelled

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
ADVERSARIAL_CALIBRATIONS = {"tight": "correct", "paper": "paper"}


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
        raise ValueError(unknown_name("parameter or option", name, SETTABLE))
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
    calibration = ADVERSARIAL_CALIBRATIONS[values["calibration"]]
    try:
        return TypeAdapter(Case).validate_python(
            {**values, "widths": widths, "calibration": calibration}
        )
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error


def _one(case: Case, seed: int) -> AdversarialResult:
    return run(**asdict(replace(case, seed=seed)))


Calibration = Literal["tight", "paper"]
CalibrationOption = Annotated[
    Calibration | None, typer.Option(help="noise: the least that is proved, or the papers'")
]
Seeds = Annotated[int, typer.Option(min=1, help="independent runs")]
Workers = Annotated[int, typer.Option(min=1, help="processes")]
PerUser = Annotated[
    bool,
    typer.Option(
        "--per-user",
        help="one user after another, as at nodes: slower; any environment that can be run",
    ),
]
RunId = Annotated[
    str | None, typer.Option(help="with --per-user: of the run over services to repeat")
]
TestSeed = Annotated[
    int | None, typer.Option(help="with --per-user: of the first seed's draws; default 0")
]
OF_004 = (None, ENVIRONMENT)
UNKNOWN = "no regret and no exact values: this environment shows no transition probabilities"
SPEC_NAMES = {name: spec_name for spec_name, name in CALIBRATIONS.items()}


@one_line_errors
def simulate_command(
    context: typer.Context,
    preset: specs.PresetName = "demo",
    learner: specs.Learner = "sdp-pe",
    calibration: CalibrationOption = None,
    env: specs.Environment = None,
    param: specs.Param = None,
    horizon: specs.Horizon = None,
    episodes: specs.Episodes = None,
    epsilon: specs.Epsilon = None,
    beta: specs.Beta = None,
    trust: specs.TrustOption = None,
    families: specs.FamiliesOption = None,
    constants: specs.Constants = None,
    option: specs.Option = None,
    seeds: Seeds = 10,
    workers: Workers = 2,
    per_user: PerUser = False,
    run_id: RunId = None,
    test_seed: TestSeed = None,
    output: Output = Format.text,
) -> None:
    """Simulate a run over several seeds and report exact regret with its confidence band."""
    _check_per_user(learner, per_user, {"run-id": run_id, "test-seed": test_seed})
    if learner in ALGORITHMS:
        preset_said = specs.said(context, "preset")
        _refuse_of_004(learner, env, (trust, families, constants, horizon), preset_said=preset_said)
        changes = {"K": episodes, "epsilon": epsilon, "beta": beta, "calibration": calibration}
        options = specs.pairs(param) | specs.pairs(option)
        found = document({**changes, "name": learner}, options, seeds, workers)
        _show(found, output)
        return
    chosen = specs.resolve(
        preset,
        env,
        param,
        horizon,
        option,
        learner=learner,
        calibration=None if calibration is None else SPEC_NAMES[calibration],
        episodes=episodes,
        epsilon=epsilon,
        beta=beta,
        trust=trust,
        families=families,
        preset=constants,
        run_id=run_id,
        test_seed=test_seed,
    )
    if learner in PER_EPISODE:
        _refuse_per_episode(learner, families, trust)
    else:
        _refuse_early(chosen)
    simulated = _users if per_user else _population
    _show(simulated(chosen, seeds, workers), output)


def _check_per_user(learner: str, per_user: bool, given: Mapping[str, object]) -> None:
    """Refuse ``--per-user`` for learners without batches, and its options without it."""
    if per_user and learner in {*PER_EPISODE, *ALGORITHMS}:
        raise ValueError(f"--per-user is not for {learner}, which has no batches")
    alone = [name for name, value in given.items() if value is not None and not per_user]
    if alone:
        raise ValueError(f"--{alone[0]} is for --per-user")


def _refuse_of_004(
    learner: str, env: str | None, others: Iterable[object], *, preset_said: bool
) -> None:
    """Refuse what is not for the algorithms of 004; ``others`` are such options, None if unsaid."""
    if preset_said or env not in OF_004 or any(value is not None for value in others):
        raise ValueError(ADVICE.format(learner))


def _refuse_per_episode(learner: str, families: object, trust: object) -> None:
    """Refuse what a learner without batches decides otherwise."""
    if families is not None:
        raise ValueError(f"--families is not for {learner}: --calibration decides it")
    if trust is not None:
        raise ValueError(f"--trust is not for {learner}: its name says whom it trusts")


def _refuse_early(chosen: Preset) -> None:
    """Refuse an unknown learner or a wrong option before any work is done."""
    registry, name = Registry(files=chosen.learners), chosen.spec.learner
    known = sorted({*registry.names, *PER_EPISODE, *ALGORITHMS} - {MANUAL})
    if name not in known:
        raise ValueError(unknown_name("simulated learner", name, known))
    registry.build(chosen.spec)


def _population(chosen: Preset, seeds: int, workers: int) -> dict[str, Any]:
    exact_mdp(make(chosen.spec.environment, **chosen.environment))  # or refuse before any work
    with steps("seeds", seeds) as shown:
        return study(
            chosen.spec,
            chosen.environment,
            seeds,
            workers=workers,
            on_result=lambda _: shown.step(),
            learners=chosen.learners,
        ).document()


def _users(chosen: Preset, seeds: int, workers: int) -> dict[str, Any]:
    spec = chosen.spec
    with steps("episodes", seeds * spec.episodes) as shown:
        done = per_user_study.study(
            spec,
            chosen.environment,
            seeds,
            workers=workers,
            on_users=shown.step,
            learners=chosen.learners,
        )
    if not isinstance(make(spec.environment, **chosen.environment), Modelled):
        progress.print(UNKNOWN, highlight=False, soft_wrap=True)
    return per_user_study.document(spec, done)


def _show(document: dict[str, Any], output: Format) -> None:
    emit(document, output, lambda: table(("quantity", "value"), _rows(document)))


def _rows(document: dict[str, Any]) -> list[tuple[str, object]]:
    """The document as a table's rows, constants last and by their names; without what is long."""
    constants: dict[str, object] = document["constants"]
    hidden = {"constants", "batches", "policy"}
    found = [(key, value) for key, value in document.items() if key not in hidden]
    return found + [(f"constants.{key}", value) for key, value in constants.items()]
