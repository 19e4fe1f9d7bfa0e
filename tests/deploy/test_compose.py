"""The containers' files agree with the program: settings, secrets, commands, ports, folders."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import DNSName, SubjectAlternativeName, load_pem_x509_certificate
from sqlalchemy import make_url
from typer.testing import CliRunner

from riffle.common.process.endpoint import split_urls
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.cli.main import build
from riffle.deploy.network.loopback import MEMORY
from riffle.deploy.network.secrets import ROLES, SHUFFLER_ID, init_network
from riffle.experiments.presets import preset
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.settings import Settings as ShufflerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
POSTGRES = (DEPLOY / "compose.postgres.yaml").read_text()
SETTINGS: dict[str, type[ShufflerSettings | CoordinatorSettings | NodeSettings]] = {
    "shuffler": ShufflerSettings,
    "coordinator": CoordinatorSettings,
    "nodes": NodeSettings,
}
PREFIXES = {
    "shuffler": "RIFFLE_SHUFFLER_",
    "coordinator": "RIFFLE_COORDINATOR_",
    "nodes": "RIFFLE_NODE_",
}


def anchors() -> dict[str, str]:
    """Plain values that compose.yaml names with & and uses with *."""
    return dict(re.findall(r"&([\w-]+) ([^\s\[{][^\n]*)$", COMPOSE, re.MULTILINE))


def plain(value: str) -> str:
    """A value as the container gets it."""
    value = re.sub(r"&[\w-]+ ", "", value.strip())
    value = re.sub(r"\*([\w-]+)", lambda match: anchors()[match[1]], value)
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value).strip("\"'")


def section(name: str) -> str:
    """The text of a top-level key."""
    match = re.search(rf"^{name}:\n((?:[ #].*\n|\n)+)", COMPOSE, re.MULTILINE)
    assert match
    return match[1]


def environment(role: str) -> dict[str, str]:
    """Environment variables of a role's container."""
    block = re.search(rf"^  {role}: &.*\n((?:    .*\n)+)", section("x-settings"), re.MULTILINE)
    assert block
    pairs = re.findall(r"^    (\w+): (.*)$", block[1], re.MULTILINE)
    return {name: plain(value) for name, value in pairs}


def commands() -> list[list[str]]:
    """Arguments of `riffle` in each container."""
    lists = re.findall(r"&[\w-]+\s+\[(.*)\]$", section("x-commands"), re.MULTILINE)
    return [[plain(word) for word in text.split(",")] for text in lists]


@pytest.fixture
def network(tmp_path: Path) -> Path:
    init_network(tmp_path)
    return tmp_path


def test_compose_sets_existing_settings_only() -> None:
    for role, prefix in PREFIXES.items():
        given = {name for name in environment(role) if name.startswith("RIFFLE_")}
        known = {prefix + name.upper() for name in SETTINGS[role].model_fields}
        assert given <= known


def test_init_creates_every_file_that_compose_names(network: Path) -> None:
    named = {Path(path) for path in re.findall(r"/network/([\w-]+/[\w.]+)", COMPOSE)}
    created = {file.relative_to(network) for file in network.rglob("*")}
    assert len(named) > 12
    assert named - created == {Path("nodes/credentials.json")}  # by `riffle network enrol`


