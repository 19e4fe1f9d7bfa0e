"""Answers that somebody in between altered: no count changes, or the run says what is wrong.

Everybody's requests pass an `AlteringProxy`: those of nodes and coordinator in front of the
shuffler, those of the operator in front of the coordinator. ``RIFFLE_ALTERED_RUNS`` says how many
runs, ``RIFFLE_ALTERED_SEED`` repeats a campaign's choices.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from riffle.coordinator.specs import RunSpec
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from tests.system.agreement import assert_whole, seeded_network, seeded_spec
from tests.system.proxy import ALTERATIONS, Alteration, AlteringProxy

pytestmark = pytest.mark.long

RUNS = int(os.environ.get("RIFFLE_ALTERED_RUNS", "3"))
SEED = int(os.environ.get("RIFFLE_ALTERED_SEED", str(time.time_ns() % 10**6)))
EPISODES = 120
SAID_SECONDS = 30.0

SHUFFLERS = {  # by call: how many answers to it every run has at least
    "GET /v1/batches": 2,
    "GET /v1/batches/{id}": 1,
    "POST /v1/batches/{id}/leases": 2,
    "POST /v1/batches/{id}/reports": 2,
    "PUT /v1/batches/{id}": 2,
    "GET /v1/batches/{id}/status": 2,
    "GET /v1/batches/{id}/messages": 2,
    "POST /v1/batches/{id}/acknowledgement": 2,
}
COORDINATORS = {
    "POST /v1/runs": 1,
    "GET /v1/runs/{id}/events": 1,
    "GET /v1/runs/{id}/deployments": 1,
    "GET /v1/runs/{id}/deployments/{index}": 2,
    "GET /v1/runs/{id}/conservation": 1,
    "GET /v1/runs/{id}/result": 1,
}
LASTING = (  # calls that every run needs, whose altered answers must show in its trouble
    "PUT /v1/batches/{id}",
    "GET /v1/batches/{id}/status",
    "GET /v1/batches/{id}/messages",
    "POST /v1/batches/{id}/acknowledgement",
    "GET /v1/batches",
    "POST /v1/batches/{id}/leases",
    "POST /v1/batches/{id}/reports",
)


class Network:
    """A live network with a proxy in front of each service."""

    def __init__(self, network: LoopbackNetwork, front: AlteringProxy, back: AlteringProxy) -> None:
        self.network, self.front, self.back = network, front, back

    def operator(self, url: str) -> Operator:
        return Operator(operator_client(self.network.secrets, url, self.network.operator_token))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("altered")
    network = LoopbackNetwork(seeded_network(folder, lease_seconds=3))
    with (
        AlteringProxy(network.shuffler_url) as back,
        AlteringProxy(network.coordinator_url) as front,
    ):
        network.shuffler_url = back.url
        with network:
            yield Network(network, front, back)


@pytest.mark.timeout(600 + 60 * RUNS)
def test_one_altered_answer_changes_no_count(live: Network) -> None:
    print(f"RIFFLE_ALTERED_SEED={SEED}")
    draws = random.Random(SEED)
    for number in range(RUNS):
        spec = seeded_spec(EPISODES, run_id=f"{number:032x}")
        least = SHUFFLERS | COORDINATORS
        call = draws.choice(sorted(least))
        kind, sent = draws.choice(ALTERATIONS), draws.random() < 0.5
        proxy = live.back if call in SHUFFLERS else live.front
        proxy.alter(Alteration(call, kind, draws.randrange(least[call]), sent=sent))
        began = time.monotonic()
        with live.operator(live.front.url) as operator:
            operator.create_run(spec)
            last = list(operator.events(spec.run_id or ""))[-1]
            assert last["kind"] == "run_finished", (call, kind, last)
            assert_whole(operator, spec)
        assert proxy.altered == 1, (call, kind)
        print(f"run {number + 1}: {kind!r} to {call}, {time.monotonic() - began:.1f} s", flush=True)


@pytest.mark.timeout(600 + 60 * RUNS)
def test_answers_that_stay_altered_show_until_they_are_mended(live: Network) -> None:
    draws = random.Random(SEED + 1)
    for number in range(-(-RUNS // 10)):
        spec = seeded_spec(EPISODES, run_id=f"{number + (1 << 64):032x}")
        call = LASTING[0] if RUNS < 10 else draws.choice(LASTING)
        kind = draws.choice(ALTERATIONS)
        live.back.alter(Alteration(call, kind, skip=0, times=1 << 30))
        began = time.monotonic()
        with (
            live.operator(live.network.coordinator_url) as operator,
            mended(live, operator, spec) as said,
        ):
            last = list(operator.events(spec.run_id or ""))[-1]
            assert last["kind"] == "run_finished", (call, kind, last)
            assert_whole(operator, spec)
        seconds, trouble = said[0]
        print(f"{kind!r} to {call}: after {seconds:.1f} s {trouble!r}", flush=True)
        assert seconds < SAID_SECONDS, (call, kind)
        print(f"ended after {time.monotonic() - began:.1f} s")


@contextmanager
def mended(live: Network, operator: Operator, spec: RunSpec) -> Iterator[list[tuple[float, str]]]:
    """Creates the run; ends the alteration once the run says what is wrong.

    Seconds count from the newest batch: a poll under way before the alteration serves one yet.
    """
    said: list[tuple[float, str]] = []
    began = time.monotonic()
    operator.create_run(spec)

    def watch() -> None:
        newest, batches = began, 0
        with live.operator(live.network.coordinator_url) as watching:
            while not said and time.monotonic() < began + 4 * SAID_SECONDS:
                if (count := len(watching.deployments(spec.run_id or ""))) > batches:
                    newest, batches = time.monotonic(), count
                if trouble := watching.run(spec.run_id or "")["trouble"]:
                    said.append((time.monotonic() - newest, trouble))
                time.sleep(0.2)
        live.back.alter(None)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield said
    finally:
        watcher.join()
