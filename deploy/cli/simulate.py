"""``riffle simulate``: any learner without a network, at any population size."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import typer

from riffle.common.plugins import no_such
from riffle.coordinator.registry import Registry
from riffle.coordinator.specs import MANUAL
from riffle.deploy.cli import adversarial, specs
from riffle.deploy.cli.output import Format, Output, emit, one_line_errors, progress, steps, table
from riffle.deploy.presets import Preset
from riffle.experiments import per_user_study
from riffle.experiments.per_episode import PER_EPISODE
from riffle.experiments.study import CALIBRATIONS, study
from riffle.node_client.environments.environment import Modelled
from riffle.node_client.environments.registry import exact_mdp, make

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
OF_004 = (None, adversarial.ENVIRONMENT)
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
    if learner in adversarial.ALGORITHMS:
        preset_said = specs.said(context, "preset")
        _refuse_of_004(learner, env, (trust, families, constants, horizon), preset_said=preset_said)
        changes = {"K": episodes, "epsilon": epsilon, "beta": beta, "calibration": calibration}
        options = specs.pairs(param) | specs.pairs(option)
        found = adversarial.document({**changes, "name": learner}, options, seeds, workers)
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
    if per_user and learner in {*PER_EPISODE, *adversarial.ALGORITHMS}:
        raise ValueError(f"--per-user is not for {learner}, which has no batches")
    alone = [name for name, value in given.items() if value is not None and not per_user]
    if alone:
        raise ValueError(f"--{alone[0]} is for --per-user")


def _refuse_of_004(
    learner: str, env: str | None, others: Iterable[object], *, preset_said: bool
) -> None:
    """Refuse what is not for the algorithms of 004; ``others`` are such options, None if unsaid."""
    if preset_said or env not in OF_004 or any(value is not None for value in others):
        raise ValueError(adversarial.ADVICE.format(learner))


def _refuse_per_episode(learner: str, families: object, trust: object) -> None:
    """Refuse what a learner without batches decides otherwise."""
    if families is not None:
        raise ValueError(f"--families is not for {learner}: --calibration decides it")
    if trust is not None:
        raise ValueError(f"--trust is not for {learner}: its name says whom it trusts")


def _refuse_early(chosen: Preset) -> None:
    """Refuse an unknown learner or a wrong option before any work is done."""
    registry, name = Registry(files=chosen.learners), chosen.spec.learner
    known = sorted({*registry.names, *PER_EPISODE, *adversarial.ALGORITHMS} - {MANUAL})
    if name not in known:
        raise ValueError(no_such("simulated learner", name, known))
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
