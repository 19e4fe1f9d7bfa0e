"""Addresses, TLS files, trust and tokens: what several roles' settings check alike."""

import datetime
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from riffle.common.process.endpoint import (
    check_url,
    hash_token,
    is_loopback,
    is_loopback_url,
    server_verification,
    tls_files,
)
from riffle.common.protocol.errors import LocalError
from riffle.deploy.network.certificates import make_authority


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    others = ("10.0.0.1", "0.0.0.0", "example.org", "localhost.example.org", "")  # noqa: S104
    assert not any(is_loopback(host) for host in others)
    assert is_loopback_url("http://[::1]:8401")
    assert not is_loopback_url("http://127.0.0.1.example.org")


@pytest.mark.parametrize(
    "url", ["https://shuffler:8401", "http://127.0.0.1:8401", "http://localhost", "http://[::1]:1"]
)
def test_a_peers_url(url: str) -> None:
    assert check_url("peer", url) == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://shuffler:8401", "peer must be https"),
        ("http://10.0.0.1", "peer must be https"),
        ("http://127.0.0.1@example.org", "peer must be https"),
        ("ftp://127.0.0.1", "http://host:port or https://host:port"),
        ("127.0.0.1:8401", "http://host:port or https://host:port"),
        ("https://", "http://host:port or https://host:port"),
        ("http://[::1", "http://host:port or https://host:port"),
        ("https://shuffler:99999", "http://host:port or https://host:port"),
        ("https://shuffler:0", "http://host:port or https://host:port"),
        ("https://shuffler:x", "http://host:port or https://host:port"),
    ],
)
def test_what_is_no_peers_url(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_url("peer", url)


def test_tls_files() -> None:
    certificate, key = Path("tls.pem"), Path("tls.key")
    for host in ("127.0.0.1", "shuffler"):
        found = tls_files(host, certificate, key, "P_")
        assert found is not None
        assert (found.certificate, found.key) == (certificate, key)
    assert tls_files("localhost", None, None, "P_") is None


@pytest.mark.parametrize(
    ("host", "certificate", "key", "told"),
    [
        ("127.0.0.1", Path("tls.pem"), None, "set both P_TLS_CERT_FILE and _TLS_KEY_FILE"),
        ("127.0.0.1", None, Path("tls.key"), "set both P_TLS_CERT_FILE and _TLS_KEY_FILE"),
        ("shuffler", Path("tls.pem"), None, "set both"),
        ("shuffler", None, None, "TLS is mandatory off loopback: set P_TLS_CERT_FILE"),
        ("::", None, None, "TLS is mandatory off loopback"),
    ],
)
def test_half_of_tls_is_refused(
    host: str, certificate: Path | None, key: Path | None, told: str
) -> None:
    with pytest.raises(LocalError, match=told) as caught:
        tls_files(host, certificate, key, "P_")
    assert caught.value.slug == "invalid-spec"


def test_a_private_ca_is_trusted_alone(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text(make_authority(datetime.datetime.now(datetime.UTC)).pem)
    context = server_verification(file)
    assert isinstance(context, ssl.SSLContext)
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert server_verification(None) is True


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_ca_file_that_is_none_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LocalError, match=r"cannot use CA file .*ca\.pem"):
        server_verification(file)


def test_a_tokens_hash() -> None:
    assert hash_token("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_no_web_framework_is_loaded() -> None:
    program = (
        "import sys, riffle.common.process.endpoint as _;"
        "sys.exit(bool({'fastapi', 'uvicorn'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
