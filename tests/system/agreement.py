"""A small seeded run, and the check that live processes got the simulator's counts exactly."""

from pathlib import Path
from typing import Any

import numpy as np

from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.specs import RunSpec
from riffle.deploy.network.loopback import LoopbackConfig
from riffle.deploy.operator import Operator
from riffle.experiments.per_user import Users, run_per_user
from riffle.node_client.environments.registry import Parameter, make
from riffle.node_client.environments.tabular import Environment

RUN_ID = "5e" * 16
AGGREGATIONS: tuple[Aggregation, ...] = ("messages", "sums")
PARAMETERS: dict[str, Parameter] = {"states": 3, "horizon": 3}


def seeded_spec(
    episodes: int,
    trust: Trust = "shuffle",
    run_id: str = RUN_ID,
    aggregation: Aggregation = "messages",
) -> RunSpec:
    return RunSpec(
        run_id=run_id,
        name="agreement",
        environment="RiverSwim-v0",
        states=3,
        actions=2,
        horizon=3,
        episodes=episodes,
        trust=trust,
        aggregation=aggregation,
        epsilon=4.0,
        beta=1e-3,
        options={"first_stage": 60},
        test_seed=11,
    )


def seeded_network(folder: Path, **changes: Any) -> LoopbackConfig:
    return LoopbackConfig(
        folder=folder,
        environment="RiverSwim-v0",
        environment_parameters=PARAMETERS,
        nodes=3,
        max_epsilon=4.0,
        max_beta=1e-3,
        trust_models=("shuffle", "local", "central"),
        aggregations=AGGREGATIONS,
        test_entry=True,
        **changes,
    )


def assert_equal_to_simulator(
    operator: Operator,
    spec: RunSpec,
    environment: Environment | None = None,
    registry: Registry | None = None,
) -> None:
    """Private counts equal, batch by batch, and the same policy learned."""
    environment = environment or make("RiverSwim-v0", **PARAMETERS)
    run_id = spec.run_id or ""
    count = len(operator.deployments(run_id))
    live = [operator.deployment(run_id, index) for index in range(count)]
    done, batches = run_per_user(spec, run_id, Users(environment), registry)
    assert len(batches) == count > 1
    for (descriptor, expected), detail in zip(batches, live, strict=True):
        assert detail["batch_id"] == descriptor.batch_id
        np.testing.assert_array_equal(detail["counts"]["transitions"], expected.transitions)
        np.testing.assert_array_equal(detail["counts"]["visits"], expected.visits)
        if expected.rewards is not None:
            np.testing.assert_array_equal(detail["counts"]["rewards"], expected.rewards)
    result = operator.result(run_id)
    assert result["policy"] == done.summary.policy.tolist()
    assert result["episodes"] == result["reports"] == spec.episodes
    assert result["messages_forwarded"] == result["messages_counted"]
    assert result["failed"] == 0


def assert_whole(operator: Operator, spec: RunSpec) -> None:
    """Every batch counted once, no accepted message missing or there twice, as the simulator."""
    run_id = spec.run_id or ""
    events = [event["kind"] for event in operator.events(run_id)]
    deployments = operator.deployments(run_id)
    assert events[-1] == "run_finished", events
    assert events.count("batch_counted") == events.count("batch_sealed") == len(deployments)
    flow = operator.conservation(run_id)
    assert flow["balanced"] is True, flow
    expected = sum(batch["expected"] for batch in flow["batches"])
    assert flow["accepted"] == flow["forwarded"] == flow["opened"] == expected
    assert flow["held"] == flow["dropped"] == flow["failed"] == 0
    assert_equal_to_simulator(operator, spec)
