"""Live processes over a network that loses, repeats and reorders: the counts are the undisturbed.

Everybody's requests to the shuffler go through a `proxy`. ``RIFFLE_LOSSY_RUNS`` says how many runs
with each aggregation, ``RIFFLE_LOSSY_SEED`` repeats a campaign's choices, though which request is
which the machine says.
"""

import os
import time
from pathlib import Path

import pytest

from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from tests.system.agreement import AGGREGATIONS, assert_whole, seeded_network, seeded_spec
from tests.system.proxy import FAULTS, Proxy

pytestmark = pytest.mark.long

RUNS = int(os.environ.get("RIFFLE_LOSSY_RUNS", "1"))
SEED = int(os.environ.get("RIFFLE_LOSSY_SEED", str(time.time_ns() % 10**6)))
EPISODES = 240


@pytest.mark.timeout(600 + 60 * RUNS)
def test_a_network_that_loses_repeats_and_reorders_changes_no_count(tmp_path: Path) -> None:
    print(f"RIFFLE_LOSSY_SEED={SEED}")
    network = LoopbackNetwork(seeded_network(tmp_path, lease_seconds=3))
    with Proxy(network.shuffler_url, SEED) as proxy:
        network.shuffler_url = proxy.url
        with network:
            client = operator_client(
                network.secrets, network.coordinator_url, network.operator_token
            )
            with Operator(client) as operator:
                for number, aggregation in enumerate(AGGREGATIONS * RUNS):
                    run_id = f"{number:032x}"
                    spec = seeded_spec(EPISODES, run_id=run_id, aggregation=aggregation)
                    operator.create_run(spec)
                    proxy.faulty = True
                    last = list(operator.events(spec.run_id or ""))[-1]
                    proxy.faulty = False
                    assert last["kind"] == "run_finished"
                    assert_whole(operator, spec)
                    print(f"run {number + 1}: {dict(proxy.befell)}", flush=True)
    assert set(FAULTS) <= set(proxy.befell)
