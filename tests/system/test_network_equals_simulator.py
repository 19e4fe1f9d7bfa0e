"""Three live processes and the simulator's per-user path have the same private counts.

Through the test entry point: noise, policy draws and environments are keyed by (run, batch, slot),
so the equality is exact, batch by batch, although hundreds of reports arrive in any order. It holds
as well when every process is killed (SIGKILL) in the middle of a batch and started again: nothing
that was acknowledged is lost, nothing is counted twice, no batch is released short.
"""

import json
import math
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.deploy.follow import run_to_end
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from riffle.experiments.presets import Preset
from riffle.node_client.environments.tabular import riverswim
from tests.deploy.cli.calls import riffle
from tests.system.agreement import (
    PARAMETERS,
    RUN_ID,
    assert_equal_to_simulator,
    seeded_network,
    seeded_spec,
)
from tests.system.test_restore import rows, store, until

pytestmark = pytest.mark.long


def operator_of(network: LoopbackNetwork) -> Operator:
    client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
    return Operator(client)


@pytest.mark.parametrize(
    ("trust", "aggregation", "declared"),
    [
        ("shuffle", "messages", True),
        ("shuffle", "sums", False),
        ("local", "messages", False),
        ("central", "messages", True),
    ],
)
def test_private_counts_are_equal_batch_by_batch(
    trust: Trust, aggregation: Aggregation, declared: bool, tmp_path: Path
) -> None:
    """Also if the run declares RiverSwim's structure: then only possible transitions count.

    Sums are compared with the simulator's messages.
    """
    spec = seeded_spec(600, trust, aggregation=aggregation)
    if declared:
        support = riverswim(3, 3).declaration.support
        spec = spec.model_copy(update={"support": support, "homogeneous": True})
    with LoopbackNetwork(seeded_network(tmp_path)) as network, operator_of(network) as operator:
        summary = run_to_end(operator, Preset(spec, PARAMETERS), tmp_path, time.monotonic())
        assert_equal_to_simulator(operator, spec.model_copy(update={"aggregation": "messages"}))
        first = operator.deployment(RUN_ID, 0)["counts"]["transitions"]
        assert np.count_nonzero(first) <= (3 if declared else 18), "counters of step 0"
    assert summary["trust"] == trust
    assert summary["episodes"] == summary["reports_accepted"] == 600
    assert math.isinf(float(summary["epsilon"])), "seeded noise protects nobody, and says so"
    files = {"summary.json", "stages.csv", "ledger.csv", "deployments.csv", "regret.png"}
    assert files | {"manifest.json"} <= {file.name for file in tmp_path.iterdir()}


def reports(network: LoopbackNetwork) -> int:
    """How many the shuffler has taken so far."""
    ((found,),) = rows(store(network, "shuffler"), "SELECT coalesce(sum(reports), 0) FROM batches")
    return int(str(found))


def over(operator: Operator) -> bool:
    return bool(operator.run(RUN_ID)["state"] != "running")


def test_two_commands_say_the_same(tmp_path: Path) -> None:
    """What `riffle up` does of a test seed, `riffle simulate --per-user` repeats alone."""
    run = ["--learner", "ucbvi-shuffle", "--horizon", "3", "--param", "states=3"]
    run += ["--episodes", "300", "--epsilon", "8"]
    seed = ["--beta", "1e-3", "--test-seed", "7", "--format", "json"]
    up = riffle("up", *run, *seed, "--nodes", "3", "--workers", "1", "--out", str(tmp_path))
    assert up.exit_code == 0, up.stderr
    live = json.loads(up.stdout)
    assert live["epsilon"] == "Infinity", "seeded noise protects nobody, and says so"
    words = ["--per-user", "--seeds", "1", "--run-id", live["run_id"]]
    simulated = json.loads(riffle("simulate", *run, *seed, *words).stdout)
    assert simulated["policy"] == live["policy"]
    assert simulated["value_estimate_mean"] == live["value_estimate"]
    assert simulated["regret_mean"] == live["regret"]
    assert simulated["messages"] == live["messages_counted"]


def test_killing_every_process_changes_no_count(tmp_path: Path) -> None:
    spec = seeded_spec(900)
    victims = ["shuffler", "coordinator", "node", "shuffler", "coordinator"]
    config = seeded_network(tmp_path, lease_seconds=3)
    with LoopbackNetwork(config) as network, operator_of(network) as operator:
        network.processes["node"].send_signal(signal.SIGSTOP)
        operator.create_run(spec)
        killed = 0
        for victim in victims:
            if over(operator):
                break
            enough = reports(network) + 1
            network.processes["node"].send_signal(signal.SIGCONT)
            until(lambda enough=enough: over(operator) or reports(network) >= enough)  # type: ignore[misc]
            if reports(network) < enough:
                break  # the last report was in, and the coordinator had yet to say so
            killed += 1
            network.processes[victim].kill()
            network.processes[victim].wait()
            network.start(victim)
            network.processes["node"].send_signal(signal.SIGSTOP)  # so that the run is not over
            network.wait_ready("coordinator")
        assert killed >= 3, "the run was too short to say anything"
        network.processes["node"].send_signal(signal.SIGCONT)
        events = [event["kind"] for event in operator.events(RUN_ID)]
        assert events[-1] == "run_finished"
        assert events.count("batch_counted") == len(operator.deployments(RUN_ID))
        assert_equal_to_simulator(operator, spec)
