"""A load test from its parameters to its summary: network, nodes, processes, measurements."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from riffle.common.mechanism.parameters import Aggregation
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.specs import RunSpec
from riffle.deploy.follow import stop_unfinished
from riffle.deploy.load.feed import Feeder, enrol_nodes, manual_spec, revoke_nodes
from riffle.deploy.load.generator import Arrivals, Assignment, Generator, Sample, schedule
from riffle.deploy.load.summary import (
    MOST_STEPS,
    capacity,
    next_rate,
    rates,
    step_row,
    step_text,
    summarize,
)
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork, shuffler_metric
from riffle.deploy.network.processes import record_signals
from riffle.deploy.network.secrets import SHUFFLER_ID
from riffle.deploy.operator import Operator
from riffle.deploy.output import bar, line, progress
from riffle.experiments.presets import preset, with_aggregation
from riffle.node_client.settings import Credential, Settings

LEAST_BATCH, MOST_BATCH, BATCHES = 300, 10_000, 4
BATCH = f"reports a batch; default: a quarter of all, {LEAST_BATCH} to {MOST_BATCH:,}"
MOST_REPORTS = 10_000_000
SETTLE_SECONDS = 60.0
ANSWERING_SECONDS = "riffle_request_seconds_sum"
ROUTES = ("/v1/batches/{batch_id}/leases", "/v1/batches/{batch_id}/reports")


def cores(text: str | None) -> frozenset[int]:
    """Returns the processors in a list such as 0,1; for None the empty set, which means all.

    Raises ValueError for any other text, or if this process may not use a listed processor.
    """
    if text is None:
        return frozenset()
    allowed = os.sched_getaffinity(0)
    try:
        listed = frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"processors are a list such as 0,1, not {text!r}") from None
    if not listed <= allowed:
        raise ValueError(f"processors {text!r}: this machine has {sorted(allowed)}")
    return listed


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Parameters of a load test, which are options of ``riffle load``.

    Raises ValueError for more processes than nodes, too many reports, or forbidden processors.
    """

    folder: Annotated[Path, typer.Option("--out", help="folder for the results")]
    nodes: Annotated[int, typer.Option(min=1, max=20_000, help="nodes, each with a credential")]
    rate: Annotated[float, typer.Option(min=0.01, help="reports a second, of all nodes together")]
    seconds: Annotated[float, typer.Option("--duration", min=1, max=86_400, help="seconds")]
    processes: Annotated[int, typer.Option(min=1, max=256, help="processes of the generator")] = 1
    arrivals: Annotated[Arrivals, typer.Option(help="when reports are due")] = "poisson"
    batch: Annotated[int | None, typer.Option(min=2, help=BATCH)] = None
    workers: Annotated[int, typer.Option(min=1, help="processes that open messages")] = 2
    generator_cores: Annotated[
        str | None, typer.Option(help="processors for the generator, such as 0,1; default: all")
    ] = None
    service_cores: Annotated[
        str | None, typer.Option(help="processors for a new network; default: all")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="seed of the arrivals")] = 0
    aggregation: Annotated[Aggregation, typer.Option(help="how counts are sent")] = "messages"

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= self.nodes:
            raise ValueError(f"{self.nodes} nodes cannot be shared by {self.processes} processes")
        if self.rate * self.seconds > MOST_REPORTS:
            raise ValueError(f"more than {MOST_REPORTS} reports; lower --rate or --duration")
        for text in (self.generator_cores, self.service_cores):
            cores(text)

    def summary(self) -> dict[str, Any]:
        """Returns the parameters in the form of summary.json."""
        names = ("nodes", "rate", "seconds", "processes", "arrivals", "seed", "aggregation")
        return {name: getattr(self, name) for name in names} | {
            "reports_a_batch": self.reports_a_batch,
            "openers": self.workers,
            "generator_cores": sorted(cores(self.generator_cores) or os.sched_getaffinity(0)),
            "service_cores": sorted(cores(self.service_cores) or os.sched_getaffinity(0)),
        }

    @property
    def reports_a_batch(self) -> int:
        """The number n of reports of every batch."""
        quarter = int(self.rate * self.seconds / BATCHES)
        return self.batch or max(LEAST_BATCH, min(MOST_BATCH, quarter))


@dataclass(frozen=True, slots=True)
class Target:
    """A network under load; ``pids`` are its services' processes if they run here."""

    secrets: Path
    shuffler_url: str
    coordinator_url: str
    pids: dict[str, int] = field(default_factory=dict)

    def answering_seconds(self) -> float:
        """Returns how long the shuffler has worked on lease requests and uploads, since its start.

        Returns NaN if the shuffler's metrics cannot be read.
        """
        try:
            return shuffler_metric(self.secrets, self.shuffler_url, ANSWERING_SECONDS, ROUTES)
        except (LocalError, httpx.HTTPError):
            return math.nan

    def operator(self) -> Operator:
        """Opens the operator's client."""
        return Operator.of(self.secrets, self.coordinator_url)


@contextmanager
def loopback_target(config: LoadConfig, lock: int) -> Iterator[Target]:
    """Starts a loopback network without nodes, on the processors that its services may use.

    Stops runs that an earlier, killed load test left in the folder. ``lock`` is the folder's lock.
    """
    chosen = with_aggregation(preset("riverswim"), config.aggregation)
    loopback = LoopbackConfig.of(chosen, config.folder, 0, config.workers)
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores(config.service_cores) or mine)  # child processes inherit this
    with ExitStack() as stack:
        try:
            network = stack.enter_context(LoopbackNetwork(loopback, lock))
        finally:
            os.sched_setaffinity(0, mine)
        pids = {role: process.pid for role, process in network.processes.items()}
        target = Target(network.secrets, network.shuffler_url, network.coordinator_url, pids)
        with target.operator() as operator:
            stop_unfinished(operator)
        yield target
        network.check_alive()


