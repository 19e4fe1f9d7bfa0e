"""`riffle doctor` finds faults of a network's files, clocks and variables."""

import datetime
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from riffle.deploy.network import doctor
from riffle.deploy.network.doctor import Finding
from riffle.deploy.network.loopback import MEMORY
from riffle.deploy.network.secrets import init_network
from riffle.deploy.network.settings_files import write_settings

DEPLOY = Path(__file__).parents[3] / "deploy"
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    init_network(folder)
    return folder


def wrong(findings: list[Finding]) -> list[str]:
    return [finding.detail for finding in findings if not finding.ok]


def test_a_fresh_network_passes_every_check(network: Path) -> None:
    findings = [
        *doctor.check_secrets(network),
        *doctor.check_tokens(network),
        *doctor.check_encryption(network),
        *doctor.check_certificates(network, NOW),
        *doctor.check_variables({"RIFFLE_NODE_WORKERS": "2", "RIFFLE_CI_SECONDS": "3", "PATH": ""}),
    ]
    assert wrong(findings) == []
    assert {finding.check for finding in findings} == {
        "secrets",
        "tokens",
        "encryption",
        "certificates",
    }


@pytest.mark.parametrize("name", ["signing_key", "analyzer_keys"])
def test_a_private_key_in_clear_is_reported(tmp_path: Path, name: str) -> None:
    init_network(tmp_path)
    file = tmp_path / "coordinator" / name
    if file.is_dir():
        file = next(file.glob("*.key"))
    file.write_text("00" * 32)
    assert wrong(list(doctor.check_encryption(tmp_path))) == [
        f"{file} is not encrypted: good for a demonstration on one machine only"
    ]


def test_a_file_that_others_can_read_is_reported(tmp_path: Path) -> None:
    init_network(tmp_path)
    file = next((tmp_path / "coordinator" / "analyzer_keys").glob("*.key"))
    file.chmod(0o640)
    assert wrong(list(doctor.check_secrets(tmp_path))) == [
        f"others can read {file}; say chmod go= on it"
    ]


def test_nodes_without_credentials_keys_or_people_are_reported(tmp_path: Path) -> None:
    init_network(tmp_path)
    write_settings(tmp_path, "https://localhost:8401", "https://localhost:8400")
    nodes, ids = tmp_path / "nodes", ("ab" * 16, "cd" * 16)
    of_two = [{"node_id": name, "token": "t"} for name in ids]
    for name, content, text in (
        ("settings", None, "no node is enrolled yet: say 'riffle network enrol'"),
        ("credentials.json", json.dumps(of_two), f"cannot read {nodes / 'users_key'}"),
        ("users_key", "5e" * 32, f"cannot read {nodes / 'users.json'}"),
        ("users.json", json.dumps({ids[0]: ["anna"]}), f"no users of node {ids[1]}"),
    ):
        if content is not None:
            (nodes / name).write_text(content)
        (detail,) = wrong(list(doctor.check_settings_files(tmp_path)))
        assert text in detail
    (nodes / "users.json").write_text(json.dumps({ids[0]: ["anna"], ids[1]: ["ben", "cleo"]}))
    assert wrong(list(doctor.check_settings_files(tmp_path))) == []


def test_one_token_for_two_services_is_reported(tmp_path: Path) -> None:
    init_network(tmp_path)
    assert [finding.ok for finding in doctor.check_tokens(tmp_path)] == [True]
    ours, theirs = (tmp_path / role / "metrics_token_hash" for role in ("coordinator", "shuffler"))
    theirs.write_text(ours.read_text())
    (detail,) = wrong(list(doctor.check_tokens(tmp_path)))
    assert detail.startswith(f"{ours} and {theirs} are of one token; remove both")


