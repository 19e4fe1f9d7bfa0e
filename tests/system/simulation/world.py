"""The roles of a network as processes on one loop: two shufflers, two coordinators, nodes.

Everything between the network and the disk is what runs in production: apps, cores, stores, vault,
keys, drivers, analyzer, runner, pipeline, trust. Replaced are threads and pools (`machine`), the
network (`network`), the clock, whose time every role may see wrong, and the seed of a run's draws.
Replicas share SQLite files here; on PostgreSQL they are tested elsewhere.
"""

import asyncio
import json
import random
import re
import shutil
from collections import deque
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import connect
from typing import Any

import httpx
from fastapi import FastAPI
from sqlalchemy import select

from riffle.common.mechanism.parameters import Aggregation
from riffle.common.protocol.verification import read_pins
from riffle.coordinator import app as coordinator_app
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.batches.shuffler_client import ShufflerClient as CoordinatorsShuffler
from riffle.coordinator.store.schema import meta
from riffle.node_client.pipeline import Pipeline, Totals
from riffle.node_client.runner import NodeState, Runner
from riffle.node_client.sealing import seal_reports
from riffle.node_client.shuffler_client import Backoff
from riffle.node_client.shuffler_client import ShufflerClient as NodesShuffler
from riffle.node_client.users import Users
from riffle.shuffler import app as shuffler_app
from riffle.shuffler.core import preflight, store_head
from riffle.shuffler.settings import Settings as ShufflerSettings
from riffle.shuffler.store import schema
from tests.system.simulation.installation import (
    COORDINATOR_TOKEN,
    EPOCH,
    OPERATOR_TOKEN,
    REPLICAS,
    coordinator_settings,
    learners,
    node_settings,
    shuffler_settings,
)
from tests.system.simulation.machine import Inline, Process
from tests.system.simulation.network import Network
from tests.system.simulation.watch import Known, Watch

START_SECONDS = 1.0  # between two attempts to start
PROCESSES = ("shuffler-a", "shuffler-b", "coordinator-a", "coordinator-b", "node")
ROLES = ("shuffler", "coordinator", "node")
SERVICES = ROLES[:2]


@dataclass
class Role:
    """Who serves a name now, if anybody, and since when it may be asked."""

    process: Process
    app: FastAPI | None = None
    ready: bool = False


@dataclass
class Copy:
    """A copy of a store, its head, and what was known when it was made."""

    file: Path
    head: int
    known: Known


