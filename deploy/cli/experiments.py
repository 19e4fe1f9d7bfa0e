"""``riffle sweep``: grids of simulations. ``riffle audit``: attacks that bound privacy loss."""

import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from riffle.common.mechanism.counters import Families
from riffle.common.mechanism.parameters import Aggregation
from riffle.deploy.cli.options import expand_options, is_given, read_pairs, whole
from riffle.deploy.network.processes import interrupt_on_termination, lock_folder
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
from riffle.experiments.figures.catalogue import Figure, figures
from riffle.experiments.figures.write import ALL, Order, make, select_figures
from riffle.experiments.research import DASHES, grid
from riffle.experiments.sweep import BETA, Backend

SEEDS, QUICK_SEEDS = 20, 2
FILES = {"picture": "png", "table": "md"}


@dataclass(frozen=True, slots=True)
class Grid:
    """The options of a sweep. Each option except ``beta`` may be given several times."""

    learner: Annotated[
        list[str] | None,
        typer.Option(help="learner, as sdp-pe,growth=2 or file.py:Class; default sdp-pe"),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "--environment",
            help="environment, as RiverSwim-v0,states=6 or file.py:make; default RiverSwim-v0",
        ),
    ] = None
    epsilon: Annotated[list[float] | None, typer.Option(help="epsilon; default 1")] = None
    episodes: Annotated[list[int] | None, whole("K; default 10,000")] = None
    trust: Annotated[
        list[str] | None,
        typer.Option(help=f"who adds the noise: {', '.join(DASHES)}; default shuffle"),
    ] = None
    beta: Annotated[float, typer.Option(help="beta of every user")] = BETA

    def figure(self) -> Figure:
        """Returns the sweep as a `Figure`. Raises the errors of `experiments.research.grid`."""
        learners = [_named(text) for text in self.learner or ["sdp-pe"]]
        worlds = [_named(text) for text in self.env or ["RiverSwim-v0"]]
        epsilons, Ks, trusts = self.epsilon or 1.0, self.episodes or 10_000, self.trust or "shuffle"
        return grid(worlds, learners, epsilons, Ks, trusts, self.beta)


def _named(text: str) -> tuple[str, dict[str, Any]]:
    name, *pairs = text.split(",")
    return name, read_pairs(pairs)


@one_line_errors
@expand_options()
def sweep_command(
    context: typer.Context,
    grid: Grid,
    name: Annotated[
        str | None,
        typer.Argument(help=f"a figure of the papers: {', '.join(figures())}; or {ALL}"),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for results")] = Path("runs/sweep"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="independent runs of a curve; default 20, quick 2")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes; default: number of processors")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(help="run on the cluster of this scheduler: tcp://127.0.0.1:8786")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="2 seeds, and for a figure a tenth of its K, to try it out"),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="compute again and overwrite")] = False,
    output: Output = "text",
) -> None:
    """Simulate a grid of learners, environments, epsilons, K and trust models.

    Give the grid by options (all but --beta can be repeated), or name a figure of the papers. The
    results are CSV, PNG, SVG, a Markdown table with bands, and a manifest. Finished results are not
    overwritten. After an interruption, the same command goes on where it stopped. The exit code is
    1 if nothing could be computed.
    """
    started = time.perf_counter()
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    given = [field.name for field in fields(Grid) if is_given(context, field.name)]
    if name is not None and given:
        raise ValueError(f"--{given[0]} is for a grid of your own; {name} has its own")
    chosen = (grid.figure(),) if name is None else select_figures(name, quick=quick)
    order = Order(chosen, range(count), out, Backend(workers or os.cpu_count() or 1, dask), force)
    with interrupt_on_termination(), lock_folder(out), steps("runs") as shown:

        def begin(total: int) -> None:
            shown.set_total(total)
            line(f"runs to compute: {total}")

        made = make(order, lambda _: shown.step(), begin)
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
    emit(document, output, lambda: _print_sweep(written, out))
    if not any(run["seeds"] for figure in made for c in figure["curves"] for run in c["runs"]):
        raise typer.Exit(Exit.NO)


def _print_sweep(written: list[dict[str, Any]], out: Path) -> None:
    """Prints the files, and why results are missing; then, for a single figure, its regrets."""
    rows = [(f["figure"], len(f["curves"]), f["picture"]) for f in written]
    table(("figure", "curves", "picture"), rows, f"written to {out}")
    for figure in written:
        gaps = {curve["label"]: curve["missing"] for curve in figure["curves"] if curve["missing"]}
        for label, reasons in gaps.items():
            where = f"all are in {figure['table']}; --force tries them again"
            typer.echo(f"not computed: {label}: {reasons[0]} ({where})")
    if len(written) == 1:
        head, *regrets = written[0]["regret_table"]
        table(["regret", *head[1:]], regrets)


@one_line_errors
def audit_command(
    epsilon: Annotated[float, typer.Option(help="claimed epsilon")] = 1.0,
    beta: Annotated[float, typer.Option(help="probability that privacy fails")] = 1e-2,
    trials: Annotated[
        int | None,
        typer.Option(help="fresh batches a population; half as many more choose thresholds"),
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

    The code runs on two neighbouring populations. The bounds hold with 99 % confidence. The exit
    code is 1 if the claim is violated.
    """
    claim = Setting(epsilon=epsilon, beta=beta, families=families, seed=seed)
    setting = replace(claim, aggregation=aggregation)
    effort = Effort(TRIALS[encoding] if trials is None else trials, sealed, users)
    progress.print(f"attacking {encoding}, {effort.trials} batches a side")
    with steps("batches", effort.batches(encoding)) as shown:
        document = run(encoding, setting, effort, shown.step)
    emit(document, output, lambda: table(("quantity", "value"), list(dotted_rows(document))))
    raise typer.Exit(Exit.NO if document["violated"] else Exit.DONE)
