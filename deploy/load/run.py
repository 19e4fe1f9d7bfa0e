"""A load test from its parameters to its document: network, nodes, processes, measurements."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from riffle.coordinator.specs import RunSpec
from riffle.deploy.follow import stop_unfinished
from riffle.deploy.load.document import document
from riffle.deploy.load.feed import Feeder, enrol_nodes, load_spec, revoke_nodes
from riffle.deploy.load.generator import Arrivals, Crew, Sample, Share, schedule
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.processes import record_signals
from riffle.deploy.network.secrets import SHUFFLER_ID
from riffle.deploy.operator import Operator
from riffle.deploy.presets import preset
from riffle.node_client.settings import Credential, Settings

LEAST_BATCH, MOST_BATCH, BATCHES = 300, 10_000, 4
MOST_REPORTS = 10_000_000
SETTLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What to load and with what. ``batch`` None: a quarter of all reports, within bounds."""

    folder: Path
    nodes: int
    rate: float
    seconds: float
    processes: int = 1
    arrivals: Arrivals = "poisson"
    batch: int | None = None
    presealed: bool = False
    workers: int = 2
    generator_cores: frozenset[int] = frozenset()
    service_cores: frozenset[int] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= self.nodes:
            raise ValueError(f"{self.nodes} nodes cannot be shared by {self.processes} processes")
        if self.rate * self.seconds > MOST_REPORTS:
            raise ValueError(f"more than {MOST_REPORTS} reports; lower --rate or --duration")

    def summary(self) -> dict[str, Any]:
        """The parameters as the report has them."""
        cores = {
            "generator_cores": sorted(self.generator_cores or os.sched_getaffinity(0)),
            "service_cores": sorted(self.service_cores or os.sched_getaffinity(0)),
        }
        names = ("nodes", "rate", "seconds", "processes", "arrivals", "presealed", "seed")
        given = {name: getattr(self, name) for name in names}
        sizes = {"reports_a_batch": self.reports_a_batch, "openers": self.workers}
        return given | sizes | cores

    @property
    def reports_a_batch(self) -> int:
        """n of every batch."""
        quarter = int(self.rate * self.seconds / BATCHES)
        return self.batch or max(LEAST_BATCH, min(MOST_BATCH, quarter))


@dataclass(frozen=True, slots=True)
class Target:
    """A network under load; ``pids`` of its services when they run here."""

    secrets: Path
    shuffler_url: str
    coordinator_url: str
    pids: dict[str, int] = field(default_factory=dict)

    def operator(self) -> Operator:
        """The operator's client."""
        return Operator.of(self.secrets, self.coordinator_url)


@contextmanager
def own_network(config: LoadConfig, lock: int) -> Iterator[Target]:
    """A network on loopback, without nodes, on the processors that services may use.

    What an earlier load that was killed left running there is stopped.
    ``lock`` is that of its folder, which is claimed already.
    """
    chosen = preset("paper")
    local = LoopbackConfig(
        config.folder,
        chosen.spec.environment,
        chosen.environment,
        nodes=0,
        workers=config.workers,
    )
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, config.service_cores or mine)  # children inherit it
    with ExitStack() as stack:
        try:
            network = stack.enter_context(LoopbackNetwork(local, lock))
        finally:
            os.sched_setaffinity(0, mine)
        pids = {role: process.pid for role, process in network.processes.items()}
        target = Target(network.secrets, network.shuffler_url, network.coordinator_url, pids)
        with target.operator() as operator:
            stop_unfinished(operator)
        yield target
        network.check_alive()


class Screen(Protocol):
    """Who is told how far a load test is."""

    def phase(self, text: str, total: float | None) -> None:
        """Something begins that has so many steps, if that is known."""

    def advance(self) -> None:
        """A step is done."""

    def show(self, now: Sample, before: Sample) -> None:
        """A new sample of the load, and the one before it."""


def run(config: LoadConfig, target: Target, screen: Screen) -> dict[str, Any]:
    """Load the target and say what was seen; an interrupt ends the load, not the report.

    Raises:
        LocalError: the target does not answer, or a process of the generator does not start.
        RemoteError: the target refuses its operator.
    """
    spec = load_spec(preset("paper").spec)
    screen.phase(f"enrolling {config.nodes} nodes", config.nodes)
    credentials = enrol_nodes(target.secrets, target.shuffler_url, config.nodes, screen.advance)
    with ExitStack() as stack:
        if not target.pids:  # a network of our own ends with the load
            stack.callback(revoke_nodes, target.secrets, target.shuffler_url, credentials)
        feeder = stack.enter_context(Feeder(target.operator, spec, config.reports_a_batch))
        crew = stack.enter_context(Crew(shares(config, target, spec, credentials)))
        screen.phase(f"loading for {config.seconds:g} s", config.seconds)
        samples, interrupted = crew.watch(config.seconds, target.pids, screen.show)
        screen.phase(f"settling, at most {SETTLE_SECONDS:g} s", None)
        with record_signals() as noted:
            feeder.settle(SETTLE_SECONDS, noted)
            batches = feeder.batches()
    found = document(config.summary(), samples, batches, len(crew.processes))
    return found | {"interrupted": interrupted or bool(noted), "trouble": feeder.trouble}


def shares(
    config: LoadConfig, target: Target, spec: RunSpec, credentials: list[Credential]
) -> list[Share]:
    """Nodes and arrivals dealt out to the processes, each arrival to the next process."""
    environment = preset("paper").environment
    files = target.secrets / "nodes"
    settings = Settings(
        shuffler_url=target.shuffler_url,
        shuffler_id=SHUFFLER_ID,
        shuffler_key_file=files / "shuffler_key",
        coordinator_key_file=files / "coordinator_key",
        analyzer_keys_file=files / "analyzer_keys",
        ca_file=files / "ca.pem",
        credentials_file=files / "credentials.json",  # not read: the credentials are given
        state_dir=config.folder,  # not written: users are invented and forgotten
        simulated_users=True,
        environment=spec.environment,
        environment_parameters=environment,
        max_epsilon=spec.epsilon,
        max_beta=spec.beta,
        min_dishonest_fraction=spec.dishonest_fraction,
    )
    rng = np.random.default_rng(config.seed)
    times = schedule(config.arrivals, config.rate, config.seconds, rng)
    cores = config.generator_cores or frozenset(os.sched_getaffinity(0))
    step = config.processes
    return [
        Share(settings, credentials[i::step], times[i::step], cores, config.presealed)
        for i in range(step)
    ]
