"""Settings: from the environment, with an explanation for each thing that is wrong."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError
from riffle.shuffler.app import run
from riffle.shuffler.core import preflight
from riffle.shuffler.settings import PREFIX, Settings
from tests.shuffler.world import COORDINATOR_KEY, SHUFFLER_KEY, public, settings


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    files = {
        "SIGNING_KEY_FILE": SHUFFLER_KEY.hex(),
        "COORDINATOR_KEY_FILE": public(COORDINATOR_KEY).hex() + "\n",
        "COORDINATOR_TOKEN_HASH_FILE": hash_token("c"),
        "OPERATOR_TOKEN_HASH_FILE": hash_token("o"),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        monkeypatch.setenv(PREFIX + name, str(tmp_path / name))
    monkeypatch.setenv(PREFIX + "DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv(PREFIX + "SHUFFLER_ID", "shuffler-1")
    return monkeypatch


@pytest.mark.usefixtures("environment")
def test_every_key_and_hash_may_come_from_a_file() -> None:
    found = Settings.load()
    assert found.demands().coordinator_key == public(COORDINATOR_KEY)
    assert found.signing_key() == SHUFFLER_KEY
    assert found.public_key() == public(SHUFFLER_KEY)
    assert found.coordinator_hash() == hash_token("c")
    assert found.operator_hash() == hash_token("o")
    assert found.tls() is None
    preflight(found)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PORT", "http", "port"),
        ("PORT", "0", "port"),
        ("SHUFFLER_ID", "a name with spaces", "shuffler_id"),
        ("MAX_EPSILON", "0", "max_epsilon"),
        ("MIN_DISHONEST_FRACTION", "1", "min_dishonest_fraction"),
        ("SMALLEST_N", "1", "smallest_n"),
        ("LEASE_SECONDS", "-1", "lease_seconds"),
        ("MAX_OWNER_SHARE", "0", "max_owner_share"),
        ("MAX_OWNER_SHARE", "1.5", "max_owner_share"),
        ("MAX_BATCH_BYTES", "100", "max_batch_bytes"),
        ("RETENTION_SECONDS", "0", "retention_seconds"),
    ],
)
def test_a_wrong_value_is_named(
    environment: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    environment.setenv(PREFIX + name, value)
    with pytest.raises(LocalError, match=told):
        Settings.load()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"coordinator_key": None}, "set RIFFLE_SHUFFLER_COORDINATOR_KEY"),
        ({"coordinator_key": "abcd"}, "RIFFLE_SHUFFLER_COORDINATOR_KEY must be 32 bytes"),
        ({"coordinator_key": "no hex"}, "RIFFLE_SHUFFLER_COORDINATOR_KEY must be 32 bytes"),
        ({"operator_token_hash": None}, "set RIFFLE_SHUFFLER_OPERATOR_TOKEN_HASH"),
        ({"coordinator_token_hash": "00"}, "COORDINATOR_TOKEN_HASH must be 32 bytes"),
        (
            {"signing_key_file": Path("nowhere")},
            "RIFFLE_SHUFFLER_SIGNING_KEY_FILE: cannot read nowhere",
        ),
        ({"host": "0.0.0.0"}, "TLS is mandatory off loopback"),  # noqa: S104
        ({"host": "shuffler.example"}, "TLS is mandatory off loopback"),
        ({"tls_cert_file": Path("cert.pem")}, "set both"),
        ({"host": "0.0.0.0", "test_entry": True}, "needs a loopback HOST"),  # noqa: S104
        ({"operator_token_hash": hash_token("coordinator-token")}, "of one token: make one for"),
    ],
)
def test_preflight_reports_what_would_stop_the_start(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    wrong = settings(tmp_path, **changes)
    with pytest.raises(LocalError, match=told):
        run(wrong)


@pytest.mark.parametrize("token", ["coordinator-token", "operator-token", "another"])
def test_no_two_callers_have_one_token(tmp_path: Path, token: str) -> None:
    file = tmp_path / "metrics_hash"
    file.write_text(hash_token(token))
    given = settings(tmp_path, metrics_token_hash_file=file)
    if token == "another":
        preflight(given)
        return
    with pytest.raises(LocalError, match="of one token"):
        preflight(given)


SAFE = {"HOST": "shuffler.example"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"MIN_DISHONEST_FRACTION": "0.1", "MAX_OWNER_SHARE": "0.1", "SMALLEST_N": "10"}, None),
        ({"MAX_OWNER_SHARE": "0.25"}, "max_owner_share 0.25 must not be above .* 0.05"),
        ({"MAX_OWNER_SHARE": "1"}, "max_owner_share 1 must not be above"),
        ({"MIN_DISHONEST_FRACTION": "0"}, "above min_dishonest_fraction 0: .* raise the fraction"),
        ({"SMALLEST_N": "2"}, "smallest_n 2 must be at least 20"),
        ({"SMALLEST_N": "19"}, "smallest_n 19 must be at least 20"),
        ({"MAX_OWNER_SHARE": "0.01"}, "smallest_n 20 must be at least 100"),
    ],
)
def test_off_loopback_no_owner_can_break_the_guarantee(
    environment: pytest.MonkeyPatch, changes: dict[str, str], told: str | None
) -> None:
    """Finding A8: refused at the start, as plaintext is."""
    for name, value in (SAFE | changes).items():
        environment.setenv(PREFIX + name, value)
    if told is None:
        Settings.load()
        return
    with pytest.raises(LocalError, match=told):
        Settings.load()


def test_defaults_off_loopback_protect(environment: pytest.MonkeyPatch) -> None:
    """What an operator has not said allows nothing that is weaker."""
    environment.setenv(PREFIX + "HOST", "shuffler.example")
    found = Settings.load()
    demands = found.demands()
    assert (demands.trust_models, demands.aggregations) == (("shuffle",), ("messages",))
    assert (demands.guarantee.epsilon, demands.guarantee.beta) == (1.0, 1e-5)
    assert (demands.guarantee.dishonest_fraction, demands.max_owner_share) == (0.05, 0.05)
    assert (demands.smallest_n, demands.test_entry, demands.epoch_seconds) == (20, False, None)
    month = 31 * 86_400
    assert max(demands.max_batch_seconds, found.retention_seconds) <= month
    assert found.allowed_origins == (), "no web page's script is a node"


DEMANDED: dict[str, tuple[str, object]] = {
    "shuffler_id": ("shuffler_id", "another"),
    "coordinator_key": ("coordinator_key", "ab" * 32),
    "max_epsilon": ("guarantee", 0.5),
    "max_beta": ("guarantee", 1e-9),
    "min_dishonest_fraction": ("guarantee", 0.25),
    "trust_models": ("trust_models", ("local",)),
    "aggregations": ("aggregations", ("sums",)),
    "smallest_n": ("smallest_n", 77),
    "test_entry": ("test_entry", True),
    "max_batch_bytes": ("max_batch_bytes", 1 << 25),
    "max_batch_seconds": ("max_batch_seconds", 77),
    "max_episode_seconds": ("max_episode_seconds", 77),
    "max_owner_share": ("max_owner_share", 0.125),
    "epoch_seconds": ("epoch_seconds", 86_400),
    "max_upload_bytes": ("max_report_bytes", 1 << 31),
}


def test_every_demand_is_a_setting_that_reaches_the_rules(tmp_path: Path) -> None:
    """Each setting changes its own demand and no other, so none is dropped or swapped."""
    before = asdict(settings(tmp_path).demands())
    for name, (demand, value) in DEMANDED.items():
        after = asdict(settings(tmp_path, **{name: value}).demands())
        changed = {each for each in before if before[each] != after[each]}
        assert changed == {demand}, name
        found = after[demand]
        if demand == "guarantee":
            assert value in found.values() and value not in before[demand].values(), name
        elif name not in ("coordinator_key", "max_upload_bytes"):
            assert found == value, name
    reread = {"analyzer_keys"}  # the file of pins is read at each deposit
    assert {demand for demand, _ in DEMANDED.values()} == before.keys() - reread


def test_on_loopback_one_owner_may_run_everything(environment: pytest.MonkeyPatch) -> None:
    found = Settings.load()
    assert (found.max_owner_share, found.min_dishonest_fraction, found.smallest_n) == (1.0, 0.0, 2)
    environment.setenv(PREFIX + "MAX_OWNER_SHARE", "0.5")
    assert Settings.load().max_owner_share == 0.5


def test_tls_files_are_passed_on(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    tls = settings(tmp_path, tls_cert_file=cert, tls_key_file=key).tls()
    assert tls is not None
    assert (tls.certificate, tls.key) == (cert, key)


def test_a_url_chooses_another_store(tmp_path: Path) -> None:
    assert settings(tmp_path).url.startswith("sqlite:///")
    url = "postgresql+psycopg://riffle@db/riffle"
    assert settings(tmp_path, store_url=url).url == url
