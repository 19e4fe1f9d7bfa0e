"""The analyzer's key is rotated amid a live run, by the command, and nothing is lost."""

import json
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from riffle.common.protocol.verification import read_pins
from riffle.deploy.cli.main import build
from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.network.secrets import operator_client
from riffle.deploy.operator import Operator
from tests.system.agreement import RUN_ID, assert_equal_to_simulator, seeded_network, seeded_spec

pytestmark = pytest.mark.long


def rotate(network: LoopbackNetwork) -> None:
    arguments = [
        "network",
        "rotate-key",
        str(network.secrets),
        "--coordinator-url",
        network.coordinator_url,
        "--format",
        "json",
    ]
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == 0, result.stderr
    with Operator.of(network.secrets) as operator:
        newest = operator.keys()[-1]
    assert json.loads(result.stdout) == {"id": newest["id"], "state": newest["state"]}


def test_a_rotation_amid_a_live_run(tmp_path: Path) -> None:
    spec = seeded_spec(600)
    keys = tmp_path / "network" / "coordinator" / "analyzer_keys"
    with (
        LoopbackNetwork(seeded_network(tmp_path)) as network,
        Operator(
            operator_client(network.secrets, network.coordinator_url, network.operator_token)
        ) as operator,
    ):
        first = next(keys.glob("*.key"))
        nodes = network.processes["node"]
        nodes.send_signal(signal.SIGSTOP)  # so that no batch is over before it is seen
        try:
            operator.create_run(spec)
            while not any(row["state"] == "open" for row in operator.deployments(RUN_ID)):
                time.sleep(0.05)
        finally:
            nodes.send_signal(signal.SIGCONT)
        rotate(network)
        events = [event["kind"] for event in operator.events(RUN_ID)]
        assert events[-1] == "run_finished"
        assert_equal_to_simulator(operator, spec)
        assert operator.conservation(RUN_ID)["balanced"] is True
        listed = operator.keys()
        states = [key["state"] for key in listed]
        assert states == ["erased", "active"]
        assert not first.exists()
        rotate(network)  # the pins of the erased one go
        listed = operator.keys()
        current = frozenset(key["public"] for key in listed if key["state"] != "erased")
        assert read_pins(network.secrets / "nodes" / "analyzer_keys") == current
