"""Three live processes and the simulator's per-user path have the same private counts.

Through the test entry point: noise, policy draws and environments are keyed by (run, batch, slot),
so the equality is exact, batch by batch, although thousands of reports arrive in any order.
"""

import math
import time
from pathlib import Path

import numpy as np

from coordinator.counts import private_counts
from coordinator.specs import RunSpec
from deploy.follow import run_to_end
from deploy.local import LocalConfig, LocalNetwork
from deploy.network import operator_client
from deploy.operator import Operator
from deploy.presets import Preset
from experiments.per_user import run_per_user
from node_client.environments.registry import Parameter, make

RUN_ID = "5e" * 16
PARAMETERS: dict[str, Parameter] = {"states": 3, "horizon": 3}


def spec() -> RunSpec:
    return RunSpec(
        run_id=RUN_ID,
        name="agreement",
        environment="RiverSwim-v0",
        states=3,
        actions=2,
        horizon=3,
        episodes=600,
        epsilon=4.0,
        beta=1e-3,
        options={"first_stage": 60},
        test_seed=11,
    )


def test_private_counts_are_equal_batch_by_batch(tmp_path: Path) -> None:
    config = LocalConfig(
        folder=tmp_path,
        environment="RiverSwim-v0",
        environment_parameters=PARAMETERS,
        nodes=3,
        max_epsilon=4.0,
        max_beta=1e-3,
        test_entry=True,
    )
    with LocalNetwork(config) as network:
        client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
        with Operator(client) as operator:
            summary = run_to_end(operator, Preset(spec(), PARAMETERS), tmp_path, time.monotonic())
            count = len(operator.deployments(RUN_ID))
            live = [operator.deployment(RUN_ID, index) for index in range(count)]
    batches, learned = run_per_user(spec(), RUN_ID, make("RiverSwim-v0", **PARAMETERS))
    assert len(batches) == count > 3
    for batch, detail in zip(batches, live, strict=True):
        expected = private_counts(batch.descriptor, batch.histogram)
        assert detail["batch_id"] == batch.descriptor.batch_id
        np.testing.assert_array_equal(detail["counts"]["transitions"], expected.transitions)
        np.testing.assert_array_equal(detail["counts"]["visits"], expected.visits)
        if expected.rewards is not None:
            np.testing.assert_array_equal(detail["counts"]["rewards"], expected.rewards)
    assert summary["policy"] == learned.policy.tolist()
    assert summary["episodes"] == summary["reports_accepted"] == 600
    assert summary["messages_forwarded"] == summary["messages_counted"]
    assert math.isinf(float(summary["epsilon"])), "seeded noise protects nobody, and says so"
