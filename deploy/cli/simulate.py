"""``riffle simulate``: any learner without a network, at any population size.

The work is in `simulation`, which imports the learners: help must not wait for this import.
"""

import typer

from riffle.deploy.cli.options import RunOptions, SimulationOptions, expand_options, is_given
from riffle.deploy.output import Output, emit, one_line_errors, table


@one_line_errors
@expand_options(without=["batch_seconds", "episode_seconds", "reissues"])
def simulate_command(
    context: typer.Context, options: RunOptions, how: SimulationOptions, output: Output = "text"
) -> None:
    """Simulate a run over several seeds and report exact regret.

    The mean has a 95 % confidence interval.
    """
    from riffle.deploy.cli.simulation import rows_of, simulate  # noqa: PLC0415

    document = simulate(options, how, preset_given=is_given(context, "preset"))
    emit(document, output, lambda: table(("quantity", "value"), rows_of(document)))