@pytest.mark.parametrize("role", [*SETTINGS])
def test_role_starts_with_its_settings(
    role: str, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(role).items():
        mine = (f"/network/{role}/", f"/network/{role}-storage/")
        assert value.startswith(mine) or not value.startswith("/network")
        monkeypatch.setenv(name, value.replace("/network", str(network)))
    settings = SETTINGS[role].load()
    if isinstance(settings, NodeSettings):
        settings.demands(settings.make_environment())
        assert settings.shuffler_id == SHUFFLER_ID
        assert settings.ca_file == network / "nodes" / "ca.pem"
    if isinstance(settings, CoordinatorSettings):
        assert settings.tls() is not None
        assert settings.ca_file == network / "coordinator" / "ca.pem"
        assert len(settings.signing_key()) == 32
        KeyRing(settings.analyzer_keys_dir, settings.storage_cipher(), time.time).check()
        assert settings.shuffler_token() and settings.operator_hash()
    if isinstance(settings, ShufflerSettings):
        assert settings.tls() is not None
        assert settings.demands().shuffler_id == SHUFFLER_ID
        assert settings.coordinator_hash() != settings.operator_hash()


def test_node_settings_allow_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("nodes").items():
        monkeypatch.setenv(name, value)
    nodes, spec = NodeSettings.load(), preset("demo").spec
    environment_sizes = nodes.make_environment().sizes
    assert nodes.environment == spec.environment
    assert environment_sizes == spec.sizes
    assert spec.epsilon <= nodes.max_epsilon
    assert spec.beta <= nodes.max_beta
    assert spec.dishonest_fraction >= nodes.min_dishonest_fraction


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_every_command_exists_with_its_options(arguments: list[str]) -> None:
    result = CliRunner().invoke(build(arguments), [*arguments, "--help"])
    assert result.exit_code == 0, result.stderr


def test_compose_runs_every_command_in_order() -> None:
    names = [" ".join(arguments[:2]) for arguments in commands()]
    assert names == [
        "network init",
        "shuffler",
        "network enrol",
        "coordinator",
        "node",
        "run demo",
    ]


def test_ports_are_the_same_everywhere() -> None:
    script = (DEPLOY / "ci-compose.sh").read_text()
    for role, port in (("shuffler", "8401"), ("coordinator", "8400")):
        assert environment(role)[f"{PREFIXES[role]}PORT"] == port
        assert SETTINGS[role].model_fields["port"].default == int(port)
        assert f"https://{role}:{port}" in COMPOSE
        assert f"https://localhost:{port}/readyz" in COMPOSE
        assert f"{role.upper()}_PORT={port}" in script


def test_image_has_the_memory_settings_of_a_loopback_network() -> None:
    image, advice = (DEPLOY / "Dockerfile").read_text(), DEPLOY.parent / "docs" / "operations.md"
    for name, value in MEMORY.items():
        assert f" {name}={value} " in image
        assert f"`{name}={value}`" in advice.read_text()


def test_every_role_has_a_folder_of_its_own() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for role in ROLES:
        assert f"/network/{role} " in dockerfile
        assert f"{role}-secrets:/network/{role}" in COMPOSE


# ---- the overlay with PostgreSQL and replicas ----------------------------------------------------


def merged() -> dict[str, Any]:
    """Services of both files together, as Compose itself merges them."""
    version = ["docker", "compose", "version"]
    if not shutil.which("docker") or subprocess.run(version, check=False).returncode:
        pytest.skip("Docker's Compose plugin is not installed")
    files = ("-f", "compose.yaml", "-f", "compose.postgres.yaml")
    command = ["docker", "compose", *files, "config", "--format", "json"]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, check=True)
    services: dict[str, Any] = json.loads(done.stdout)["services"]
    return services


def volumes(service: dict[str, Any]) -> dict[str, str]:
    return {volume["target"]: volume["source"] for volume in service["volumes"]}


@pytest.mark.parametrize("role", ["shuffler", "coordinator"])
def test_replicas_differ_in_their_names_only(role: str) -> None:
    services = merged()
    first, second = services[role], services[f"{role}-2"]
    assert second.pop("ports", None) is None
    first.pop("ports", None)
    assert first == second
    assert volumes(first)["/store"] == volumes(services[f"{role}-store"])["/store"]
    store = make_url(first["environment"][f"{PREFIXES[role]}STORE_URL"])
    assert store.drivername == "postgresql+psycopg" and store.query["host"] == "/store"
    given = {name for name in first["environment"] if name.startswith("RIFFLE_")}
    assert given <= {PREFIXES[role] + name.upper() for name in SETTINGS[role].model_fields}


def test_databases_are_separate_and_on_no_network() -> None:
    services = merged()
    shuffler, coordinator = services["shuffler-store"], services["coordinator-store"]
    for store in (shuffler, coordinator):
        assert store["network_mode"] == "none"
        assert not any(target.startswith("/network") for target in volumes(store))
    assert not set(volumes(shuffler).values()) & set(volumes(coordinator).values())


def test_callers_use_the_names_of_replicas_in_the_certificates(tmp_path: Path) -> None:
    services = merged()
    assert not {"--shuffler-url", "--coordinator-url"} & set(services["run"]["command"])
    words = services["init"]["command"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    init_network(tmp_path, given["--shuffler-url"], given["--coordinator-url"])
    callers = {
        "shuffler": [
            services["nodes"]["environment"]["RIFFLE_NODE_SHUFFLER_URL"],
            services["coordinator"]["environment"]["RIFFLE_COORDINATOR_SHUFFLER_URL"],
        ],
        "coordinator": [given["--coordinator-url"]],
    }
    for role, texts in callers.items():
        pem = (tmp_path / role / "tls.pem").read_bytes()
        names = load_pem_x509_certificate(pem).extensions.get_extension_for_class(
            SubjectAlternativeName
        )
        known = set(names.value.get_values_for_type(DNSName))
        for text in texts:
            hosts = {make_url(url).host for url in split_urls(text)}
            assert hosts == {role, f"{role}-2"} <= known


def test_commands_of_the_overlay_exist() -> None:
    for arguments in re.findall(r"&[\w-]+-command\s+\[(.*)\]$", POSTGRES, re.MULTILINE):
        words = [word.strip().strip('"') for word in arguments.split(",")]
        result = CliRunner().invoke(build(words), [*words, "--help"])
        assert result.exit_code == 0, result.stderr


def test_scripts_run_python_without_the_files_beside_them() -> None:
    """Else deploy/operator.py takes the place of Python's own module, unless that was loaded."""
    scripts = [*DEPLOY.glob("*.sh")]
    lines = [line for script in scripts for line in script.read_text().splitlines()]
    runs = [line for line in lines if re.search(r"\bpython3 -", line) and "docker" not in line]
    assert len(runs) >= 5
    assert [line for line in runs if "python3 -I " not in line] == []
