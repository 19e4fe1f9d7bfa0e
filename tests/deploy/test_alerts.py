"""Prometheus' own check of the alert rules: each alert fires when it must, and not before.

Debian's package `prometheus` has promtool. Without it these tests are skipped, unless
RIFFLE_REQUIRE_PROMTOOL is set (CI sets it).
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"


class Situation(NamedTuple):
    """A series, one sample a minute; the last minute without an alert; the first with it."""

    series: str
    values: str
    quiet: int
    fires: int
    labels: tuple[tuple[str, str], ...] = ()


JOB = (("job", "riffle-shuffler"),)
REQUESTS = 'riffle_requests_total{job="riffle-shuffler",status="500"}'
STEPS = 'riffle_coordinator_steps_failed_total{problem="unreachable"}'
SITUATIONS = {
    "RiffleDown": Situation('up{job="riffle-shuffler"}', "1x4 0x20", 6, 7, JOB),
    "RiffleNotReady": Situation('riffle_ready{job="riffle-shuffler"}', "1x4 0x20", 9, 10, JOB),
    # The clock of these tests starts at 0, and 30 days are 2,592,000 seconds.
    "RiffleCertificateEnds": Situation(
        'riffle_certificate_end_seconds{job="riffle-shuffler"}', "2592300x4 2500000x9", 4, 5, JOB
    ),
    "RiffleErrors": Situation(REQUESTS, "0x4 20+20x30", 9, 12, JOB),
    "RiffleDiskLow": Situation(
        'riffle_shuffler_disk_free_bytes{job="riffle-shuffler"}', "2e9x4 1e9x20", 9, 10, JOB
    ),
    # A single report that was lost is enough. Its reason is exported as 0 from the start.
    "RiffleReportsDropped": Situation(
        'riffle_shuffler_reports_dropped{reason="seal"}', "0x4 1x9", 4, 5
    ),
    "RiffleBatchWaits": Situation('riffle_shuffler_batches{state="sealed"}', "0x4 1x90", 64, 65),
    "RiffleMessagesFail": Situation("riffle_coordinator_messages_failed", "0x4 1x9", 4, 5),
    "RiffleCountsSuspicious": Situation("riffle_coordinator_suspicious_batches", "0x4 1x9", 4, 5),
    "RiffleRunsWait": Situation("riffle_coordinator_runs_waiting", "0x4 1x9", 4, 5),
    "RiffleStepsFail": Situation(STEPS, "0x4 1+1x40", 14, 17, (("problem", "unreachable"),)),
    "RiffleSeeded": Situation("riffle_coordinator_seeded_batches", "0x4 1x9", 4, 5),
}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        assert not os.environ.get("RIFFLE_REQUIRE_PROMTOOL"), "promtool is required, and not here"
        pytest.skip("promtool is not installed")
    return found


def _expected(alert: str, situation: Situation, minute: int) -> dict[str, object]:
    fires = [{"exp_labels": dict(situation.labels)}] if minute == situation.fires else []
    return {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": fires}


def test_every_alert_fires_when_it_must_and_not_before(promtool: str, tmp_path: Path) -> None:
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": each.series, "values": each.values}],
            "alert_rule_test": [
                _expected(alert, each, minute) for minute in (each.quiet, each.fires)
            ],
        }
        for alert, each in SITUATIONS.items()
    ]
    rules = str(PROMETHEUS / "rules.yaml")
    assert {f"alert: {alert}" for alert in SITUATIONS} == {
        line.strip(" -").split(" #")[0]
        for line in Path(rules).read_text().splitlines()
        if "alert:" in line
    }
    # JSON is YAML.
    (tmp_path / "tests.yaml").write_text(json.dumps({"rule_files": [rules], "tests": tests}))
    command = [promtool, "test", "rules", str(tmp_path / "tests.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_accepts_the_sample_configuration(promtool: str, tmp_path: Path) -> None:
    """It needs the files of a network, so it is checked in a copy of the operator's folder."""
    for name in ("prometheus.yaml", "rules.yaml"):
        shutil.copy(PROMETHEUS / name, tmp_path)
    for name in ("coordinator_metrics_token", "shuffler_metrics_token", "ca.pem"):
        (tmp_path / name).write_text("any")
    command = [promtool, "check", "config", str(tmp_path / "prometheus.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
