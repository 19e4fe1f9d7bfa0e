"""``riffle load``: how much a network carries, and what breaks first.

``riffle bench``: measurements of Riffle's own speed, each beside what bounds it.
"""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import TaskID
from rich.table import Table

from riffle.deploy.cli.options import Force, Out, is_given
from riffle.deploy.cli.runs import results
from riffle.deploy.load.benchmark import bench, disturbed, missed
from riffle.deploy.load.generator import Arrivals, Sample
from riffle.deploy.load.page import write_report
from riffle.deploy.load.run import LEAST_BATCH, MOST_BATCH, LoadConfig, Target, own_network, run
from riffle.deploy.network.processes import interrupt_on_termination
from riffle.deploy.output import (
    Exit,
    Format,
    Output,
    bar,
    emit,
    fail,
    line,
    one_line_errors,
    progress,
    spread,
    table,
)
from riffle.deploy.presets import preset

BATCH = f"reports a batch; default: a quarter of all, {LEAST_BATCH} to {MOST_BATCH:,}"
FOR_ANOTHER = ("shuffler_url", "coordinator_url"), "is of a network that is up: say --network, too"
FOR_OWN = (
    ("workers", "service_cores"),
    "is for a network of the load's own, not for that of --network",
)


@one_line_errors
def load_command(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, max=20_000, help="nodes, with a credential each")],
    rate: Annotated[float, typer.Option(min=0.01, help="reports a second, of all nodes together")],
    duration: Annotated[float, typer.Option(min=1, max=86_400, help="seconds")],
    processes: Annotated[int, typer.Option(min=1, max=256, help="of the generator")] = 1,
    arrivals: Annotated[Arrivals, typer.Option(help="when reports are due")] = "poisson",
    batch: Annotated[
        int | None,
        typer.Option(min=2, help=BATCH),
    ] = None,
    presealed: Annotated[
        bool, typer.Option("--presealed", help="seal few reports and send them again and again")
    ] = False,
    network: Annotated[
        Path | None, typer.Option(help="secrets of a network that is up; default: an own one")
    ] = None,
    shuffler_url: Annotated[str, typer.Option(help="of that network")] = "http://127.0.0.1:8401",
    coordinator_url: Annotated[str, typer.Option(help="of that network")] = (
        "http://127.0.0.1:8400"
    ),
    workers: Annotated[int, typer.Option(min=1, help="opening processes of an own network")] = 2,
    generator_cores: Annotated[
        str | None, typer.Option(help="processors for the generator, as 0,1; default: all")
    ] = None,
    service_cores: Annotated[
        str | None, typer.Option(help="processors for an own network; default: all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the arrivals")] = 0,
    out: Out = Path("runs/load"),
    force: Force = False,
    output: Output = Format.text,
) -> None:
    """Load a network with real nodes, and name what limits it.

    Exit code 1 when something limits it: too few of the due reports were accepted promptly.
    """
    _refuse_unused(context, own=network is None)
    config = LoadConfig(
        folder=out,
        nodes=nodes,
        rate=rate,
        seconds=duration,
        processes=processes,
        arrivals=arrivals,
        batch=batch,
        presealed=presealed,
        workers=workers,
        generator_cores=cores(generator_cores),
        service_cores=cores(service_cores),
        seed=seed,
    )
    loaded = None if network is None else Target(network, shuffler_url, coordinator_url)
    with interrupt_on_termination(), results(out, force=force) as lock:
        progress.print(f"{nodes} nodes, {rate:g} reports a second for {duration:g} s")
        found = measured(config, loaded, lock)
        write_report(out, found)
    emit(found, output, lambda: table(("quantity", "value"), rows(found), f"written to {out}"))
    raise typer.Exit(exit_code(found))


def _refuse_unused(context: typer.Context, *, own: bool) -> None:
    """Options that nothing would come of, as they are for the other kind of network."""
    names, why = FOR_ANOTHER if own else FOR_OWN
    for name in names:
        if is_given(context, name):
            fail(f"--{name.replace('_', '-')} {why}", Exit.USAGE)


