"""Where services listen, whom they trust, how tokens are kept: what the settings of several roles
check alike. No web framework is loaded: nodes and the command line need this much and no more.

Several addresses of one service, its replicas: a request that one does not answer goes to the
next. Every request of Riffle's may be repeated, so nothing is asked whether the first one arrived.

Addresses are given as one text with commas. An address that failed is left alone for a while, and
for twice as long each time it failed again, unless all did. What a replica answers is an answer;
after "not possible now" (5xx) the next request goes elsewhere.
"""

import hashlib
import ipaddress
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from riffle.common.protocol.errors import LocalError


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


AWAY_SECONDS = 5.0
LONGEST_AWAY_SECONDS = 60.0
"""A host that is gone takes seconds of each try (its name, its address): one that refuses does not.
"""


def split_urls(text: str) -> tuple[str, ...]:
    """The addresses in a setting."""
    return tuple(url.strip() for url in text.split(","))


def check_urls(name: str, text: str) -> str:
    """The setting, if each of its addresses is a URL by `common.process.endpoint.check_url`.

    Raises:
        ValueError: one is not; ``name`` is the setting it was given in.
    """
    for url in split_urls(text):
        check_url(name, url)
    return text


class _Replicas:
    """Which address to try next. ``spread``: in turn; else the first that is not away."""

    def __init__(self, urls: Sequence[str], *, spread: bool, clock: Callable[[], float]) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._away = [0.0] * len(urls)
        self._pause = [AWAY_SECONDS] * len(urls)
        self._turns = count() if spread else None
        self._clock = clock

    def order(self) -> list[int]:
        """All addresses, those to be left alone last."""
        first = 0 if self._turns is None else next(self._turns)
        turn = [(first + i) % len(self._urls) for i in range(len(self._urls))]
        return sorted(turn, key=lambda i: self._away[i] > self._clock())

    def leave(self, number: int) -> None:
        """Leave an address alone for a while. Requests that fail together count once."""
        now = self._clock()
        if self._away[number] <= now:
            self._away[number] = now + self._pause[number]
            self._pause[number] = min(2 * self._pause[number], LONGEST_AWAY_SECONDS)

    def noted(self, number: int, response: httpx.Response) -> httpx.Response:
        """The response; what it says of its replica is kept."""
        if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.leave(number)
        else:
            self._pause[number] = AWAY_SECONDS
        return response

    def requests(self, request: httpx.Request) -> Iterator[tuple[int, httpx.Request]]:
        """The request for each address in order."""
        for number in self.order():
            url = self._urls[number]
            request.url = request.url.copy_with(scheme=url.scheme, host=url.host, port=url.port)
            request.headers["Host"] = url.netloc.decode("ascii")
            yield number, request


class AsyncFailover(httpx.AsyncBaseTransport):
    """A transport over the addresses of one service; ``transport`` carries each try."""

    def __init__(
        self,
        urls: Sequence[str],
        transport: httpx.AsyncBaseTransport,
        *,
        spread: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = _Replicas(urls, spread=spread, clock=clock)
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        failure: httpx.TransportError | None = None
        for number, each in self._replicas.requests(request):
            try:
                response = await self._transport.handle_async_request(each)
                return self._replicas.noted(number, response)
            except httpx.TransportError as error:
                self._replicas.leave(number)
                failure = error
        assert failure is not None  # noqa: S101 -- there is at least one address
        raise failure

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


class Failover(httpx.BaseTransport):
    """The same for clients that block."""

    def __init__(
        self,
        urls: Sequence[str],
        transport: httpx.BaseTransport,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = _Replicas(urls, spread=False, clock=clock)
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.BaseTransport`."""
        failure: httpx.TransportError | None = None
        for number, each in self._replicas.requests(request):
            try:
                return self._replicas.noted(number, self._transport.handle_request(each))
            except httpx.TransportError as error:
                self._replicas.leave(number)
                failure = error
        assert failure is not None  # noqa: S101 -- there is at least one address
        raise failure

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()
