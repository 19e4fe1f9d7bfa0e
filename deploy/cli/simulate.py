"""``riffle simulate``: any learner without a network, at any population size."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from coordinator.registry import Registry
from coordinator.specs import RunSpec
from deploy.cli import specs
from deploy.cli.output import Format, emit, one_line_errors, progress, table
from experiments.per_episode import PER_EPISODE
from experiments.study import CALIBRATIONS, SeedResult, Study, study
from node_client.environments.registry import Parameter

Calibration = Literal["tight", "paper"]
SPEC_NAMES = {name: spec_name for spec_name, name in CALIBRATIONS.items()}


class Learner(StrEnum):
    """What can be simulated: batched learners, and those that plan in every episode."""

    sdp_pe = "sdp-pe"
    sdp_pe_conference = "sdp-pe-conference"
    pe = "pe"
    ucbvi = "ucbvi"
    ucbvi_jdp = "ucbvi-jdp"
    ucbvi_ldp = "ucbvi-ldp"


@one_line_errors
def simulate_command(
    preset: specs.PresetName = "demo",
    learner: Annotated[Learner, typer.Option(help="who learns")] = Learner.sdp_pe,
    calibration: Annotated[
        Calibration | None, typer.Option(help="noise: the least that is proved, or the papers'")
    ] = None,
    env: specs.Environment = None,
    param: specs.Param = None,
    horizon: specs.Horizon = None,
    episodes: specs.Episodes = None,
    epsilon: specs.Epsilon = None,
    beta: specs.Beta = None,
    families: specs.FamiliesOption = None,
    constants: specs.Constants = None,
    option: specs.Option = None,
    seeds: Annotated[int, typer.Option(min=1, help="independent runs")] = 10,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    output: Annotated[Format, typer.Option("--format", help="text or json")] = Format.text,
) -> None:
    """Simulate a run over several seeds and report exact regret with its confidence band."""
    chosen = specs.resolve(
        preset,
        env,
        param,
        horizon,
        option,
        learner=learner.value,
        calibration=None if calibration is None else SPEC_NAMES[calibration],
        episodes=episodes,
        epsilon=epsilon,
        beta=beta,
        families=families,
        preset=constants,
    )
    spec = chosen.spec
    if learner in PER_EPISODE:
        spec = _every_episode(spec, families, option)
    else:
        Registry().build(spec)  # refuses a wrong option before any work is done
    document = _study(spec, chosen.environment, seeds, workers).document()
    emit(document, output, lambda: table(("quantity", "value"), _rows(document)))


def _every_episode(spec: RunSpec, families: str | None, option: list[str] | None) -> RunSpec:
    """A preset's options are SDP-PE's; these learners take only what was asked for."""
    if families is not None:
        raise ValueError(f"--families is not for {spec.learner}: --calibration decides it")
    return spec.model_copy(update={"options": specs.pairs(option)})


def _study(spec: RunSpec, environment: dict[str, Parameter], seeds: int, workers: int) -> Study:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress) as bar:
        task = bar.add_task("seeds", total=seeds)

        def on_result(result: SeedResult) -> None:
            bar.update(task, advance=1, description=f"seed {result.seed + 1}/{seeds}")

        return study(spec, environment, seeds, workers=workers, on_result=on_result)


def _rows(document: dict[str, Any]) -> list[tuple[str, object]]:
    """The document as a table's rows, constants last and by their names."""
    constants: dict[str, object] = document["constants"]
    found = [(key, value) for key, value in document.items() if key != "constants"]
    return found + [(f"constants.{key}", value) for key, value in constants.items()]