class LiveScreen:
    """The newest sample as a table, above a progress bar of the current phase."""

    def __init__(self) -> None:
        self._bar = bar("")
        self._table: Table | str = ""
        self._task = self._bar.add_task("", total=None)

    def phase(self, text: str, total: float | None) -> None:
        """Begins a progress bar, with ``total`` steps if the number is known."""
        line(text)
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=total)

    def advance(self) -> None:
        """Advances the progress bar by a step."""
        self._bar.advance(self._task)

    def show(self, now: Sample, before: Sample) -> None:
        """Replaces the table by the rates since the previous sample."""
        row, names = rates(now, before), ("started", "accepted", "rejected", "messages")
        cells = [f"{now.at:.0f} s", *(f"{row[f'{name}_a_second']:.1f}" for name in names)]
        p99 = f"{now.tally.due.quantile(0.99) * 1e3:.0f}"
        self._table = Table("at", *(f"{name}/s" for name in names), "p99 ms", "open")
        self._table.add_row(*cells, p99, str(now.tally.open))
        self._bar.update(self._task, completed=now.at)

    def picture(self) -> Group:
        """Returns the current content of the terminal."""
        return Group(self._table, self._bar.get_renderable())


def run(config: LoadConfig, target: Target) -> dict[str, Any]:
    """Loads the target, with a live table on a terminal, and returns the summary.

    An interrupt ends the load early. Raises LocalError if the target does not answer or a process
    of the generator does not start, and RemoteError if the target refuses the operator.
    """
    with _enrolled(config, target) as (credentials, screen):
        return _load(config, target, credentials, screen)


def find_capacity(config: LoadConfig, target: Target) -> dict[str, Any]:
    """Loads the target at one rate after another, and returns the summary that `capacity` makes.

    All batches have the size chosen for the first rate. Raises the errors of `run`.
    """
    config = replace(config, batch=config.reports_a_batch)  # n decides how large a report is
    steps, tried = list[dict[str, Any]](), list[tuple[float, bool]]()
    with _enrolled(config, target) as (credentials, screen):
        while (rate := next_rate(tried, config.rate)) and rate * config.seconds <= MOST_REPORTS:
            line(f"load {len(steps) + 1}, of at most {MOST_STEPS}: {rate:.3g} reports a second")
            step = _load(replace(config, rate=rate), target, credentials, screen)
            steps.append(step)
            if step["interrupted"]:
                break
            tried.append((rate, step["verdict"]["limit"] == "none"))
            line(step_text(step_row(step)))
    return capacity(steps)


@contextmanager
def _enrolled(config: LoadConfig, target: Target) -> Iterator[tuple[list[Credential], LiveScreen]]:
    """Enrols the generator's nodes, shows the live screen, and revokes the nodes afterwards."""
    screen = LiveScreen()
    live = Live(
        get_renderable=screen.picture, console=progress, refresh_per_second=2, transient=True
    )
    with live, ExitStack() as stack:
        screen.phase(f"enrolling {config.nodes} nodes", config.nodes)
        credentials = enrol_nodes(target.secrets, target.shuffler_url, config.nodes, screen.advance)
        if not target.pids:  # a loopback target ends with the load
            stack.callback(revoke_nodes, target.secrets, target.shuffler_url, credentials)
        yield credentials, screen


def _load(
    config: LoadConfig, target: Target, credentials: list[Credential], screen: LiveScreen
) -> dict[str, Any]:
    spec = manual_spec(with_aggregation(preset("riverswim"), config.aggregation).spec)
    with ExitStack() as stack:
        feeder = stack.enter_context(Feeder(target.operator, spec, config.reports_a_batch))
        generator = stack.enter_context(Generator(assign(config, target, spec, credentials)))
        screen.phase(f"loading for {config.seconds:g} s", config.seconds)
        before = target.answering_seconds()
        samples, interrupted = generator.watch(config.seconds, target.pids, screen.show)
        answered = target.answering_seconds() - before
        ended = feeder.batches()
        screen.phase(f"settling, at most {SETTLE_SECONDS:g} s", None)
        with record_signals() as signals:
            feeder.settle(SETTLE_SECONDS, signals)
            batches = feeder.batches()
    count = len(generator.processes)
    summary = summarize(config.summary(), samples, batches, count, answered, ended)
    return summary | {"interrupted": interrupted or bool(signals), "trouble": feeder.trouble}


def assign(
    config: LoadConfig, target: Target, spec: RunSpec, credentials: list[Credential]
) -> list[Assignment]:
    """Gives each of P processes every P-th node and every P-th arrival."""
    files = target.secrets / "nodes"
    settings = Settings(
        shuffler_url=target.shuffler_url,
        shuffler_id=SHUFFLER_ID,
        shuffler_key_file=files / "shuffler_key",
        coordinator_key_file=files / "coordinator_key",
        analyzer_keys_file=files / "analyzer_keys",
        ca_file=files / "ca.pem",
        credentials_file=files / "credentials.json",  # never read, since credentials are given
        state_dir=config.folder,  # never written, since users are invented and forgotten
        simulated_users=True,
        environment=spec.environment,
        environment_parameters=preset("riverswim").environment,
        max_epsilon=spec.epsilon,
        max_beta=spec.beta,
        min_dishonest_fraction=spec.dishonest_fraction,
        aggregations=(spec.aggregation,),
    )
    rng = np.random.default_rng(config.seed)
    times = schedule(config.arrivals, config.rate, config.seconds, rng)
    own = cores(config.generator_cores) or frozenset(os.sched_getaffinity(0))
    step = config.processes
    return [Assignment(settings, credentials[i::step], times[i::step], own) for i in range(step)]
