"""``riffle simulate``: any learner without a network, at any population size.

The work is in `simulation`, which imports the learners. Help must not wait for this import.
"""

from pathlib import Path
from typing import Annotated

import typer

from riffle.deploy.cli.options import RunOptions, SimulationOptions, expand_options, is_given
from riffle.deploy.output import Output, emit, line, one_line_errors, table


@one_line_errors
@expand_options(without=["batch_seconds", "episode_seconds", "reissues"])
def simulate_command(
    context: typer.Context,
    options: RunOptions,
    how: SimulationOptions,
    out: Annotated[
        Path | None, typer.Option(help="folder for summary.json, seeds.csv and curves.csv")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="print every constant, and the policy of seed 0")
    ] = False,
    output: Output = "text",
) -> None:
    """Simulate a run over several seeds and report exact regret.

    The last line is the mean regret and its 95 % confidence interval.
    """
    from riffle.deploy.cli.simulation import policy_rows, rows_of, simulate  # noqa: PLC0415

    result, document = simulate(options, how, preset_given=is_given(context, "preset"))
    if out is not None:
        line(f"written to {result.save(out)}")

    def show() -> None:
        if verbose and result.results[0].policy:
            table(*policy_rows(result), "policy of seed 0")
        table(("quantity", "value"), rows_of(document, verbose=verbose))

    emit(document, output, show)