def test_a_missing_network_is_reported_once_and_nothing_passes(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    everything = [
        *doctor.check_secrets(nowhere),
        *doctor.check_encryption(nowhere),
        *doctor.check_certificates(nowhere, NOW),
    ]
    assert [finding.detail for finding in everything] == [
        f"there is no network in {nowhere}; make it with 'riffle network init {nowhere}'"
    ]
    init_network(nowhere / "network")
    (one_too_high,) = doctor.check_secrets(nowhere)
    assert one_too_high.detail.endswith(f"one in {nowhere / 'network'}: name that folder")
    (nowhere / "network" / "shuffler-storage").rename(tmp_path / "elsewhere")
    (missing,) = wrong(list(doctor.check_secrets(nowhere / "network")))
    assert missing.startswith(f"there is no {nowhere / 'network' / 'shuffler-storage'}; make it")


@pytest.mark.parametrize(("days", "expected"), [(800, "ends in"), (900, "ended 20")])
def test_certificates_that_end_are_reported(network: Path, days: int, expected: str) -> None:
    details = wrong(list(doctor.check_certificates(network, NOW + datetime.timedelta(days=days))))
    assert len(details) == 6
    assert all(expected in detail for detail in details)


def test_a_damaged_certificate_is_reported(tmp_path: Path) -> None:
    init_network(tmp_path)
    (tmp_path / "nodes" / "ca.pem").write_text("x")
    assert "no certificate" in wrong(list(doctor.check_certificates(tmp_path, NOW)))[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RIFFLE_SHUFFLER_MAX_EPSLON", "did you mean RIFFLE_SHUFFLER_MAX_EPSILON?"),
        ("RIFFLE_SHUFLER_PORT", "did you mean RIFFLE_SHUFFLER_PORT?"),
        ("RIFFLE_NODE_X", "no role knows RIFFLE_NODE_X"),
    ],
)
def test_a_misspelt_variable_is_reported(name: str, expected: str) -> None:
    assert expected in wrong(list(doctor.check_variables({name: "1"})))[0]


def shuffler_variables(**changes: str) -> dict[str, str]:
    needed = {"DATA_DIR": "d", "SHUFFLER_ID": "s", "SIGNING_KEY_FILE": "k"} | changes
    return {f"RIFFLE_SHUFFLER_{name}": value for name, value in needed.items()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"HOST": "a.example"}, []),
        (
            {"HOST": "a.example", "MAX_OWNER_SHARE": "0.2"},
            ["RIFFLE_SHUFFLER_*: off loopback, max_o"],
        ),
        ({"HOST": "a.example", "SMALLEST_N": "2"}, ["RIFFLE_SHUFFLER_*: off loopback, smallest_n"]),
        (
            {"PORT": "99999"},
            ["RIFFLE_SHUFFLER_*: port: Input should be less than or equal to 65535, not 99999"],
        ),
        ({"TRUST_MODELS": "all"}, ["RIFFLE_SHUFFLER_*: "]),
        ({"SETTINGS_FILE": "/nowhere"}, ["cannot read settings file /nowhere"]),
    ],
)
def test_settings_are_checked_where_there_are_any(
    changes: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(doctor.check_settings({"PATH": ""})) == []
    for name, value in shuffler_variables(**changes).items():
        monkeypatch.setenv(name, value)
    details = wrong(list(doctor.check_settings(os.environ)))
    assert len(details) == len(expected)
    for detail, start in zip(details, expected, strict=True):
        assert detail.startswith(start)
        assert "\n" not in detail


def test_a_clock_that_is_off_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(date: str) -> httpx.Response:
        return httpx.Response(200, headers={"Date": date}, text="ok")

    monkeypatch.setattr(doctor, "probe", lambda *_: answer("Fri, 15 Jan 2027 08:00:10 GMT"))
    assert "the clock of http://s is" in wrong(list(doctor.check_service("http://s", None)))[0]


def metrics_of(text: str) -> set[str]:
    """The metrics that expressions name, without the endings that Prometheus adds."""
    prefix = r"\briffle_(?:shuffler_|coordinator_)?([a-z_]+)"
    names = {re.sub(r"_(total|bucket)$", "", name) for name in re.findall(prefix, text)}
    return names - {"shuffler", "coordinator", ""}


def test_alerts_and_panels_name_metrics_and_alerts_are_documented() -> None:
    """Every series of a rule or a panel exists, and every alert is in the runbook."""
    rules = (DEPLOY / "prometheus" / "rules.yaml").read_text()
    runbook = (DEPLOY.parent / "docs" / "operations.md").read_text()
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    code = "".join(
        (DEPLOY.parent / file).read_text()
        for file in ("common/server/monitoring.py", "shuffler/metrics.py", "coordinator/metrics.py")
    )
    assert len(shown) > 12
    for name in metrics_of(rules + " ".join(shown)):
        assert f'{name}"' in code, name
    alerts = re.findall(r"alert: (\w+)", rules)
    assert len(alerts) == 12
    for alert in alerts:
        assert f"`{alert}`" in runbook, alert


def test_the_unit_file_is_accepted(tmp_path: Path) -> None:
    """Paths of the unit are not there, so systemd's own check reads a copy with ones that are."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (DEPLOY / "systemd" / "riffle@.service").read_text()
    unit = tmp_path / "riffle@shuffler.service"
    unit.write_text(
        re.sub(r"/opt/riffle\S+", "/bin/true", text).replace("User=riffle", "User=root")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], check=False, capture_output=True, text=True
    )
    complaints = [line for line in done.stderr.splitlines() if "riffle@" in line]
    assert not complaints
    for name, value in MEMORY.items():
        assert f"{name}={value}" in text
