"""A server's TLS files, and its storage key, from its environment or from a file."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import StorageCipher
from riffle.common.server.settings import ServerSettings, Tls

KEY = bytes(range(32))


def storage_cipher(key: str | None, file: Path | None, host: str) -> StorageCipher:
    secret = None if key is None else SecretStr(key)
    settings = ServerSettings(
        host=host, port=1, storage_key=secret, storage_key_file=file, signing_key_file=Path("key")
    )
    return settings.storage_cipher()


def test_a_storage_key_from_environment_or_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY.hex() + "\n")
    sealed = StorageCipher(KEY).seal(b"x", "a")
    for given_key, given_file in ((KEY.hex(), None), (None, file)):
        assert storage_cipher(given_key, given_file, "192.0.2.1").open(sealed, "a") == b"x"
    assert storage_cipher(None, None, "127.0.0.1").seal(b"x", "a") == b"x"


@pytest.mark.parametrize(
    ("key", "file", "message"),
    [
        (None, None, "must be encrypted where others can connect"),
        ("zz", None, "64 hex digits"),
        ("00" * 31, None, "64 hex digits"),
        (None, "missing", "cannot read"),
        ("00" * 32, "missing", "set one of"),
    ],
)
def test_a_malformed_storage_key_is_refused(
    tmp_path: Path, key: str | None, file: str | None, message: str
) -> None:
    with pytest.raises(LocalError, match=message):
        storage_cipher(key, None if file is None else tmp_path / file, "192.0.2.1")


@pytest.mark.parametrize(
    ("storage_key", "name", "told"),
    [
        (None, None, "must be encrypted where others can connect"),
        (KEY, None, "is not encrypted, but a storage key is given"),
        (KEY, "analyzer key", "was made for something else"),
        (bytes(32), "signing key", "the key is another one"),
        (KEY, "signing key", None),
    ],
)
def test_off_loopback_a_signing_key_is_encrypted_under_its_own_name(
    tmp_path: Path, storage_key: bytes | None, name: str | None, told: str | None
) -> None:
    file, text = tmp_path / "key", b"ab" * 32
    file.write_bytes(text if name is None else StorageCipher(KEY).seal(text, name))
    secret = None if storage_key is None else SecretStr(storage_key.hex())
    settings = ServerSettings(host="192.0.2.1", port=1, storage_key=secret, signing_key_file=file)
    if told is None:
        assert settings.signing_key() == b"\xab" * 32
        return
    with pytest.raises(LocalError, match=told):
        settings.signing_key()


def tls_files(host: str, certificate: Path | None, key: Path | None) -> Tls | None:
    return ServerSettings(
        host=host, port=1, signing_key_file=Path(), tls_cert_file=certificate, tls_key_file=key
    ).tls()


def test_tls_files_are_optional_on_loopback() -> None:
    certificate, key = Path("tls.pem"), Path("tls.key")
    for host in ("127.0.0.1", "shuffler"):
        assert tls_files(host, certificate, key) == Tls(certificate, key)
    assert tls_files("localhost", None, None) is None


@pytest.mark.parametrize(
    ("host", "certificate", "key", "message"),
    [
        ("127.0.0.1", Path("tls.pem"), None, "set both TLS_CERT_FILE and _TLS_KEY_FILE"),
        ("127.0.0.1", None, Path("tls.key"), "set both TLS_CERT_FILE and _TLS_KEY_FILE"),
        ("shuffler", Path("tls.pem"), None, "set both"),
        ("shuffler", None, None, "TLS is mandatory off loopback: set TLS_CERT_FILE"),
        ("::", None, None, "TLS is mandatory off loopback"),
    ],
)
def test_half_of_tls_is_refused(
    host: str, certificate: Path | None, key: Path | None, message: str
) -> None:
    with pytest.raises(LocalError, match=message) as caught:
        tls_files(host, certificate, key)
    assert caught.value.slug == "invalid-spec"
