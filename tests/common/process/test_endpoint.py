"""Addresses, verification of servers, and token hashes."""

import datetime
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from riffle.common.process.endpoint import (
    check_urls,
    hash_token,
    is_loopback,
    is_loopback_service,
    is_loopback_url,
    server_verification,
)
from riffle.common.protocol.errors import LocalError
from riffle.deploy.network.certificates import make_authority


def test_loopback_hosts_and_urls() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    others = (
        *("10.0.0.1", "0.0.0.0", "126.255.255.255", "128.0.0.1", "::", "::2", ""),  # noqa: S104
        *("example.org", "localhost.example.org", "127.0.0.1.example.org", "notlocalhost"),
        *("localhost-1", "127", "0", "1.127.0.0.1", "fe80::1"),
    )
    assert [host for host in others if is_loopback(host)] == []
    urls = (f"http://[{host}]:1" if ":" in host else f"http://{host}:1" for host in others)
    assert [url for url in urls if is_loopback_url(url)] == []
    assert is_loopback_url("http://[::1]:8401")
    assert not is_loopback_url("http://127.0.0.1.example.org")


@pytest.mark.parametrize(
    "url", ["https://shuffler:8401", "http://127.0.0.1:8401", "http://localhost", "http://[::1]:1"]
)
def test_urls_of_a_peer_are_accepted(url: str) -> None:
    assert check_urls("peer", url) == (url,)


@pytest.mark.parametrize(
    ("url", "message"),
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
def test_other_urls_are_refused(url: str, message: str) -> None:
    for replicas in (url, f"{url},https://peer:1", f"https://peer:1, {url}"):
        with pytest.raises(ValueError, match=message) as caught:
            check_urls("peer", replicas)
        assert repr(url) in str(caught.value)


def test_a_service_with_one_replica_elsewhere_is_not_on_loopback() -> None:
    here, elsewhere = "http://127.0.0.1:1", "https://peer:1"
    assert is_loopback_service(f"{here}, http://[::1]:2")
    assert not is_loopback_service(f"{here},{elsewhere}")
    assert not is_loopback_service(f"{elsewhere},{here}")


def test_a_private_ca_is_trusted_alone(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text(make_authority(datetime.datetime.now(datetime.UTC)).pem)
    context = server_verification(file)
    assert isinstance(context, ssl.SSLContext)
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    usual = server_verification(None)
    assert usual is server_verification(None)
    assert len(usual.get_ca_certs()) > 1
    assert usual.verify_mode is ssl.CERT_REQUIRED
    assert usual.check_hostname


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_the_error_names_an_unusable_ca_file(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LocalError, match=r"cannot use CA file .*ca\.pem"):
        server_verification(file)


def test_a_token_is_hashed_with_sha256() -> None:
    assert hash_token("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_no_web_framework_is_loaded() -> None:
    program = (
        "import sys, riffle.common.process.endpoint as _;"
        "sys.exit(bool({'fastapi', 'uvicorn'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
