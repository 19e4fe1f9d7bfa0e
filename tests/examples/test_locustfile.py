"""The sample for Locust, run by Locust against a network on loopback."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from riffle.deploy.load.feed import Feeder, manual_spec
from riffle.deploy.load.run import Target
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.secrets import enrol
from riffle.experiments.presets import riverswim_run

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_shuffler_accepts_the_reports_of_locust_s_users(tmp_path: Path) -> None:
    chosen = riverswim_run("locust", horizon=2, episodes=1_000, epsilon=1.0)
    config = LoopbackConfig(tmp_path, chosen.spec.environment, chosen.environment, nodes=0)
    with LoopbackNetwork(config) as network:
        enrol(network.secrets, network.shuffler_url, ["me"], 3, 1_000)
        target = Target(network.secrets, network.shuffler_url, network.coordinator_url)
        with Feeder(target.operator, manual_spec(chosen.spec), 1_000):
            words = ["-f", "examples/locustfile.py", "--csv", str(tmp_path / "locust")]
            words += ["--headless", "-u", "5", "-r", "5", "-t", "10s", "--only-summary"]
            done = subprocess.run(
                [sys.executable, "-m", "locust", *words],
                cwd=ROOT,
                env=os.environ | network.environment("node"),
                capture_output=True,
                text=True,
                check=False,
                timeout=90,
            )
            assert done.returncode == 0, done.stderr
        with (tmp_path / "locust_stats.csv").open() as stream:
            rows = {row["Name"]: row for row in csv.DictReader(stream)}
    assert int(rows["upload"]["Request Count"]) >= 5
    assert {row["Failure Count"] for row in rows.values()} == {"0"}
    assert int(rows["descriptor"]["Request Count"]) == 5
