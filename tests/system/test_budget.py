"""A study of three monthly runs over services, with a virtual month of seconds.

Each person's lifetime limit lets them into two of the runs. A batch is open to the end of
the next month, and belongs to it.
"""

import json
import os
import time
from pathlib import Path

import pytest

from riffle.common.accounting import BatchEvent, repeated_user_guarantee
from riffle.common.process.heads import HeadFolder
from riffle.coordinator.batches.issue import calibrated
from riffle.coordinator.specs import RunSpec
from riffle.deploy.load.feed import constant_deployment, manual_spec
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.operator import Operator
from riffle.experiments.presets import preset
from riffle.node_client.ledger import NAME, Limit, PersonalLedger
from tests.deploy.cli.calls import document, riffle

MONTH, PEOPLE = 16, 300


def event_of(spec: RunSpec) -> BatchEvent:
    """What the accountant knows of a batch of all people."""
    made, layout = calibrated(spec, PEOPLE, None), spec.layout(None)
    fraction = spec.dishonest_fraction
    return BatchEvent(
        made.noise, made.padding, PEOPLE, fraction, layout.cells, layout.counters, made.word_bits
    )


class MonthlyNetwork(LoopbackNetwork):
    """A network whose people may report once a month, and have a lifetime limit."""

    limit: Limit

    def ledger(self) -> PersonalLedger:
        heads = HeadFolder(self.secrets / "nodes", NAME)
        return PersonalLedger(self.config.folder / "ledger.sqlite", heads, self.limit)

    def _shuffler(self, name: str) -> dict[str, object]:
        return super()._shuffler(name) | {"EPOCH_SECONDS": MONTH}

    def _coordinator(self, name: str) -> dict[str, object]:
        return super()._coordinator(name) | {"EPOCH_SECONDS": MONTH}

    def _node(self) -> dict[str, object]:
        files = self.secrets / "nodes"
        nodes = [node["node_id"] for node in json.loads((files / "credentials.json").read_text())]
        people = [f"person {number}" for number in range(PEOPLE)]
        listed = {node: people[i :: len(nodes)] for i, node in enumerate(nodes)}
        (files / "users.json").write_text(json.dumps(listed))
        (files / "users_key").write_text("5a" * 32)
        return super()._node() | {
            "SIMULATED_USERS": "false",
            "USERS_FILE": files / "users.json",
            "USERS_KEY_FILE": files / "users_key",
            "SHORTEST_EPOCH_SECONDS": MONTH,
            "LEDGER_FILE": self.ledger().file,
            "LIFETIME_EPSILON": self.limit.epsilon,
            "LIFETIME_BETA": self.limit.beta,
        }


@pytest.mark.skipif("RIFFLE_STUDY" not in os.environ, reason="minutes; RIFFLE_STUDY=1 runs it")
def test_a_limit_lets_people_into_two_of_three_monthly_runs(tmp_path: Path) -> None:
    chosen = preset("demo")
    base = chosen.spec.model_copy(update={"batch_seconds": 3_600, "reissues": 100})
    spec = manual_spec(base)
    event = event_of(spec)
    twice = repeated_user_guarantee([event] * 2, spec.beta).epsilon
    config = LoopbackConfig(
        tmp_path,
        spec.environment,
        chosen.environment,
        nodes=2,
        min_dishonest_fraction=spec.dishonest_fraction,
    )
    network = MonthlyNetwork(config)
    network.limit = Limit(1.0001 * twice, spec.beta)
    with network, Operator.of(network.secrets, network.coordinator_url) as operator:
        counted = []
        for _ in range(2):
            run = operator.create_run(spec)["id"]
            operator.deploy(run, constant_deployment(spec, PEOPLE))
            done = operator.wait(run, 0)
            assert done["state"] == "counted"
            counted.append(done["batch_id"])
        third = operator.create_run(spec)["id"]
        operator.deploy(third, constant_deployment(spec, PEOPLE))
        deadline = time.monotonic() + 120
        while "lifetime limit" not in (operator.run(third)["trouble"] or ""):
            assert time.monotonic() < deadline, operator.run(third)
            time.sleep(0.3)
        operator.stop(third)
        ledgers = [operator.ledger(run["id"]) for run in operator.runs()]
    histories = network.ledger().histories()
    assert len(histories) == PEOPLE
    for history in histories.values():
        assert [charge.batch_id for _, charge in history] == counted
        assert [charge.event and charge.event.event() for _, charge in history] == [event] * 2
    by_coordinator = [entry["epsilon_upper"] for of in ledgers for entry in of["entries"]]
    assert by_coordinator == [repeated_user_guarantee([event], spec.beta).epsilon] * 2
    log = (tmp_path / "logs" / "node.log").read_text()
    assert "people are not asked: with this batch they would pass their lifetime limit" in log
    shown = document(
        riffle(
            *("budget", str(network.ledger().file), "--head-dir", str(network.secrets / "nodes")),
            *(
                "--epsilon",
                str(network.limit.epsilon),
                "--beta",
                str(spec.beta),
                "--format",
                "json",
            ),
        )
    )
    assert {person["epsilon"] for person in shown["people"]} == {twice}
