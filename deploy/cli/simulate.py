"""``riffle simulate``: any learner without a network, at any population size."""

from typing import Annotated, Any, Literal

import typer

from common.plugins import nearest
from coordinator.registry import Registry
from coordinator.specs import MANUAL
from deploy.cli import adversarial, specs
from deploy.cli.output import Format, Output, emit, one_line_errors, steps, table
from deploy.presets import Preset
from experiments.per_episode import PER_EPISODE
from experiments.study import CALIBRATIONS, Study, study

Calibration = Literal["tight", "paper"]
OF_004 = (None, adversarial.ENVIRONMENT)
SPEC_NAMES = {name: spec_name for spec_name, name in CALIBRATIONS.items()}


@one_line_errors
def simulate_command(
    context: typer.Context,
    preset: specs.PresetName = "demo",
    learner: specs.Learner = "sdp-pe",
    calibration: Annotated[
        Calibration | None, typer.Option(help="noise: the least that is proved, or the papers'")
    ] = None,
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
    seeds: Annotated[int, typer.Option(min=1, help="independent runs")] = 10,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    output: Output = Format.text,
) -> None:
    """Simulate a run over several seeds and report exact regret with its confidence band."""
    if learner in adversarial.ALGORITHMS:
        others = any(v is not None for v in (trust, families, constants, horizon))
        if others or env not in OF_004 or specs.said(context, "preset"):
            raise ValueError(adversarial.ADVICE.format(learner))
        changes = {"K": episodes, "epsilon": epsilon, "beta": beta, "calibration": calibration}
        given = {key: value for key, value in changes.items() if value is not None}
        options = specs.pairs(param) | specs.pairs(option)
        _show(adversarial.document({**given, "name": learner}, options, seeds, workers), output)
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
    )
    if learner in PER_EPISODE:
        if families is not None:
            raise ValueError(f"--families is not for {learner}: --calibration decides it")
        if trust is not None:
            raise ValueError(f"--trust is not for {learner}: its name says whom it trusts")
    else:
        _refuse_early(chosen)
    _show(_study(chosen, seeds, workers).document(), output)


def _refuse_early(chosen: Preset) -> None:
    """Refuse an unknown learner or a wrong option before any work is done."""
    registry, name = Registry(files=chosen.learners), chosen.spec.learner
    known = sorted({*registry.names, *PER_EPISODE, *adversarial.ALGORITHMS} - {MANUAL})
    if name not in known:
        hint = nearest(name, known) or ";"
        raise ValueError(f"there is no learner {name!r} here{hint} known are {', '.join(known)}")
    registry.build(chosen.spec)


def _study(chosen: Preset, seeds: int, workers: int) -> Study:
    with steps("seeds", seeds) as shown:
        return study(
            chosen.spec,
            chosen.environment,
            seeds,
            workers=workers,
            on_result=lambda _: shown.step(),
            learners=chosen.learners,
        )


def _show(document: dict[str, Any], output: Format) -> None:
    emit(document, output, lambda: table(("quantity", "value"), _rows(document)))


def _rows(document: dict[str, Any]) -> list[tuple[str, object]]:
    """The document as a table's rows, constants last and by their names."""
    constants: dict[str, object] = document["constants"]
    found = [(key, value) for key, value in document.items() if key != "constants"]
    return found + [(f"constants.{key}", value) for key, value in constants.items()]
