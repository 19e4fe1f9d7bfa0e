"""What may happen in a simulation: a list of named operations with numbers, as JSON.

Operations are drawn from a seed and can be written down, so a failure is a list that can be made
shorter, kept as a file and played again.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from riffle.common.protocol.wire import frame
from tests.system.simulation.installation import REPLICAS, run_spec, user_of
from tests.system.simulation.learner import N
from tests.system.simulation.network import ALTERATIONS, FAULTS
from tests.system.simulation.world import PROCESSES, ROLES, SERVICES, World

Operation = list[Any]
MOST_RUNS = 3
LARGEST_OFFSET = 150.0
HOG_SECONDS = 1.0
PLACES = ("POST", "PUT", "reports", "leases", "messages", "acknowledgement", "status", "batches")


def draw(draws: random.Random) -> Operation:
    """One operation."""
    kinds: list[tuple[int, Callable[[], Operation]]] = [
        (30, lambda: ["advance", draws.choice([0.1, 0.3, 0.5, 1, 1, 2, 3, 10])]),
        (1, lambda: ["advance", 70]),
        (14, lambda: ["kill", draws.choice(PROCESSES), draws.randrange(40), _downtime(draws)]),
        (2, lambda: ["kill-all", _downtime(draws)]),
        (4, lambda: ["pause", draws.choice(PROCESSES), draws.choice([1, 5, 20, 80])]),
        (4, lambda: ["full", draws.choice(PROCESSES), draws.choice([0.5, 2, 10, 80])]),
        (14, lambda: ["fault", draws.choice(FAULTS), draws.choice(PLACES)]),
        (10, lambda: ["fault", draws.choice(ALTERATIONS), draws.choice(PLACES)]),
        (8, lambda: ["replay", draws.randrange(1000)]),
        (4, lambda: ["jump", draws.choice(ROLES), draws.choice([-100, -20, -2, 2, 20, 100])]),
        (5, lambda: ["switch", draws.choice(SERVICES)]),
        (3, lambda: ["rotate"]),
        (4, lambda: ["squat", draws.randrange(1, 5), draws.random() < 0.5]),
        (3, lambda: ["hog", draws.choice([5, 20, 60])]),
        (3, lambda: ["slow", draws.choice([0.5, 2, 5, 10, 20]), draws.choice([5, 20, 60])]),
        (3, lambda: ["copy", draws.choice(SERVICES)]),
        (3, lambda: ["restore", draws.choice(SERVICES)]),
        (1, lambda: ["abandon"]),
        (5, lambda: ["create", draws.randrange(MOST_RUNS)]),
        (1, lambda: ["stop", draws.randrange(MOST_RUNS)]),
    ]
    weights = [weight for weight, _ in kinds]
    return draws.choices(kinds, weights)[0][1]()


def _downtime(draws: random.Random) -> float:
    return draws.choice([0.1, 0.1, 1.0, 5.0, 20.0, 80.0])


def sequence(seed: int, length: int) -> list[Operation]:
    """A run is created; then anything happens."""
    draws = random.Random(seed)
    return [["create", 0], *(draw(draws) for _ in range(length))]


# -- what they do -------------------------------------------------------------------------------


async def advance(world: World, seconds: float) -> None:
    """Nothing but time passes."""


async def kill(world: World, name: str, fuse: int, downtime: float) -> None:
    """A process dies so many steps from now."""
    world.kill(name, fuse, downtime)


async def kill_all(world: World, downtime: float) -> None:
    """The machine stops: nobody has one step more."""
    for name in PROCESSES:
        world.kill(name, 0, downtime)


async def pause(world: World, name: str, seconds: float) -> None:
    """A process does nothing for a while, then goes on, unless it is killed before."""
    world.watch.setbacks += 1
    world.pause(name, seconds)


async def slow(world: World, report_seconds: float, seconds: float) -> None:
    """For a while the node takes so long to seal a report."""
    world.sealing_seconds = report_seconds
    world.loop.call_later(seconds, partial(setattr, world, "sealing_seconds", 0.0))


async def copy(world: World, target: str) -> None:
    """The operator copies a service's store while it runs."""
    world.copy(target)


