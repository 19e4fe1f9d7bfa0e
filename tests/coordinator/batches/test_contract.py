"""The coordinator's calls against the real shuffler, with users who encode and seal for real."""

import asyncio
import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from riffle.common.mechanism.randomness import SeededRandomness, SystemRandomness
from riffle.common.mechanism.shuffle_model import permutation
from riffle.common.mechanism.workflow import encode
from riffle.common.protocol.descriptor import SignedDescriptor, parse
from riffle.common.protocol.hpke import seal, seal_indices
from riffle.common.protocol.wire import LeaseReply, OpenBatches, UploadReply, frame
from riffle.coordinator.batches.shuffler_client import ShufflerClient
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.shuffler.app import create_app
from tests.coordinator.faults import outcome
from tests.coordinator.world import SHUFFLER_ID, drivers_end, parts, play, spec, toy_episode
from tests.shuffler import world as shuffler_world

URL = "http://shuffler"


def report(signed: SignedDescriptor) -> bytes:
    """A user's whole half: policy, episode, noise, both seals."""
    context, randomness = parse(signed.descriptor.encode()), SystemRandomness()
    d = context.descriptor
    word = int.from_bytes(randomness.read(4), "little")
    episode = toy_episode(d.mixture.pick(word), SeededRandomness.keyed(word))
    messages = encode(d.layout, d.batch_noise, d.padding, episode, randomness)
    messages = messages[permutation(messages.size, randomness)]
    key = bytes.fromhex(d.analyzer_key)
    sealed = seal_indices(key, context.message_info, messages, d.layout.width)
    return seal(bytes.fromhex(signed.batch_key), context.report_info, sealed)


async def serve_users(client: httpx.AsyncClient) -> None:
    """A node with as many users as there are slots."""
    served = 0
    while True:
        result = await client.get("/v1/batches", params={"wait": 5, "accepting": True})
        for batch in OpenBatches.model_validate_json(result.content).batches:
            path = f"/v1/batches/{batch.batch_id}"
            signed = SignedDescriptor.model_validate_json((await client.get(path)).content)
            numbers = range(served, served + batch.free_slots)
            users = [hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in numbers]
            served += len(users)
            leased = await client.post(f"{path}/leases", json={"users": users})
            leases = LeaseReply.model_validate_json(leased.content).leases
            body = b"".join(frame(lease.lease, report(signed)) for lease in leases)
            uploaded = await client.post(f"{path}/reports", content=body)
            results = UploadReply.model_validate_json(uploaded.content).results
            assert all(result.outcome == "accepted" for result in results)


def client(app: Any, token: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url=URL,
        headers={"Authorization": f"Bearer {token}"},
    )


def test_a_run_over_a_real_shuffler(tmp_path: Path) -> None:
    app = create_app(shuffler_world.settings(tmp_path, max_beta=0.01), time.time)
    called = client(app, shuffler_world.COORDINATOR_TOKEN)
    api = ShufflerClient(called)
    given = replace(parts(tmp_path, api), clock=time.time)

    async def act(coordinator: Coordinator) -> None:
        async with app.router.lifespan_context(app):
            assert await api.identity() == SHUFFLER_ID
            operator = client(app, shuffler_world.OPERATOR_TOKEN)
            enrolled = await operator.post(
                "/v1/nodes", json={"name": "node", "owner": "me", "users": 1000}
            )
            node = client(app, enrolled.json()["token"])
            serving = asyncio.create_task(serve_users(node))
            await coordinator.create(spec())
            await drivers_end()
            serving.cancel()
            await asyncio.wait([serving])
            await asyncio.gather(operator.aclose(), node.aclose(), api.close())

    play(given, act)
    result = outcome(tmp_path)
    assert result["state"][:2] == ("finished", "")
    assert [state[:2] for state in result["states"]] == [("counted", True)] * 2
    assert [entry.failed for entry in result["ledger"]] == [0, 0]
    assert [entry.opened for entry in result["ledger"]] == [e.messages for e in result["ledger"]]
    assert np.sum(result["histograms"][1]) == result["ledger"][1].opened
