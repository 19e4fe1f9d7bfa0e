"""An app's users against a live shuffler: interleaved events, and kills of the app's process.

RIFFLE_PARTICIPANT_USERS and RIFFLE_PARTICIPANT_KILLS make the test longer.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import RiffleError
from riffle.common.protocol.hpke import open_histogram
from riffle.node_client.episode import PreparedBatch, encode_episode
from riffle.node_client.participant import Participant
from tests.node_client import world
from tests.system.test_node_shuffler import (
    COORDINATOR_TOKEN,
    call,
    deposit,
    node_settings,
    running,
    shuffler_settings,
)

USERS = int(os.environ.get("RIFFLE_PARTICIPANT_USERS", "24"))
KILLS = int(os.environ.get("RIFFLE_PARTICIPANT_KILLS", "1"))
APP = "import sys; from tests.system.test_participant import app; app(*sys.argv[1:])"
ROOT = Path(__file__).parents[2]
QUITTERS = 4
"""One user in this many gives up after the first step."""
POLICY = ((1, 0, 1, 0), (0, 1, 1, 0))


def gives_up(number: int) -> bool:
    return number % QUITTERS == 1


async def person(participant: Participant, number: int) -> None:
    """A person's events, at random moments; what follows an action depends on who she is."""
    while True:
        try:
            lease = await participant.lease(f"person-{number}@example.org")
            break
        except RiffleError as error:
            if error.slug != "unavailable":
                return
            await asyncio.sleep(0.05)
    state = number % 4 if lease.state is None else lease.state
    for step in range(lease.step, world.SIZES.H):
        await asyncio.sleep(random.expovariate(20))
        following = (state + number) % 4
        lease.record(step, state, lease.act(step, state), float(number % 3 == 0), following)
        state = following
        if gives_up(number):
            lease.give_up()
            return
    await asyncio.sleep(random.expovariate(20))
    await lease.report()


def app(settings: str, users: str) -> None:
    """The app's process: it serves everybody at once and ends when all are done."""

    async def go() -> None:
        async with Participant(world.SIZES, **json.loads(settings)) as participant:
            people = [person(participant, number) for number in range(int(users))]
            await asyncio.gather(*people)

    asyncio.run(go())


def run_killed(settings: dict[str, Any], kills: int) -> int:
    """Runs the app, killing it ``kills`` times at random instants; returns how often it ran."""
    draws, command = random.Random(5), [sys.executable, "-c", APP, json.dumps(settings), str(USERS)]
    for run in range(kills + 1):
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
        try:
            process.wait(None if run == kills else 1.2 + draws.uniform(0, 0.012 * USERS))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return run + 1
    raise AssertionError("the app failed")


def truth() -> Any:
    """The counts of those who do not give up, each once."""
    counts = np.zeros((world.SIZES.H, 4, 2, 4, 2), dtype=np.int64)
    for number in range(USERS):
        state = number % 4
        for step in range(0 if gives_up(number) else world.SIZES.H):
            following = (state + number) % 4
            counts[step, state, POLICY[step][state], following, int(number % 3 == 0)] += 1
            state = following
    return counts.ravel()


def test_an_app_that_is_killed_again_and_again_reports_everybody_once(tmp_path: Path) -> None:
    with running(shuffler_settings(tmp_path)) as client:
        made = node_settings(tmp_path, client)
        (tmp_path / "users_key").write_text("5e" * 32)
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in made.model_dump(exclude_unset=True).items()
            if name not in {"simulated_users", "states", "horizon"}
        } | {"users_key_file": str(tmp_path / "users_key")}
        signed = deposit(
            client,
            n=USERS,
            test_seed=5,
            policies=(POLICY,),
            weights=(2**32,),
            episode_seconds=600,
            expires_at=int(time.time()) + 1_800,
        )
        context = parse(signed.descriptor.encode())
        d = context.descriptor
        runs = run_killed(settings, KILLS)
        status = call(client, "GET", f"/batches/{d.batch_id}/status", COORDINATOR_TOKEN).json()
        assert (status["state"], status["episodes"]) == ("sealed", USERS), runs
        body = call(client, "GET", f"/batches/{d.batch_id}/messages", COORDINATOR_TOKEN).content
    C = d.layout.counters
    histogram, failed = open_histogram(
        world.ANALYZER.private, context.message_info, body, d.layout.width, C
    )
    plan = PreparedBatch.of(d)
    noise = [encode_episode(plan, None, slot, test_entry=True) for slot in range(USERS)]
    assert failed == []
    counted = histogram[:C] - np.bincount(np.concatenate(noise), minlength=C + 1)[:C]
    assert np.array_equal(counted, truth())
