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
    summary: str
    severity: str = "warning"
    labels: tuple[tuple[str, str], ...] = ()


JOB = (("job", "riffle-shuffler"),)
ONE = (*JOB, ("instance", "a:8401"))
OF_ONE = '{job="riffle-shuffler",instance="a:8401"}'
REQUESTS = 'riffle_requests_total{job="riffle-shuffler",status="500"}'
STEPS = 'riffle_coordinator_steps_failed_total{problem="unreachable"}'
CERTIFICATE = 'riffle_certificate_end_seconds{job="riffle-shuffler"}'
DISK = 'riffle_shuffler_disk_free_bytes{job="riffle-shuffler"}'
DROPPED = 'riffle_shuffler_reports_dropped{reason="seal"}'
WAITING = 'riffle_shuffler_batches{state="sealed"}'
SITUATIONS = {
    "RiffleDown": Situation(
        f"up{OF_ONE}",
        "1x4 0x20",
        6,
        7,
        "a:8401 (riffle-shuffler) does not answer",
        "critical",
        ONE,
    ),
    "RiffleNotReady": Situation(
        f"riffle_ready{OF_ONE}",
        "1x4 0x20",
        9,
        10,
        "a:8401 (riffle-shuffler) is not ready",
        "critical",
        ONE,
    ),
    # The clock of these tests starts at 0, and 30 days are 2,592,000 seconds.
    "RiffleCertificateEnds": Situation(
        CERTIFICATE,
        "2592300x4 2500000x9",
        4,
        5,
        "a TLS certificate of riffle-shuffler ends soon",
        labels=JOB,
    ),
    "RiffleErrors": Situation(
        REQUESTS,
        "0x4 20+20x30",
        9,
        12,
        "riffle-shuffler answers requests with 5xx",
        "critical",
        JOB,
    ),
    "RiffleDiskLow": Situation(
        DISK, "2e9x4 1e9x20", 9, 10, "riffle-shuffler has less than 1 GiB of disk left", labels=JOB
    ),
    # A single report that was lost is enough. Its reason is exported as 0 from the start.
    "RiffleReportsDropped": Situation(
        DROPPED, "0x4 1x9", 4, 5, "reports were dropped before their batch was handed over"
    ),
    "RiffleBatchWaits": Situation(
        WAITING, "0x4 1x90", 64, 65, "a complete batch waits for its coordinator"
    ),
    "RiffleMessagesFail": Situation(
        "riffle_coordinator_messages_failed", "0x4 1x9", 4, 5, "messages do not open"
    ),
    "RiffleCountsSuspicious": Situation(
        "riffle_coordinator_suspicious_batches", "0x4 1x9", 4, 5, "a batch's counts are suspicious"
    ),
    "RiffleRunsWait": Situation(
        "riffle_coordinator_runs_waiting", "0x4 1x30", 19, 20, "runs have waited for 15 minutes"
    ),
    "RiffleStepsFail": Situation(
        STEPS,
        "0x4 1+1x40",
        14,
        17,
        "steps of runs fail (unreachable): lines run-waits and run-failed say what",
        labels=(("problem", "unreachable"),),
    ),
    "RiffleSeeded": Situation(
        "riffle_coordinator_seeded_batches",
        "0x4 1x9",
        4,
        5,
        "seeded batches, which are for tests only, were counted",
        "critical",
    ),
}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        assert not os.environ.get("RIFFLE_REQUIRE_PROMTOOL"), "promtool is required, and not here"
        pytest.skip("promtool is not installed")
    return found


def _expected(alert: str, situation: Situation, minute: int) -> dict[str, object]:
    labels = dict(situation.labels) | {"severity": situation.severity}
    alerting = {"exp_labels": labels, "exp_annotations": {"summary": situation.summary}}
    fires = [alerting] if minute == situation.fires else []
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
