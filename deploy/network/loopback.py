"""A whole network on loopback: shuffler, coordinator and nodes, each in its own process."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import replace_file
from riffle.deploy.network import processes, secrets
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.network.processes import Usage
from riffle.deploy.network.settings_files import settings_of
from riffle.deploy.output import bar, line
from riffle.experiments.presets import Preset
from riffle.node_client.environments.registry import Parameter

READY_SECONDS = 60.0
SIMULATED_USERS = 1 << 30
STOP_SECONDS = 25.0
OPENING = "riffle_shuffler_opening_seconds_total"
# With these settings, glibc returns freed blocks as large as a batch to the system, but keeps
# smaller ones, such as an upload's, in memory that all threads share. Other C libraries ignore
# this.
MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 22),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 23),
}


@dataclass(frozen=True, slots=True)
class LoopbackConfig:
    """Parameters of a loopback network: its nodes, their environment, their owners' demands.

    Port 0 means any free port. With 0 nodes, nodes are started elsewhere. ``test_entry`` allows
    seeded noise. ``learners`` maps names to ``path/file.py:Class``. If ``replicas`` is above 1,
    each service has further replicas, such as ``shuffler-2``; this needs the URLs of both stores.
    """

    folder: Path
    environment: str
    environment_parameters: dict[str, Parameter] = field(default_factory=dict)
    nodes: int = 20
    max_epsilon: float = 1.0
    max_beta: float = 1e-5
    min_dishonest_fraction: float = 0.0
    trust_models: tuple[Trust, ...] = ("shuffle",)
    aggregations: tuple[Aggregation, ...] = ("messages",)
    shuffler_port: int = 0
    coordinator_port: int = 0
    workers: int = 2
    lease_seconds: int = 120
    test_entry: bool = False
    learners: dict[str, str] = field(default_factory=dict)
    replicas: int = 1
    shuffler_store: str = ""
    coordinator_store: str = ""

    @classmethod
    def of(
        cls,
        chosen: Preset,
        folder: Path,
        nodes: int,
        workers: int,
        trust_models: tuple[Trust, ...] = ("shuffle",),
    ) -> Self:
        """Returns the network for a run. The nodes' owners demand exactly the run's guarantee."""
        return cls(
            folder=folder,
            environment=chosen.spec.environment,
            environment_parameters=chosen.environment,
            nodes=nodes,
            max_epsilon=chosen.spec.epsilon,
            max_beta=chosen.spec.beta,
            min_dishonest_fraction=chosen.spec.dishonest_fraction,
            trust_models=trust_models,
            aggregations=("messages", chosen.spec.aggregation),
            workers=workers,
            test_entry=chosen.spec.test_seed is not None,
            learners=chosen.learners,
        )


def shuffler_metric(folder: Path, url: str, name: str, routes: Collection[str] = ()) -> float:
    """Returns a metric of a shuffler, summed over all labels, or only over these ``routes``.

    Raises LocalError if the folder has no token for metrics, and httpx.HTTPError if the shuffler
    does not answer.
    """
    token = secrets.operator_token(folder, "shuffler_metrics_token")
    with secrets.operator_client(folder, url, token) as client:
        families = text_string_to_metric_families(client.get("/metrics").raise_for_status().text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(s.value for s in samples if not routes or s.labels["route"] in routes)


class LoopbackNetwork:
    """A network that runs inside its ``with`` block.

    A termination signal inside the block raises KeyboardInterrupt, so that the network ends too.
    The network holds its folder's lock until its last process ends. A caller that has already
    locked the folder passes the ``lock`` (`processes.lock_folder`).
    """

    def __init__(self, config: LoopbackConfig, lock: int | None = None) -> None:
        self.config = config
        self._lock = lock
        self._inherited: tuple[int, ...] = ()
        self._exits = ExitStack()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.shufflers = _urls("shuffler", config.shuffler_port, config.replicas)
        self.coordinators = _urls("coordinator", config.coordinator_port, config.replicas)
        self.shuffler_url = ",".join(self.shufflers.values())
        self.coordinator_url = ",".join(self.coordinators.values())

    def __enter__(self) -> Self:
        folder, lock = self.config.folder, self._lock
        with ExitStack() as stack:
            stack.enter_context(processes.interrupt_on_termination())
            if lock is None:
                lock = stack.enter_context(processes.lock_folder(folder))
            self._inherited = (lock,)
            stack.callback(self.stop)
            secrets.init_network(self.secrets)
            (folder / "logs").mkdir(exist_ok=True)
            operator = self.secrets / "operator"
            replace_file(operator / secrets.URL_FILE, self.coordinator_url.encode())
            replace_file(operator / secrets.SHUFFLER_URL_FILE, self.shuffler_url.encode())
            line("starting the network")
            with bar() as shown:
                total = 2 * self.config.replicas + self.config.nodes
                task = shown.add_task("starting the network", total=total)
                self._start_all(lambda: shown.advance(task))
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    @property
    def secrets(self) -> Path:
        """The secrets folder of the network."""
        return self.config.folder / secrets.NETWORK_FOLDER

    @property
    def operator_token(self) -> str:
        """The operator's token at the coordinator."""
        return (self.secrets / "operator" / secrets.TOKEN_FILE).read_text()

    def opening_seconds(self) -> float:
        """Returns the shufflers' processor time for opening outer seals; raises HTTPError."""
        urls = self.shufflers.values()
        return sum(shuffler_metric(self.secrets, url, OPENING) for url in urls)

    def _start_all(self, step: Callable[[], None]) -> None:
        """Starts everything. Calls ``step`` for every service that is ready, and for every node."""
        for name in self.shufflers:
            self._start_known(name)
        for name in self.shufflers:
            self.wait_ready(name)
            step()
        for name in self.coordinators:
            self._start_known(name)
        if self.config.nodes:
            owners = [f"owner-{number + 1}" for number in range(self.config.nodes)]
            secrets.enrol(self.secrets, self.shuffler_url, owners, 1, SIMULATED_USERS, step)
            self._start_known("node")
        for name in self.coordinators:
            self.wait_ready(name)
            step()

    def _start_known(self, name: str) -> None:
        # A process that has started but is not yet recorded would never be ended.
        with processes.defer_signals():
            self.start(name)

    def start(self, name: str) -> None:
        """Starts the process ``name``, such as ``shuffler-2``, with the log ``logs/<name>.log``."""
        environment = MEMORY | os.environ | self.environment(name)
        with (self.config.folder / "logs" / f"{name}.log").open("ab") as log:
            role = name.partition("-")[0]
            self.processes[name] = start_service(role, environment, log, self._inherited)

    def stop(self) -> None:
        """Asks every process to stop, nodes first.

        Kills the processes that do not stop in time. If a signal arrives meanwhile, kills all
        processes immediately and raises KeyboardInterrupt.
        """
        try:
            for name in ("node", *self.coordinators, *self.shufflers):
                process = self.processes.get(name)
                if process is not None and process.poll() is None:
                    process.terminate()
            deadline = time.monotonic() + STOP_SECONDS
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in self.processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def usage(self) -> dict[str, Usage]:
        """Returns the resources used so far by each role's process and its pool."""
        pids = {role: process.pid for role, process in self.processes.items()}
        usage = processes.read_usage(pids.values())
        return {role: usage[pid] for role, pid in pids.items() if pid in usage}

    def check_alive(self) -> None:
        """Raises LocalError with a process's last log line if the process has ended."""
        for role, process in self.processes.items():
            if process.poll() is not None:
                detail = f"the {role} ended with code {process.returncode}: {self.last_line(role)}"
                raise LocalError("unavailable", detail)

    def last_line(self, role: str) -> str:
        """Returns a role's last log line. Of a JSON line, returns the ``detail`` or ``event``."""
        lines = (self.config.folder / "logs" / f"{role}.log").read_text().strip().splitlines()
        try:
            event = json.loads(lines[-1])
            return str(event.get("detail", event["event"]))
        except (ValueError, LookupError, TypeError, AttributeError):  # not a line of the journal
            return lines[-1] if lines else "no output"

    def wait_ready(self, name: str) -> None:
        """Waits for ``/readyz``. Raises LocalError if the process ended or is not ready in time."""
        url = {**self.shufflers, **self.coordinators}[name]
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                if processes.probe(f"{url}/readyz").is_success:
                    return
            time.sleep(0.1)
        raise LocalError("unavailable", f"the {name} is not ready after {READY_SECONDS:.0f} s")

    def environment(self, name: str) -> dict[str, str]:
        """Returns the environment variables that configure a process."""
        if name in self.shufflers:
            role, values = "SHUFFLER", self._shuffler(name)
        elif name in self.coordinators:
            role, values = "COORDINATOR", self._coordinator(name)
        else:
            role, values = "NODE", self._node()
        return {f"RIFFLE_{role}_{key}": str(value) for key, value in values.items()}

    def _settings(self, role: str, url: str = "") -> dict[str, object]:
        return {**settings_of(role, self.shuffler_url, url, self.secrets / role)}

    def _shuffler(self, name: str) -> dict[str, object]:
        return {
            **self._settings("shuffler", self.shufflers[name]),
            **self._demands(),
            "STORE_URL": self.config.shuffler_store,
            "DATA_DIR": self.config.folder / "data" / "shuffler",
            "LEASE_SECONDS": self.config.lease_seconds,
        }

    def _coordinator(self, name: str) -> dict[str, object]:
        return self._settings("coordinator", self.coordinators[name]) | {
            "STORE_URL": self.config.coordinator_store,
            "DATA_DIR": self.config.folder / "data" / name,
            "LEASE_SECONDS": min(15, self.config.lease_seconds),
            "WORKERS": self.config.workers,
            "TEST_ENTRY": self.config.test_entry,
            "AGGREGATIONS": json.dumps(self.config.aggregations),
            "LEARNERS": json.dumps(self.config.learners),
        }

    def _node(self) -> dict[str, object]:
        return {
            **self._settings("nodes"),
            **self._demands(),
            "STATE_DIR": self.config.folder / "data" / "nodes",
            "SIMULATED_USERS": "true",
            "ENVIRONMENT": self.config.environment,
            "WORKERS": self.config.workers,
            "ENVIRONMENT_PARAMETERS": json.dumps(self.config.environment_parameters),
        }

    def _demands(self) -> dict[str, object]:
        return {
            "MAX_EPSILON": self.config.max_epsilon,
            "MAX_BETA": self.config.max_beta,
            "MIN_DISHONEST_FRACTION": self.config.min_dishonest_fraction,
            "TRUST_MODELS": json.dumps(self.config.trust_models),
            "AGGREGATIONS": json.dumps(self.config.aggregations),
            "TEST_ENTRY": self.config.test_entry,
        }


def start_service(
    role: str, environment: Mapping[str, str], log: IO[bytes], inherited: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Starts the process of a role, which writes to ``log`` and inherits file descriptors."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "riffle.deploy.cli.main", role],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=inherited,
        process_group=0,  # Ctrl-C is for the command, which ends its processes in order
    )


def _urls(role: str, port: int, replicas: int) -> dict[str, str]:
    """Returns URLs by replica. Only the first replica's port can be chosen."""
    names = [role, *(f"{role}-{number}" for number in range(2, replicas + 1))]
    ports = [port or free_port(), *(free_port() for _ in names[1:])]
    return {n: f"http://{LOOPBACK}:{chosen}" for n, chosen in zip(names, ports, strict=True)}


def free_port() -> int:
    """Returns a currently free port of the loopback interface."""
    with socket.socket() as probe_socket:
        probe_socket.bind((LOOPBACK, 0))
        return int(probe_socket.getsockname()[1])
