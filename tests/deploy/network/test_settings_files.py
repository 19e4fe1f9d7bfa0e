"""The settings files that `riffle network init` writes are those that the roles need."""

import shutil
from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.network.secrets import init_network
from riffle.deploy.network.settings_files import (
    EVERYWHERE,
    read_addresses,
    settings_of,
    write_settings,
)
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.settings import Settings as ShufflerSettings

ELSEWHERE = "https://shuffler.example:8411,https://10.1.2.3:8411", "https://10.1.2.4"


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """A network of several machines; its folder was moved since it was made."""
    init_network(tmp_path / "made", *ELSEWHERE)
    write_settings(tmp_path / "made", *ELSEWHERE)
    return Path(shutil.move(tmp_path / "made", tmp_path / "network"))


def test_a_shuffler_starts_with_its_file(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # paths start at the file, wherever the process does
    settings = ShufflerSettings.load(network / "shuffler" / "settings")
    assert (settings.host, settings.port) == (EVERYWHERE, 8411)
    assert settings.data_dir.resolve() == network / "shuffler-data"
    assert settings.tls() is not None
    assert settings.demands().max_owner_share == 0.05
    hashes = {settings.operator_hash(), settings.coordinator_hash(), settings.metrics_hash()}
    assert len(hashes) == 3


def test_a_coordinator_starts_with_its_file(network: Path) -> None:
    settings = CoordinatorSettings.load(network / "coordinator" / "settings")
    assert (settings.host, settings.port) == (EVERYWHERE, 443)
    assert settings.shuffler_url == ELSEWHERE[0]
    assert settings.ca_file == network / "coordinator" / "ca.pem"
    assert settings.shuffler_token()
    KeyRing(settings.analyzer_keys_dir, settings.storage_cipher(), lambda: 0.0).check()


def test_a_node_starts_with_its_file_and_the_environment_wins(
    network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = network / "nodes" / "settings"
    settings = NodeSettings.load(file)
    assert settings.shuffler_url == ELSEWHERE[0]
    assert settings.demands(settings.make_environment()).required.dishonest_fraction == 0.05
    assert settings.users_file == network / "nodes" / "users.json"
    monkeypatch.setenv("RIFFLE_NODE_USERS_FILE", "mine.json")
    monkeypatch.setenv("RIFFLE_NODE_MAX_EPSILON", "0.5")
    changed = NodeSettings.load(file)
    assert (changed.users_file, changed.max_epsilon) == (Path("mine.json"), 0.5)


def test_no_file_is_replaced_and_no_address_changed(network: Path) -> None:
    file = network / "nodes" / "settings"
    file.write_text("RIFFLE_NODE_MAX_EPSILON=2\n")
    assert read_addresses(network, None, ELSEWHERE[1]) == ELSEWHERE
    write_settings(network, *ELSEWHERE)
    assert file.read_text() == "RIFFLE_NODE_MAX_EPSILON=2\n"
    with pytest.raises(
        ValueError, match=r"--coordinator-url is 'https://other', but .* says 'http"
    ):
        read_addresses(network, None, "https://other")
    with pytest.raises(ValueError, match=r"--shuffler-url must be https, not 'http://other'"):
        read_addresses(network / "new", "http://other", None)


def test_a_loopback_network_needs_no_tls(tmp_path: Path) -> None:
    urls = "http://127.0.0.1:8401", "http://localhost:8400"
    init_network(tmp_path, *urls)
    write_settings(tmp_path, *urls)
    for role in (ShufflerSettings, CoordinatorSettings):
        settings = role.load(tmp_path / role.prefix().split("_")[1].lower() / "settings")
        assert (settings.host, settings.tls()) == ("127.0.0.1", None)
    with pytest.raises(LocalError, match="cannot read settings file"):
        NodeSettings.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://127.0.0.2:8401,https://127.0.0.3:8402", "127.0.0.2"),
        ("http://localhost:8401", "127.0.0.1"),
        ("https://a.example", EVERYWHERE),
    ],
)
def test_a_server_listens_where_its_first_address_is(url: str, host: str, tmp_path: Path) -> None:
    assert settings_of("shuffler", url, url, tmp_path)["HOST"] == host
