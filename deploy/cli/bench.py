"""``riffle bench``: measurements of Riffle's own speed, each beside what bounds it."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from riffle.deploy.cli.output import (
    Exit,
    Format,
    Output,
    emit,
    one_line_errors,
    progress,
    spread,
    table,
)
from riffle.deploy.presets import preset
from riffle.deploy.wire import bench, disturbed, missed

bench_app = typer.Typer(help="Measure Riffle's own speed.", no_args_is_help=True)


@bench_app.callback()
def bench_group() -> None:
    """Measure Riffle's own speed."""


@bench_app.command("wire")
@one_line_errors
def wire_command(
    messages: Annotated[
        int,
        typer.Option(
            min=10_000, max=5_000_000, help="of the batch, n L, at least; 96,600 are the fewest"
        ),
    ] = 100_000,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes for cryptography; default: one a core")
    ] = None,
    output: Output = Format.text,
) -> None:
    """Messages a second through live services, beside the primitive's own rate on the same cores.

    Exit code 1 when the share of the primitive's rate, or the servers' cost, misses its bar.
    """
    cores = workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="riffle-wire-") as folder:
        document = bench(messages, Path(folder), cores, preset("paper"))
    emit(document, output, lambda: table(("quantity", "value"), list(spread(document))))
    for bar in missed(document):
        progress.print(f"missed: {bar}", highlight=False)
    if why := disturbed(document):
        progress.print(why, highlight=False)
    raise typer.Exit(Exit.NO if missed(document) else Exit.DONE)
