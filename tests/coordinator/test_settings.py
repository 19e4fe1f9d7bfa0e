"""Settings: every one documented, every fault named."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.app import create_app, prepare_directory
from riffle.coordinator.settings import ALONE_SECONDS, PREFIX, Settings
from tests.coordinator.world import TOKEN, settings


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_settings_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = settings(tmp_path).model_dump(exclude_none=True, mode="json")
    for name, value in known.items():
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv(PREFIX + name.upper(), text)
    monkeypatch.setenv(f"{PREFIX}PORT", "9000")
    assert Settings.load() == settings(tmp_path, port=9000)
    assert Settings.load().url == f"sqlite:///{tmp_path / 'coordinator.sqlite'}"
    monkeypatch.setenv(f"{PREFIX}WORKERS", "0")
    with pytest.raises(LocalError, match="workers"):
        Settings.load()


@pytest.mark.parametrize("name", ["signing_key_file", "operator_token_hash_file"])
@pytest.mark.parametrize("text", ["", "00", "z" * 64])
def test_a_key_that_is_not_one_is_named(tmp_path: Path, name: str, text: str) -> None:
    known = settings(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(LocalError, match=name.upper()):
        create_app(known)


def test_leases_are_short_only_where_another_replica_may_wait_for_them(tmp_path: Path) -> None:
    shared = settings(tmp_path, store_url="postgresql://", lease_seconds=3)
    assert shared.replica().lease_seconds == 3
    assert settings(tmp_path, lease_seconds=3).replica().lease_seconds == ALONE_SECONDS


def test_tls_files_are_handed_on(tmp_path: Path) -> None:
    assert settings(tmp_path).tls() is None
    cert, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    tls = settings(tmp_path, host="coordinator", tls_cert_file=cert, tls_key_file=key).tls()
    assert tls is not None
    assert (tls.certificate, tls.key) == (cert, key)
    with pytest.raises(LocalError, match="set both RIFFLE_COORDINATOR_TLS_CERT_FILE"):
        settings(tmp_path, tls_cert_file=cert).tls()
    with pytest.raises(LocalError, match="mandatory off loopback: set RIFFLE_COORDINATOR_TLS"):
        settings(tmp_path, host="coordinator").tls()


def test_off_loopback_an_owner_may_not_hold_a_whole_batch(tmp_path: Path) -> None:
    """Finding A8."""
    remote = "https://shuffler:8401"
    assert settings(tmp_path, shuffler_url=remote).max_owner_share == 0.05
    assert settings(tmp_path).max_owner_share == 1.0, "on loopback all nodes are one owner's"
    here = "http://127.0.0.1:8401"
    for replicas in (remote, f"{here},{remote}", f"{remote},{here}"):
        assert settings(tmp_path, shuffler_url=replicas, max_owner_share=0.99)
        with pytest.raises(ValidationError, match="max_owner_share must be below 1"):
            settings(tmp_path, shuffler_url=replicas, max_owner_share=1.0)


def test_the_defaults_protect(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert found.aggregations == ("messages",)
    assert (found.test_entry, found.epoch_seconds) == (False, None)


def test_a_token_is_never_sent_in_clear(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="TLS is mandatory off loopback"):
        settings(tmp_path, shuffler_url="http://shuffler:8401")


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("operator_token_hash_file", "coordinator"),
        ("metrics_token_hash_file", "coordinator"),
        ("metrics_token_hash_file", TOKEN),
    ],
)
def test_no_two_callers_have_one_token(tmp_path: Path, name: str, token: str) -> None:
    (tmp_path / "a_hash").write_text(hash_token(token))
    with pytest.raises(LocalError, match="of one token"):
        create_app(settings(tmp_path, **{name: tmp_path / "a_hash"}))


def test_a_private_ca_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"cannot use CA file .*ca\.pem"):
        create_app(settings(tmp_path, ca_file=tmp_path / "ca.pem"))


def test_a_missing_token_is_named(tmp_path: Path) -> None:
    known = settings(tmp_path)
    (tmp_path / "shuffler_token_file").unlink()
    with pytest.raises(LocalError, match="SHUFFLER_TOKEN_FILE"):
        create_app(known)


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="data directory"):
        prepare_directory(tmp_path / "file" / "data")
