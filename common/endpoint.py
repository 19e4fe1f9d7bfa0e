"""Where services listen, whom they trust, how tokens are kept: what the settings of several roles
check alike. No web framework is loaded: nodes and the command line need this much and no more.
"""

import hashlib
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from riffle.common.errors import LocalError


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a server's certificate chain and private key."""

    certificate: Path
    key: Path


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local_url(url: str) -> bool:
    """Whether a URL's host is this machine."""
    return is_loopback(urlsplit(url).hostname or "")


def check_url(name: str, url: str) -> str:
    """The URL of a peer: https, or http on this machine.

    Raises:
        ValueError: it is neither; ``name`` is the setting it was given in.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, a port that is no number or beyond 65535
        is_one = False
    if not is_one:
        raise ValueError(f"{name} must be http://host:port or https://host:port")
    if parts.scheme == "http" and not is_local_url(url):
        raise ValueError(f"{name} must be https: TLS is mandatory off loopback")
    return url


def tls_files(host: str, certificate: Path | None, key: Path | None, prefix: str) -> Tls | None:
    """The TLS files of a server on ``host``; None on loopback without TLS.

    ``prefix`` is that of the service's environment variables, for the message.

    Raises:
        LocalError: ``invalid-spec``: one of the two is missing, or both are and others than this
            machine could connect.
    """
    if certificate is not None and key is not None:
        return Tls(certificate, key)
    if certificate is not None or key is not None:
        raise LocalError("invalid-spec", f"set both {prefix}TLS_CERT_FILE and _TLS_KEY_FILE")
    if not is_loopback(host):
        raise LocalError(
            "invalid-spec",
            f"TLS is mandatory off loopback: set {prefix}TLS_CERT_FILE and _TLS_KEY_FILE",
        )
    return None


def trusted(ca_file: Path | None) -> ssl.SSLContext | bool:
    """What an HTTP client verifies servers by: a private CA alone, or, without one, the usual ones.

    Raises:
        LocalError: ``unavailable``, the file cannot be used.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one
        raise LocalError("unavailable", f"cannot use CA file {ca_file}: {error}") from error


def hash_token(token: str) -> str:
    """SHA-256 of a token, hex: what a store keeps. Tokens have 256 random bits: no salt needed."""
    return hashlib.sha256(token.encode()).hexdigest()