class World:
    """A network in a folder. Made inside a running `machine.Loop`."""

    def __init__(self, folder: Path, seed: int, aggregation: Aggregation) -> None:
        self.folder = folder
        self.aggregation: Aggregation = aggregation
        self.draws = random.Random(seed)
        self.offsets = dict.fromkeys(ROLES, 0.0)
        self.primary = dict.fromkeys(SERVICES, "a")
        self.downtime: dict[str, float] = {}
        self.roles: dict[str, Role] = {}
        self.apps: dict[str, FastAPI] = {}
        self.graves: list[Process] = []
        self.full: set[str] = set()
        self.sealing_seconds = 0.0
        self.copies: dict[str, Copy] = {}
        self.accepted: dict[str, int] = {}
        self.older: set[str] = set()
        self.restoring: set[str] = set()
        self.healing = self.ending = False
        self.strangers = 0
        self.stranger = json.loads((folder / "stranger.json").read_text())["token"]
        self.watch = Watch(lambda: self.clock("shuffler"), f"Bearer {self.stranger}", aggregation)
        self.network = Network(self.draws, self.pick, self.watch.answered)
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._unexpected)

    # -- time and routes -------------------------------------------------------------------------

    def clock(self, role: str) -> float:
        """What a role takes for the time."""
        return EPOCH + self.loop.time() + self.offsets[role]

    def pick(self, target: str) -> tuple[Process, Any] | None:
        """Who answers for a service: the replica that all are sent to, else the other."""
        wanted = self.primary[target]
        for replica in sorted(REPLICAS, key=lambda one: one != wanted):
            role = self.roles.get(f"{target}-{replica}")
            if role is not None and role.app is not None and not role.process.dead:
                return role.process, role.app
        return None

    # -- processes -------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a process that is not running."""
        role = self.roles.get(name)
        if (role is not None and not role.process.dead) or name.partition("-")[0] in self.restoring:
            return
        process = Process(name, self._died)
        process.full = name in self.full
        self.roles[name] = role = Role(process)
        process.spawn(self._main(role))

    def kill(self, name: str, fuse: int, downtime: float) -> None:
        """Kill a process so many steps from now, to be started again after a while."""
        self.downtime[name] = downtime
        process = self.roles[name].process
        if process.dead:
            return
        process.fuse = fuse
        if fuse == 0:
            process.kill()

    def fill(self, name: str, *, full: bool) -> None:
        """The disk of a process, and of those that are started after it, is full or is not."""
        (self.full.add if full else self.full.discard)(name)
        self.roles[name].process.full = full

    def pause(self, name: str, seconds: float) -> None:
        """A process stands still for a while."""
        process = self.roles[name].process
        if not process.dead and not process.paused:
            process.paused = True
            self.loop.call_later(seconds, process.go_on)

    # -- copies of a store -----------------------------------------------------------------------

    def store_file(self, target: str) -> Path:
        """The file of a service's store."""
        return self.folder / target / f"{target}.sqlite"

    def copy(self, target: str) -> None:
        """Copy a store while its service runs, as `sqlite3 FILE ".backup COPY"` does."""
        file = self.folder / f"{target}.copy"
        file.unlink(missing_ok=True)
        with closing(connect(self.store_file(target))) as source, closing(connect(file)) as made:
            source.backup(made)
        self.copies[target] = Copy(file, self.head(file), deepcopy(self.watch.known))

    def head(self, file: Path) -> int:
        """The head in a store."""
        with closing(connect(file)) as store:
            row = store.execute("SELECT value FROM meta WHERE key = 'head'").fetchone()
        return row[0] if row else 0

    async def restore(self, target: str) -> None:
        """Stop a service, put its copy in the place of its store, and start it again."""
        copy = self.copies.get(target)
        if copy is None or target in self.restoring:
            return
        self.restoring.add(target)
        for replica in REPLICAS:
            role = self.roles[f"{target}-{replica}"]
            role.process.kill()
            await role.process.buried()
        file = self.store_file(target)
        written = self._written(target)
        if copy.head < written != self.accepted.get(target):
            self.older.add(target)  # must be refused, until the operator accepts this number
        for old in file.parent.glob(f"{file.name}*"):
            old.unlink()
        shutil.copyfile(copy.file, file)
        if target == "shuffler":
            self.watch.restored(copy.known)
        self.watch.rolled_back.add(target)
        self.restoring.discard(target)
        for replica in REPLICAS:
            self.start(f"{target}-{replica}")

    def _written(self, target: str) -> int:
        """The highest head outside a store."""
        if target == "shuffler":
            return store_head(shuffler_settings(self.folder)).written()
        return coordinator_settings(self.folder, "a").head(target, meta).written()

    def _accept(self, target: str, error: Exception) -> bool:
        """The operator reads a refusal and accepts the older store; whether it was one."""
        found = re.search(r"ACCEPT_OLDER_STORE=(\d+)", str(error))
        if found is None or target not in self.watch.rolled_back:
            return False
        self.older.discard(target)
        self.accepted[target] = int(found[1])
        for replica in REPLICAS:
            self.apps.pop(f"{target}-{replica}", None)
        return True

    def _died(self, process: Process) -> None:
        self.graves.append(process)
        self.watch.setbacks += 1
        if self.ending:
            return
        downtime = 0.1 if self.healing else self.downtime.get(process.name, 1.0)
        self.loop.call_later(downtime, self.start, process.name)

    async def end(self) -> None:
        """Kill all that is left, and wait until it is gone."""
        self.ending = True
        for role in self.roles.values():
            role.process.kill()
        for grave in self.graves:
            await grave.buried()
        for stray in list(self.network.strays):
            stray.cancel()

    async def _main(self, role: Role) -> None:
        kind, _, replica = role.process.name.partition("-")
        try:
            if kind == "node":
                await self._node(role)
            else:
                app = self._app(kind, replica)
                if kind == "shuffler":
                    preflight(self._shuffler_settings())
                async with app.router.lifespan_context(app):
                    self.watch.expect(kind not in self.older, f"{kind} began on an older store")
                    role.app, role.ready = app, True
                    await asyncio.Event().wait()
        except Exception as error:
            if not role.ready:
                self.downtime[role.process.name] = START_SECONDS
            # On a full disk a process may fail to start, but one that runs goes on.
            if self._accept(kind, error):
                pass
            elif not role.process.dead and (role.ready or not role.process.full):
                self.watch.problems.append(f"{role.process.name} ended: {error!r}")
        role.process.kill()

    def _app(self, kind: str, replica: str) -> FastAPI:
        """Routes, which take a while to make and hold nothing; the core is new at every start."""
        made = self.apps.get(f"{kind}-{replica}")
        if made is None:
            make = self._shuffler if kind == "shuffler" else self._coordinator
            made = self.apps[f"{kind}-{replica}"] = make(replica)
        return made

    def _shuffler(self, _: str) -> FastAPI:
        return shuffler_app.create_app(self._shuffler_settings(), self._time("shuffler"))

    def _shuffler_settings(self) -> ShufflerSettings:
        return shuffler_settings(self.folder, self.accepted.get("shuffler"))

    def _coordinator(self, replica: str) -> FastAPI:
        settings = coordinator_settings(self.folder, replica, self.accepted.get("coordinator"))
        ring = KeyRing(
            settings.analyzer_keys_dir, settings.storage_cipher(), self._time("coordinator")
        )
        client = self.network.client("shuffler", COORDINATOR_TOKEN)
        return coordinator_app.create_app(
            settings,
            shuffler=CoordinatorsShuffler(client),
            registry=learners(),
            analyzer=Analyzer(ring.private, 1, Inline),
            clock=self._time("coordinator"),
        )

    def _time(self, role: str) -> Any:
        return lambda: self.clock(role)

    async def _node(self, role: Role) -> None:
        settings = node_settings(self.folder)
        environment, now = settings.make_environment(), self._time("node")
        users = Users(settings.state_dir, settings.users())
        backoff = Backoff(share=self.draws.random, clock=now)
        client = NodesShuffler(self.network.client("shuffler"), backoff)
        pipeline = Pipeline(
            environment=environment,
            seal=self._seal,
            shuffler=client,
            users=users,
            totals=Totals(),
            capacity=asyncio.Semaphore(4),
            test_entry=True,
            clock=now,
            monotonic=self.loop.time,
        )
        runner = Runner(
            nodes=deque(NodeState(credential) for credential in settings.credentials()),
            demands=settings.demands(environment),
            pipeline=pipeline,
            users_a_request=4,
            users_file=settings.users_file,
            read_users=settings.users,
            pins=lambda: read_pins(settings.analyzer_keys_file),
        )
        role.ready = True
        try:
            await runner.run(asyncio.Event())
        finally:
            users.close()

    async def _seal(self, job_keys: Any, messages: Any) -> bytes:
        await asyncio.sleep(self.sealing_seconds * len(messages))
        return seal_reports(job_keys, messages)

    def _unexpected(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self.watch.problems.append(f"unexpected: {context['message']}: {error!r}")

    # -- the operator ----------------------------------------------------------------------------

    async def ask(self, target: str, method: str, path: str, **rest: Any) -> httpx.Response | None:
        """One request of the operator's; None when nobody answers."""
        async with self.network.client(target, OPERATOR_TOKEN) as client:
            with suppress(httpx.TransportError):
                return await client.request(method, f"/v1{path}", **rest)
        return None

    def open_batches(self) -> list[tuple[str, int]]:
        """Open batches with the size of a report, oldest first; none when no shuffler is there."""
        core, table = self.core("shuffler"), schema.batches.c
        if core is None:
            return []
        query = select(table.batch_id, table.report_bytes).where(table.state == "open")
        with core._store.engine.connect() as connection:
            return [(row[0], row[1]) for row in connection.execute(query.order_by(table.deposited))]

    def core(self, target: str) -> Any:
        """The core of a service that answers; None when there is none."""
        found = self.pick(target)
        if found is None:
            return None
        state = found[1].state
        return state.shuffler if target == "shuffler" else state.coordinator.store
