"""``riffle figures``: the papers' figures. ``riffle audit``: attacks that bound privacy loss."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from riffle.common.mechanism.counters import Families
from riffle.common.mechanism.parameters import Aggregation
from riffle.deploy.network.processes import lock_folder
from riffle.deploy.output import (
    Exit,
    Output,
    dotted_rows,
    emit,
    line,
    one_line_errors,
    progress,
    steps,
    table,
)
from riffle.experiments.audit.run import TRIALS, Effort, Encoding, run
from riffle.experiments.audit.world import Setting
from riffle.experiments.figures.catalogue import figures
from riffle.experiments.figures.write import ALL, Order, make, select_figures
from riffle.experiments.sweep import Backend

SEEDS, QUICK_SEEDS = 20, 2
FILES = {"picture": "png", "table": "md"}


@one_line_errors
def figures_command(
    name: Annotated[str, typer.Argument(help=f"{', '.join(figures(quick=False))}; or {ALL}")],
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
        str | None, typer.Option(help="Dask scheduler, such as tcp://127.0.0.1:8786")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a tenth of K and 2 seeds, to try it out")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="compute again and overwrite")] = False,
    output: Output = "text",
) -> None:
    """Compute figures of the papers.

    Each figure has CSV, PNG, SVG, a table and a manifest. Finished figures are not overwritten;
    after an interruption the command resumes where it stopped.
    """
    started = time.perf_counter()
    place = Backend(backend, workers or os.cpu_count() or 1, address)
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    order = Order(select_figures(name, quick=quick), count, out, place, force)
    with lock_folder(out), steps("runs") as shown:

        def begin(total: int) -> None:
            shown.set_total(total)
            line(f"runs to compute: {total}")

        made = make(order, lambda _: shown.step(), begin)
    # A figure's table lists missing results and the reasons.
    written = [
        figure | {kind: str(out / f"{figure['figure']}.{ending}") for kind, ending in FILES.items()}
        for figure in made
    ]
    document = {
        "out": str(out),
        "seeds": count,
        "seconds": time.perf_counter() - started,
        "figures": written,
    }
    columns = ("figure", "curves", "picture", "not computed")
    rows = [(f["figure"], len(f["curves"]), f["picture"], _missing(f)) for f in written]
    emit(document, output, lambda: table(columns, rows, f"written to {out}"))


def _missing(figure: dict[str, Any]) -> str:
    labels = [curve["label"] for curve in figure["curves"] if curve["missing"]]
    return f"{'; '.join(labels)}: why is in {figure['table']}" if labels else "-"


@one_line_errors
def audit_command(
    epsilon: Annotated[float, typer.Option(help="claimed epsilon")] = 1.0,
    beta: Annotated[float, typer.Option(help="probability that privacy fails")] = 1e-2,
    trials: Annotated[
        int | None, typer.Option(help="fresh batches a population; half as many choose thresholds")
    ] = None,
    encoding: Annotated[
        Encoding, typer.Option(help="Riffle's encoding, or one of two that do not protect")
    ] = "riffle",
    aggregation: Annotated[Aggregation, typer.Option(help="how counts are sent")] = "messages",
    families: Annotated[Families, typer.Option(help="what is counted")] = "joint",
    sealed: Annotated[int, typer.Option(help="batches a population with real seals")] = 250,
    users: Annotated[int, typer.Option(help="users whose traffic is watched")] = 600,
    seed: Annotated[
        int | None, typer.Option(help="seed of repeatable noise, which protects nobody")
    ] = None,
    output: Output = "text",
) -> None:
    """Attack the real code to bound epsilon and beta from below.

    The code runs on two neighbouring populations. Bounds hold with 99 % confidence. Exit code 1 if
    the claim is violated.
    """
    claim = Setting(epsilon=epsilon, beta=beta, families=families, seed=seed)
    setting = replace(claim, aggregation=aggregation)
    effort = Effort(TRIALS[encoding] if trials is None else trials, sealed, users)
    progress.print(f"attacking {encoding}, {effort.trials} batches a side")
    with steps("batches", effort.batches(encoding)) as shown:
        document = run(encoding, setting, effort, shown.step)
    emit(document, output, lambda: table(("quantity", "value"), list(dotted_rows(document))))
    raise typer.Exit(Exit.NO if document["violated"] else Exit.DONE)
