"""A whole network on loopback: shuffler, coordinator and nodes, each a process of its own.

Used by ``riffle up`` and by the system tests. Only processes started here are ended, by their ids.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from riffle.common.mechanism.noise import Trust
from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import replace_file
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.network.processes import (
    Usage,
    defer_signals,
    interrupt_on_termination,
    lock_folder,
    probe,
    read_usage,
)
from riffle.deploy.network.secrets import (
    NETWORK_FOLDER,
    SHUFFLER_ID,
    TOKEN_FILE,
    URL_FILE,
    enrol,
    init_network,
    operator_client,
    operator_token,
)
from riffle.deploy.output import bar, line
from riffle.deploy.presets import Preset
from riffle.node_client.environments.registry import Parameter

READY_SECONDS = 60.0
SIMULATED_USERS = 1 << 30
STOP_SECONDS = 25.0
OPENING = "riffle_shuffler_opening_seconds_total"
# A block as large as a batch goes back to the system when it is freed; smaller ones, as of an
# upload, do not come and go page by page; and all threads share what is kept, instead of each
# keeping what it once needed (glibc; elsewhere nobody reads this).
MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 22),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 23),
}


@dataclass(frozen=True, slots=True)
class LoopbackConfig:
    """What to start: how many nodes of which environment, and what their owner demands.

    A port of 0 means any free one; 0 nodes, that others bring theirs. ``test_entry`` allows seeded
    noise, on loopback only.
    ``learners`` is name -> ``path/file.py:Class``. ``replicas`` of both services, named
    ``shuffler-2`` and so on after the first, need both stores' URLs.
    """

    folder: Path
    environment: str
    environment_parameters: dict[str, Parameter] = field(default_factory=dict)
    nodes: int = 20
    max_epsilon: float = 1.0
    max_beta: float = 1e-5
    min_dishonest_fraction: float = 0.0
    trust_models: tuple[Trust, ...] = ("shuffle",)
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
        cls, chosen: Preset, folder: Path, nodes: int, workers: int, trust_models: tuple[Trust, ...]
    ) -> Self:
        """What a run needs: nodes of its environment whose owner demands just its guarantee."""
        return cls(
            folder=folder,
            environment=chosen.spec.environment,
            environment_parameters=chosen.environment,
            nodes=nodes,
            max_epsilon=chosen.spec.epsilon,
            max_beta=chosen.spec.beta,
            min_dishonest_fraction=chosen.spec.dishonest_fraction,
            trust_models=trust_models,
            workers=workers,
            test_entry=chosen.spec.test_seed is not None,
            learners=chosen.learners,
        )


class LoopbackNetwork:
    """Context manager: the network runs inside the ``with`` block.

    A termination meanwhile is a KeyboardInterrupt, so that it ends the network too. Its folder is
    its own, as long as one of its processes lives. Who has claimed the folder already passes the
    ``lock`` (`deploy.network.folder.claimed`).
    """

    def __init__(self, config: LoopbackConfig, lock: int | None = None) -> None:
        self.config = config
        self._lock = lock
        self._held: tuple[int, ...] = ()
        self._leaving = ExitStack()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.shufflers = _urls("shuffler", config.shuffler_port, config.replicas)
        self.coordinators = _urls("coordinator", config.coordinator_port, config.replicas)
        self.shuffler_url = ",".join(self.shufflers.values())
        self.coordinator_url = ",".join(self.coordinators.values())

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(interrupt_on_termination())
            lock = self._lock
            self._held = (
                stack.enter_context(lock_folder(self.config.folder)) if lock is None else lock,
            )
            stack.callback(self.stop)
            init_network(self.secrets)
            (self.config.folder / "logs").mkdir(exist_ok=True)
            replace_file(self.secrets / "operator" / URL_FILE, self.coordinator_url.encode())
            line("starting the network")
            with bar() as shown:
                total = 2 * self.config.replicas + self.config.nodes
                task = shown.add_task("starting the network", total=total)
                self._start_all(lambda: shown.advance(task))
            self._leaving = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    @property
    def secrets(self) -> Path:
        """Folder of the network's secrets."""
        return self.config.folder / NETWORK_FOLDER

    @property
    def operator_token(self) -> str:
        """The operator's token at the coordinator."""
        return (self.secrets / "operator" / TOKEN_FILE).read_text()

    def opening_seconds(self) -> float:
        """Processor time that the shufflers have spent on opening outer seals since they started.

        Raises:
            httpx.HTTPError: one of them does not answer.
        """
        token, total = operator_token(self.secrets, "metrics_token"), 0.0
        for url in self.shufflers.values():
            with operator_client(self.secrets, url, token) as client:
                page = client.get("/metrics").raise_for_status().text
            for family in text_string_to_metric_families(page):
                total += sum(s.value for s in family.samples if s.name == OPENING)
        return total

    def _start_all(self, step: Callable[[], None]) -> None:
        """Start everything; ``step`` is called at every service that is ready and every node."""
        for name in self.shufflers:
            self._start_known(name)
        for name in self.shufflers:
            self.wait_ready(name)
            step()
        for name in self.coordinators:
            self._start_known(name)
        if self.config.nodes:
            enrol(self.secrets, self.shuffler_url, self.config.nodes, SIMULATED_USERS, step)
            self._start_known("node")
        for name in self.coordinators:
            self.wait_ready(name)
            step()

    def _start_known(self, name: str) -> None:
        with defer_signals():  # a process that is started and not yet noted would never be ended
            self.start(name)

    def start(self, name: str) -> None:
        """Start one process, ``shuffler`` or ``shuffler-2``; its log is ``logs/<name>.log``."""
        log = (self.config.folder / "logs" / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "riffle.deploy.cli.main", name.partition("-")[0]],
                env=MEMORY | os.environ | self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._held,
                process_group=0,  # Ctrl-C is the command's: it ends these, and in order
            )

    def stop(self) -> None:
        """Ask every process to leave, nodes first, and end those that do not, or when told again.

        Raises:
            KeyboardInterrupt: told again; no process is left then either.
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
        """What each role's process and its pool have used so far."""
        pids = {role: process.pid for role, process in self.processes.items()}
        found = read_usage(pids.values())
        return {role: found[pid] for role, pid in pids.items() if pid in found}

    def check_alive(self) -> None:
        """Raise LocalError when a process has ended, with the last line it wrote."""
        for role, process in self.processes.items():
            if process.poll() is not None:
                raise LocalError(
                    "unavailable",
                    f"the {role} ended with code {process.returncode}: {self.last_line(role)}",
                )

    def last_line(self, role: str) -> str:
        """Last line of a role's log: the sentence in it, where there is one."""
        lines = (self.config.folder / "logs" / f"{role}.log").read_text().strip().splitlines()
        try:
            said = json.loads(lines[-1])
            return str(said.get("detail", said["event"]))
        except (ValueError, LookupError, TypeError, AttributeError):  # it is none of ours
            return lines[-1] if lines else "no output"

    def wait_ready(self, name: str) -> None:
        """Wait for ``/readyz``.

        Raises:
            LocalError: the process ended, or is not ready in time.
        """
        url = {**self.shufflers, **self.coordinators}[name]
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                if probe(f"{url}/readyz").is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise LocalError("unavailable", f"the {name} is not ready after {READY_SECONDS:.0f} s")

    def environment(self, name: str) -> dict[str, str]:
        """Environment variables that configure a process."""
        if name in self.shufflers:
            return self._shuffler(name)
        return self._coordinator(name) if name in self.coordinators else self._node()

    def _shuffler(self, name: str) -> dict[str, str]:
        files = self.secrets / "shuffler"
        return _prefixed(
            "RIFFLE_SHUFFLER_",
            HOST=LOOPBACK,
            PORT=_port(self.shufflers[name]),
            STORE_URL=self.config.shuffler_store,
            DATA_DIR=self.config.folder / "data" / "shuffler",
            SHUFFLER_ID=SHUFFLER_ID,
            SIGNING_KEY_FILE=files / "signing_key",
            STORAGE_KEY_FILE=self.secrets / "shuffler-storage" / "key",
            COORDINATOR_KEY_FILE=files / "coordinator_key",
            COORDINATOR_TOKEN_HASH_FILE=files / "coordinator_token_hash",
            OPERATOR_TOKEN_HASH_FILE=files / "operator_token_hash",
            METRICS_TOKEN_HASH_FILE=files / "metrics_token_hash",
            ANALYZER_KEYS_FILE=files / "analyzer_keys",
            LEASE_SECONDS=self.config.lease_seconds,
            **self._demands(),
        )

    def _coordinator(self, name: str) -> dict[str, str]:
        files = self.secrets / "coordinator"
        return _prefixed(
            "RIFFLE_COORDINATOR_",
            HOST=LOOPBACK,
            PORT=_port(self.coordinators[name]),
            STORE_URL=self.config.coordinator_store,
            DATA_DIR=self.config.folder / "data" / name,
            LEASE_SECONDS=min(15, self.config.lease_seconds),
            SIGNING_KEY_FILE=files / "signing_key",
            STORAGE_KEY_FILE=self.secrets / "coordinator-storage" / "key",
            ANALYZER_KEYS_DIR=files / "analyzer_keys",
            SHUFFLER_URL=self.shuffler_url,
            SHUFFLER_ID=SHUFFLER_ID,
            SHUFFLER_TOKEN_FILE=files / "shuffler_token",
            OPERATOR_TOKEN_HASH_FILE=files / "operator_token_hash",
            METRICS_TOKEN_HASH_FILE=files / "metrics_token_hash",
            WORKERS=self.config.workers,
            TEST_ENTRY=self.config.test_entry,
            LEARNERS=json.dumps(self.config.learners),
        )

    def _node(self) -> dict[str, str]:
        files = self.secrets / "nodes"
        return _prefixed(
            "RIFFLE_NODE_",
            SHUFFLER_URL=self.shuffler_url,
            SHUFFLER_ID=SHUFFLER_ID,
            SHUFFLER_KEY_FILE=files / "shuffler_key",
            COORDINATOR_KEY_FILE=files / "coordinator_key",
            ANALYZER_KEYS_FILE=files / "analyzer_keys",
            CREDENTIALS_FILE=files / "credentials.json",
            STATE_DIR=self.config.folder / "data" / "nodes",
            SIMULATED_USERS="true",
            ENVIRONMENT=self.config.environment,
            WORKERS=self.config.workers,
            ENVIRONMENT_PARAMETERS=json.dumps(self.config.environment_parameters),
            **self._demands(),
        )

    def _demands(self) -> dict[str, object]:
        return {
            "MAX_EPSILON": self.config.max_epsilon,
            "MAX_BETA": self.config.max_beta,
            "MIN_DISHONEST_FRACTION": self.config.min_dishonest_fraction,
            "TRUST_MODELS": json.dumps(self.config.trust_models),
            "TEST_ENTRY": self.config.test_entry,
        }


def _urls(role: str, port: int, replicas: int) -> dict[str, str]:
    """Replica -> URL. Only the first one's port can be chosen."""
    names = [role, *(f"{role}-{number}" for number in range(2, replicas + 1))]
    ports = [port, *[0] * (replicas - 1)]
    return {
        name: f"http://{LOOPBACK}:{chosen or free_port()}"
        for name, chosen in zip(names, ports, strict=True)
    }


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _port(url: str) -> str:
    return url.rsplit(":", 1)[1]


def _prefixed(prefix: str, **values: object) -> dict[str, str]:
    return {prefix + name: str(value) for name, value in values.items()}
