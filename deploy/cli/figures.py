"""``riffle figures``: the papers' figures, computed anew."""

import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.cli.output import Format, emit, one_line_errors, progress, table
from experiments.figures.make import Order, chosen, make
from experiments.figures.sweep import Backend

SEEDS, QUICK_SEEDS = 20, 2


@one_line_errors
def figures_command(
    name: Annotated[str, typer.Argument(help="a figure, as fig6a, or all")],
    out: Annotated[Path, typer.Option(help="folder for results")] = Path("runs/figures"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="independent runs of a curve; default 20, quick 2")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes; default: number of processors")
    ] = None,
    backend: Annotated[
        Literal["loky", "dask"], typer.Option(help="this machine's cores, or a Dask cluster")
    ] = "loky",
    address: Annotated[
        str | None, typer.Option(help="Dask scheduler, as tcp://127.0.0.1:8786")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a tenth of K: does it work?")] = False,
    force: Annotated[bool, typer.Option("--force", help="compute again, write over")] = False,
    output: Annotated[Format, typer.Option("--format", help="text or json")] = Format.text,
) -> None:
    """Compute figures of the papers: CSV, PNG, SVG, a table and a manifest for each.

    Finished figures are not written over; an interrupted run goes on where it stopped.
    """
    started = time.perf_counter()
    place = Backend(backend, workers or os.cpu_count() or 1, address)
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    made = _make(Order(chosen(name, quick=quick), count, out, place, force))
    document = {
        "out": str(out),
        "seeds": count,
        "seconds": time.perf_counter() - started,
        "figures": made,
    }
    emit(document, output, lambda: table(("figure", "curves", "not computed"), _rows(made)))


def _make(order: Order) -> list[dict[str, Any]]:
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress) as bar:
        task = bar.add_task("runs", total=None)
        return make(order, lambda _: bar.advance(task), lambda total: bar.update(task, total=total))


def _rows(made: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return [
        (
            figure["figure"],
            len(figure["curves"]),
            "; ".join(c["label"] for c in figure["curves"] if c["missing"]) or "-",
        )
        for figure in made
    ]
