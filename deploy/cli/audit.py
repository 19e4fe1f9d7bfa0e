"""``riffle audit``: attack the privacy mechanism and say what was found."""

from typing import Annotated

import typer

from riffle.common.counters import Families
from riffle.deploy.cli.output import (
    Exit,
    Format,
    Output,
    emit,
    one_line_errors,
    progress,
    spread,
    steps,
    table,
)
from riffle.experiments.audit.report import TRIALS, Effort, Encoding, run
from riffle.experiments.audit.world import Setting


@one_line_errors
def audit_command(
    epsilon: Annotated[float, typer.Option(help="what is claimed")] = 1.0,
    beta: Annotated[float, typer.Option(help="probability that privacy fails")] = 1e-2,
    trials: Annotated[
        int | None, typer.Option(help="fresh batches a side; half as many choose thresholds")
    ] = None,
    encoding: Annotated[
        Encoding, typer.Option(help="Riffle's, or one of two that do not protect")
    ] = "riffle",
    families: Annotated[Families, typer.Option(help="what is counted")] = "joint",
    sealed: Annotated[int, typer.Option(help="batches a side with real seals; 0: none")] = 250,
    users: Annotated[int, typer.Option(help="users whose traffic is watched; 0: none")] = 600,
    seed: Annotated[
        int | None, typer.Option(help="repeat an audit: noise then protects nobody")
    ] = None,
    output: Output = Format.text,
) -> None:
    """Run the real code on two neighbouring populations and bound epsilon and beta from below.

    Bounds hold with 99 % confidence. Exit code 1 when the claim is violated.
    """
    setting = Setting(epsilon=epsilon, beta=beta, families=families, seed=seed)
    effort = Effort(TRIALS[encoding] if trials is None else trials, sealed, users)
    progress.print(f"attacking {encoding}, {effort.trials} batches a side")
    with steps("batches", effort.batches(encoding)) as shown:
        document = run(encoding, setting, effort, shown.step)
    emit(document, output, lambda: table(("quantity", "value"), list(spread(document))))
    raise typer.Exit(Exit.NO if document["violated"] else Exit.DONE)
