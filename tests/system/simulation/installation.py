"""What a simulated network begins with: settings, keys, pins, users, enrolled nodes, stores."""

import asyncio
import hashlib
import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from riffle.common.mechanism.parameters import Aggregation
from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.wire import Enrolment, EnrolRequest
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.store.schema import meta
from riffle.coordinator.store.transactions import Store
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.core import Shuffler
from riffle.shuffler.settings import Settings as ShufflerSettings
from tests.coordinator import world as coordinator_world
from tests.node_client import world as keys
from tests.system.simulation.learner import N, steps

EPOCH = 1_800_000_000.0
COORDINATOR_TOKEN, OPERATOR_TOKEN = "coordinator", coordinator_world.TOKEN
USERS_A_NODE = 400
BATCH_SECONDS, LEASE_SECONDS = 60, 15
OWNERS, OWNER_SHARE = 3, 0.5
OWNER_SLOTS = int(OWNER_SHARE * N)
REPLICAS = ("a", "b")
AGGREGATIONS: tuple[Aggregation, ...] = ("messages", "sums")
ENVIRONMENT: dict[str, Any] = {"states": 2, "actions": 2, "horizon": 1}


def run_spec(number: int, aggregation: Aggregation = "messages") -> RunSpec:
    """The spec of the number-th run of a simulation."""
    return RunSpec(
        run_id=f"{number:032x}",
        name="simulated",
        learner="steps",
        environment="RiverSwim-v0",
        **ENVIRONMENT,
        episodes=3 * N,
        aggregation=aggregation,
        epsilon=20.0,
        beta=0.1,
        batch_seconds=BATCH_SECONDS,
        reissues=100,
        dishonest_fraction=OWNER_SHARE,
        test_seed=11,
    )


@lru_cache(4)
def shuffler_settings(folder: Path, accepted: int | None = None) -> ShufflerSettings:
    return ShufflerSettings(
        data_dir=folder / "shuffler",
        shuffler_id="shuffler-1",
        signing_key_file=folder / "shuffler.key",
        coordinator_key=coordinator_world.PUBLIC.hex(),
        coordinator_token_hash=hash_token(COORDINATOR_TOKEN),
        operator_token_hash=hash_token(OPERATOR_TOKEN),
        analyzer_keys_file=folder / "pins",
        max_epsilon=20.0,
        max_beta=0.1,
        aggregations=AGGREGATIONS,
        max_owner_share=OWNER_SHARE,
        lease_seconds=LEASE_SECONDS,
        accept_older_store=accepted,
        test_entry=True,
    )


def coordinator_settings(
    folder: Path, replica: str, accepted: int | None = None
) -> CoordinatorSettings:
    return coordinator_world.settings(
        folder / "coordinator",
        test_entry=True,
        aggregations=AGGREGATIONS,
        port=8400 + REPLICAS.index(replica),
        max_owner_share=OWNER_SHARE,
        accept_older_store=accepted,
    )


def users_key(folder: Path) -> Path:
    file = folder / "users_key"
    file.write_text("5e" * 32)
    return file


def node_settings(folder: Path) -> NodeSettings:
    return NodeSettings(
        shuffler_url="http://127.0.0.1",
        shuffler_id="shuffler-1",
        shuffler_key=keys.public(keys.SHUFFLER).hex(),
        coordinator_key=coordinator_world.PUBLIC.hex(),
        analyzer_keys_file=folder / "pins",
        credentials_file=folder / "credentials.json",
        users_file=folder / "users.json",
        users_key_file=users_key(folder),
        state_dir=folder / "state",
        **ENVIRONMENT,
        max_epsilon=20.0,
        max_beta=0.1,
        min_dishonest_fraction=0.0,
        aggregations=AGGREGATIONS,
        test_entry=True,
        workers=1,
    )


@cache
def learners() -> Registry:
    """Learners by name: it looks for installed packages, so it is made once."""
    return Registry({"steps": steps})


def prepare(folder: Path) -> None:
    """Keys, pins, users and enrolled nodes of a network that has not begun; stores are made."""
    folder.mkdir()
    (folder / "shuffler.key").write_text(keys.SHUFFLER.hex())
    settings = coordinator_settings(folder, "a")
    (folder / "pins").write_text(coordinator_world.ANALYZER.public.hex() + "\n")
    Store(settings.url, settings.head("coordinator", meta)).close()

    async def enrol() -> list[Enrolment]:
        core = Shuffler(shuffler_settings(folder), lambda: EPOCH)
        await core.start()
        requests = [
            EnrolRequest(name="node", owner=f"owner-{number}", users=10 * USERS_A_NODE)
            for number in range(OWNERS + 1)
        ]
        found = [await core.enrol(request) for request in requests]
        core.close()
        return found

    nodes = asyncio.run(enrol())
    documents = [node.model_dump() for node in nodes]
    (folder / "credentials.json").write_text(json.dumps(documents[:OWNERS]))
    (folder / "stranger.json").write_text(json.dumps(documents[OWNERS]))
    users = {
        node.node_id: [user_of(node.node_id, k) for k in range(USERS_A_NODE)]
        for node in nodes[:OWNERS]
    }
    (folder / "users.json").write_text(json.dumps(users))


def user_of(node: str, number: int) -> str:
    """A user id."""
    return hashlib.sha256(f"{node} {number}".encode()).hexdigest()[:32]