def measured(config: LoadConfig, target: Target | None, lock: int) -> dict[str, Any]:
    """Load the target, or a network of its own, with a live table; the report's document.

    ``lock`` is that of the results' folder.
    """
    with ExitStack() as stack:
        target = target or stack.enter_context(own_network(config, lock))
        screen = LiveScreen()
        stack.enter_context(
            Live(
                get_renderable=screen.picture,
                console=progress,
                refresh_per_second=2,
                transient=True,
            )
        )
        return run(config, target, screen)


class LiveScreen:
    """The newest sample as a table, above a bar of what is under way."""

    def __init__(self) -> None:
        self._bar = bar("")
        self._table: Table | str = ""
        self._task: TaskID | None = None

    def phase(self, text: str, total: float | None) -> None:
        """Begin a bar."""
        line(text)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=total)

    def advance(self) -> None:
        """A step of the bar."""
        if self._task is not None:
            self._bar.advance(self._task)

    def show(self, now: Sample, before: Sample) -> None:
        """Replace the table."""
        self._table = snapshot(now, before)
        if self._task is not None:
            self._bar.update(self._task, completed=now.at)

    def picture(self) -> Group:
        """What a terminal shows now."""
        return Group(self._table, self._bar.get_renderable())


def exit_code(found: dict[str, object]) -> Exit:
    """Interrupted, carried, or not."""
    if found["interrupted"]:
        return Exit.INTERRUPTED
    verdict = found["verdict"]
    assert isinstance(verdict, dict)  # noqa: S101 -- narrows a document's part
    return Exit.DONE if verdict["limit"] == "none" else Exit.NO


def cores(text: str | None) -> frozenset[int]:
    """Processors from a list as 0,1; empty for all.

    Raises:
        ValueError: it is no such list, or one of them is not this process's to use.
    """
    if text is None:
        return frozenset()
    allowed = os.sched_getaffinity(0)
    try:
        found = frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"processors are a list as 0,1, not {text!r}") from None
    if not found <= allowed:
        raise ValueError(f"processors {text!r}: this machine has {sorted(allowed)}")
    return found


def snapshot(now: Sample, before: Sample) -> Table:
    """The live table."""
    seconds = max(now.at - before.at, 1e-9)
    grid = Table("at", "due/s", "accepted/s", "rejected/s", "messages/s", "p99 ms", "open")
    fresh = [
        (later - sooner) / seconds
        for later, sooner in (
            (now.tally.started, before.tally.started),
            (now.tally.accepted, before.tally.accepted),
            (now.tally.rejected.total(), before.tally.rejected.total()),
            (now.tally.messages, before.tally.messages),
        )
    ]
    p99 = now.tally.due.quantile(0.99) * 1e3
    cells = [f"{now.at:.0f} s", *(f"{rate:.1f}" for rate in fresh), f"{p99:.0f}"]
    grid.add_row(*cells, str(now.tally.open))
    return grid


def rows(found: dict[str, object]) -> list[tuple[str, object]]:
    """The summary as it is printed."""
    reports, verdict = found["reports"], found["verdict"]
    assert isinstance(reports, dict) and isinstance(verdict, dict)  # noqa: S101
    latencies = [
        (f"{name}_{kind}", value)
        for name in ("latency_from_due_ms", "latency_from_send_ms")
        for kind, value in reports[name].items()
    ]
    counts = [(name, reports[name]) for name in ("due", "accepted", "undecided", "messages")]
    rates = [(name, found[name]) for name in ("accepted_a_second", "messages_a_second")]
    faults = [(f"rejected {why}", n) for why, n in reports["rejected"].items()]
    faults += [(f"answer {what}", n) for what, n in reports["answers"].items()]
    said = [("interrupted", "yes")] if found["interrupted"] else []
    said += [("limit", verdict["limit"]), ("why", verdict["why"])]
    return [*counts, *rates, *faults, *latencies, *said]


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
    for limit in missed(document):
        progress.print(f"missed: {limit}", highlight=False)
    if why := disturbed(document):
        progress.print(why, highlight=False)
    raise typer.Exit(Exit.NO if missed(document) else Exit.DONE)
