"""``riffle simulate``: the same learner without a network, at any population size."""

from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from coordinator.registry import Registry
from deploy.cli import specs
from deploy.cli.output import Format, emit, one_line_errors, progress, table
from experiments.study import SeedResult, study


@one_line_errors
def simulate_command(
    preset: specs.PresetName = "demo",
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
        episodes=episodes,
        epsilon=epsilon,
        beta=beta,
        families=families,
        preset=constants,
    )
    Registry().build(chosen.spec)  # refuses a wrong option before any work is done
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress) as bar:
        task = bar.add_task("seeds", total=seeds)

        def on_result(result: SeedResult) -> None:
            bar.update(task, advance=1, description=f"seed {result.seed + 1}/{seeds}")

        found = study(chosen.spec, chosen.environment, seeds, workers=workers, on_result=on_result)
    document = found.document()
    rows = list(document.items())
    emit(document, output, lambda: table(("quantity", "value"), rows))
