"""Plays a list of operations on a fresh network, heals it, and says what was wrong."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from riffle.common.mechanism.parameters import Aggregation
from tests.coordinator.world import runs_with_work
from tests.system.simulation import machine
from tests.system.simulation.installation import prepare
from tests.system.simulation.network import PATIENCE_SECONDS
from tests.system.simulation.operations import ACTIONS, Operation
from tests.system.simulation.outcome import check
from tests.system.simulation.world import PROCESSES, World

MEMORY = Path("/dev/shm")  # noqa: S108 -- crashes here are of processes, not of the disk
PAUSE_SECONDS = 0.2
HEALING_SECONDS = 2_000.0
STARTING_SECONDS = 1.0
RETENTION_SECONDS = 32 * 86_400.0


def play(
    operations: Sequence[Operation], seed: int, aggregation: Aggregation = "messages"
) -> list[str]:
    """What was found wrong, first things first; nothing when all is well."""
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as folder, machine.one_thread():
        fresh = Path(folder) / "network"
        shutil.copytree(_prepared(), fresh)
        return machine.run(_play(operations, lambda: World(fresh, seed, aggregation)))


@cache
def _prepared() -> Path:
    folder = Path(tempfile.mkdtemp()) / "network"
    prepare(folder)
    return folder


async def _play(operations: Sequence[Operation], make_world: Callable[[], World]) -> list[str]:
    world = make_world()
    problems, asking = world.watch.problems, []
    with world.watch.watching():
        try:
            for name in PROCESSES:
                world.start(name)
            await asyncio.sleep(STARTING_SECONDS)
            for name, *numbers in operations:
                asking.append(asyncio.ensure_future(ACTIONS[name](world, *numbers)))
                await asyncio.sleep(numbers[0] if name == "advance" else PAUSE_SECONDS)
                look(world)
                if problems:
                    return problems
            await asyncio.gather(*asking)
            await heal(world)
            check(world)
            return problems
        finally:
            await world.end()


def look(world: World) -> None:
    """What must hold at any time."""
    core = world.core("shuffler")
    if core is not None:
        with core._store.engine.connect() as connection:
            world.watch.look(connection)


async def heal(world: World) -> None:
    """Nothing befalls anybody any more, clocks agree, and every run comes to its end."""
    world.healing = True
    world.network.faults.clear()
    world.offsets = dict.fromkeys(world.offsets, max(world.offsets.values()))
    for role in world.roles.values():
        role.process.fuse = None
        role.process.go_on()
    for name in PROCESSES:
        world.fill(name, full=False)
        world.start(name)
    await asyncio.sleep(PATIENCE_SECONDS)  # a request that met a pause may create a run only now
    end = world.loop.time() + HEALING_SECONDS
    while not _settled(world):
        if world.loop.time() > end:
            world.watch.problems.append(f"runs do not end: {_states(world)}")
            return
        await asyncio.sleep(1.0)
    world.offsets["shuffler"] += RETENTION_SECONDS  # what nobody will ever take is given up
    await asyncio.sleep(PATIENCE_SECONDS)  # in which somebody asks the shuffler for something


def _settled(world: World) -> bool:
    store, shuffler = world.core("coordinator"), world.core("shuffler")
    if store is None or shuffler is None or runs_with_work(store):
        return False
    return not world.open_batches()


def _states(world: World) -> list[str]:
    store = world.core("coordinator")
    return [
        f"{run.id}: {run.state}, {[row.state for row in store.deployments(run.id)]}"
        for run in store.runs()
    ]