async def restore(world: World, target: str) -> None:
    """A service is stopped, its last copy takes the place of its store, and it is started again."""
    await world.restore(target)


async def full(world: World, name: str, seconds: float) -> None:
    """A process can write nothing for a while."""
    world.fill(name, full=True)
    world.loop.call_later(seconds, partial(world.fill, name, full=False))


async def fault(world: World, kind: str, place: str) -> None:
    """Something befalls a request to come."""
    world.network.faults.append((kind, place))


async def replay(world: World, number: int) -> None:
    """An upload of some time ago arrives once more."""
    uploads = world.network.uploads
    if uploads:
        world.network.stray(uploads[number % len(uploads)])


async def jump(world: World, role: str, seconds: float) -> None:
    """A role's clock is wrong from here on."""
    wrong = world.offsets[role] + seconds
    world.watch.steady &= role != "shuffler"
    world.watch.setbacks += 1
    world.offsets[role] = max(-LARGEST_OFFSET, min(LARGEST_OFFSET, wrong))


async def switch(world: World, target: str) -> None:
    """From here on everybody talks to the other replica."""
    world.primary[target] = next(one for one in REPLICAS if one != world.primary[target])


async def rotate(world: World) -> None:
    """A key is made, pinned and activated; or as much of it as there is an answer to."""
    made = await world.ask("coordinator", "POST", "/keys")
    if made is None or not made.is_success:
        return
    key = made.json()
    with (world.folder / "pins").open("a") as pins:
        pins.write(f"{key['public']}\n")
    await world.ask("coordinator", "POST", f"/keys/{key['id']}/activate")


async def hog(world: World, seconds: float) -> None:
    """A stranger's node takes all slots that it gets, again and again, and never reports."""
    end = world.loop.time() + seconds
    while world.loop.time() < end:
        await squat(world, N, garbage=False)
        await asyncio.sleep(HOG_SECONDS)


async def squat(world: World, slots: int, garbage: bool) -> None:
    """A stranger's node takes leases, and uses none of them, or sends what does not open."""
    batches = world.open_batches()
    if not batches:
        return
    headers = {"Authorization": f"Bearer {world.stranger}"}
    batch_id, report_bytes = batches[0]
    users = [user_of("stranger", world.strangers + number) for number in range(slots)]
    world.strangers += slots
    path = f"/batches/{batch_id}"
    wanted = {"users": users}
    reply = await world.ask("shuffler", "POST", f"{path}/leases", headers=headers, json=wanted)
    if reply is None or not reply.is_success or not garbage:
        return
    leases = reply.json()["leases"]
    body = b"".join(frame(lease["lease"], bytes(report_bytes)) for lease in leases)
    await world.ask("shuffler", "POST", f"{path}/reports", headers=headers, content=body)


async def abandon(world: World) -> None:
    """The shuffler's operator gives the oldest open batch up."""
    for batch_id, _ in world.open_batches()[:1]:
        await world.ask("shuffler", "POST", f"/batches/{batch_id}/abandon")


async def create(world: World, number: int) -> None:
    """A run is created, perhaps once more."""
    spec = run_spec(number, world.aggregation).model_dump_json()
    await world.ask("coordinator", "POST", "/runs", content=spec)


async def stop(world: World, number: int) -> None:
    """A run is stopped."""
    await world.ask("coordinator", "POST", f"/runs/{run_spec(number).run_id}/stop")


ACTIONS: dict[str, Callable[..., Awaitable[None]]] = {
    "advance": advance,
    "kill": kill,
    "kill-all": kill_all,
    "pause": pause,
    "full": full,
    "fault": fault,
    "replay": replay,
    "jump": jump,
    "switch": switch,
    "rotate": rotate,
    "hog": hog,
    "slow": slow,
    "copy": copy,
    "restore": restore,
    "squat": squat,
    "abandon": abandon,
    "create": create,
    "stop": stop,
}
