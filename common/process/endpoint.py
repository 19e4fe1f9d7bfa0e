"""Addresses of services: URLs, clients' TLS, token hashes, and failover between replicas.

A setting may list the addresses of a service's replicas, separated by commas. A request that one
replica does not answer goes to the next replica: every request in Riffle may be repeated. An
address that failed is avoided for a while; this time doubles with each further failure. An answer
with a 5xx status is returned as it is, and the next request goes to another replica.
"""

import hashlib
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import LocalError, foreign_answer, read_refusal

D = TypeVar("D", bound=BaseModel)

PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 60.0
"""Pauses are long because each attempt to reach a missing host takes seconds."""


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_loopback_url(url: str) -> bool:
    """Returns whether a URL's host is this machine."""
    return is_loopback(urlsplit(url).hostname or "")


def split_urls(text: str) -> tuple[str, ...]:
    """Returns the addresses that commas separate in a setting's text."""
    return tuple(url.strip() for url in text.split(","))


def is_loopback_service(text: str) -> bool:
    """Returns whether all addresses in a setting are on this machine."""
    try:
        return all(map(is_loopback_url, split_urls(text)))
    except ValueError:  # `check_urls` refuses such an address
        return False


def check_urls(name: str, text: str) -> tuple[str, ...]:
    """Returns the addresses in a setting called ``name``.

    Raises ValueError if an address is malformed, or is http and not on this machine.
    """
    urls = split_urls(text)
    for url in urls:
        try:
            parts = urlsplit(url)
            complete = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:  # an unclosed bracket, or a port that is not a number or exceeds 65535
            complete = False
        if not complete:
            kinds = "http://host:port or https://host:port, with a port up to 65535"
            raise ValueError(f"{name} must be {kinds}, not {url!r}")
        if parts.scheme == "http" and not is_loopback_url(url):
            raise ValueError(f"{name} must be https, not {url!r}: TLS is mandatory off loopback")
    return urls


def server_verification(ca_file: Path | None) -> ssl.SSLContext:
    """Returns httpx's ``verify`` for the CA in ``ca_file``. None stands for the usual CAs.

    Raises LocalError ``unavailable`` if the file cannot be used.
    """
    if ca_file is None:
        return _usual_authorities()
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is an OSError
        raise LocalError("unavailable", f"cannot use CA file {ca_file}: {error}") from error


@cache
def _usual_authorities() -> ssl.SSLContext:
    """Returns one context for all clients: to read the CAs takes longer than most requests."""
    return httpx.create_ssl_context(trust_env=False)


async def receive(
    peer: str, client: httpx.AsyncClient, request: httpx.Request, most: int
) -> tuple[httpx.Response, bytes]:
    """Returns a peer's answer and its body. Stops reading once the body exceeds ``most`` bytes.

    Raises LocalError ``unavailable`` if there is no answer, or if the answer is compressed: a small
    compressed answer may unpack to any size.
    """
    request.headers["Accept-Encoding"], body = "identity", bytearray()
    try:
        async with aclosing(await client.send(request, stream=True)) as response:
            check_plain(response)
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > most:
                    break
    except httpx.RequestError as error:
        raise unreachable(peer, error) from error
    return response, bytes(body)


def unreachable(peer: str, error: httpx.RequestError) -> LocalError:
    """Returns the error of a request that a peer did not answer."""
    return LocalError("unavailable", f"{peer} does not answer: {failure_reason(error)}")


_REASONS = {
    "mismatch": "its certificate does not name this host",
    "has expired": "its certificate has expired",
    "not yet valid": "its certificate is not valid yet; compare the clocks",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is from an unknown authority; give the file of "
    "that authority (ca.pem)",
    "[SSL": "it does not speak TLS; is its address http://, or does another service have the port?",
    "Name or service not known": "its host name is unknown",
}
"""Maps a part of an error's text to the reason. Parts are tried in this order."""
NOBODY_LISTENS = "nothing accepts connections there; is it started, and is the port right?"


def origin(url: httpx.URL) -> str:
    """Returns scheme, host and port of a URL, without its user and password."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def failure_reason(error: httpx.HTTPError) -> str:
    """Returns why there is no answer, in fixed words that may be logged (`journal`)."""
    for part, reason in _REASONS.items():
        if part in str(error):
            return reason
    if isinstance(error, httpx.ConnectError):
        return NOBODY_LISTENS
    if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
        return "it closed the connection; is its address https:// instead of http://?"
    return "not in time" if isinstance(error, httpx.TimeoutException) else type(error).__name__


def read_answer(
    peer: str,
    response: httpx.Response,
    body: bytes,
    kind: type[D],
    fits: Callable[[D], bool] = lambda _: True,
) -> D:
    """Returns a peer's document of type ``kind`` if ``fits`` accepts the document.

    Raises the result of `read_refusal` for a refusal. Raises LocalError ``unavailable`` for any
    other answer.
    """
    status = response.status_code
    if not response.is_success:
        after = response.headers.get("Retry-After")
        raise read_refusal(peer, status, body, after, datetime.now(UTC))
    try:
        answer = kind.model_validate_json(body)
    except ValidationError as error:
        raise LocalError("unavailable", foreign_answer(peer, status)) from error
    if not fits(answer):
        raise LocalError("unavailable", f"{peer} sent an answer to another question")
    return answer


def check_plain(response: httpx.Response) -> None:
    """Raises httpx.DecodingError for a compressed answer."""
    if "Content-Encoding" in response.headers:
        raise httpx.DecodingError("the answer is compressed")


def hash_token(token: str) -> str:
    """Returns a token's SHA-256, hex. Tokens have 256 random bits, so the hash needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


TransportT = TypeVar("TransportT")


class _Replicas(Generic[TransportT]):
    """The replicas of one service. ``transport`` sends each attempt.

    With ``spread``, the replicas take turns at being tried first. If a replica does not answer,
    ``journal`` gets one line with the reason, and no more lines until the replica answers again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        transport: TransportT,
        *,
        spread: bool = False,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
    ) -> None:
        self._transport, self._journal = transport, journal
        self._silent = set[int]()
        self._urls = [httpx.URL(url) for url in urls]
        self._avoid_until = [0.0] * len(urls)
        self._pause = [PAUSE_SECONDS] * len(urls)
        self._turns = count() if spread else None
        self._clock = clock

    def _order(self) -> list[int]:
        """Returns the numbers of all addresses; addresses to avoid come last."""
        first = 0 if self._turns is None else next(self._turns)
        turn = [(first + i) % len(self._urls) for i in range(len(self._urls))]
        return sorted(turn, key=lambda i: self._avoid_until[i] > self._clock())

    def _avoid(self, number: int) -> None:
        """Avoids an address for a while. Does nothing if the address is already avoided."""
        now = self._clock()
        if self._avoid_until[number] <= now:
            self._avoid_until[number] = now + self._pause[number]
            self._pause[number] = min(2 * self._pause[number], LONGEST_PAUSE_SECONDS)

    def _observe(self, number: int, response: httpx.Response) -> httpx.Response:
        """Returns the response; its status decides whether the replica is avoided."""
        self._silent.discard(number)
        if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._avoid(number)
        else:
            self._pause[number] = PAUSE_SECONDS
        return response

    def _skip(self, number: int, error: httpx.TransportError) -> None:
        """Avoids an address that did not answer."""
        self._avoid(number)
        if self._journal is None or len(self._urls) == 1 or number in self._silent:
            return
        self._silent.add(number)
        detail = f"{origin(self._urls[number])} does not answer: {failure_reason(error)}"
        self._journal.note("replica-skipped", logging.WARNING, detail=detail)

    def _requests(self, request: httpx.Request) -> Iterator[tuple[int, httpx.Request]]:
        """Yields each address's number and the request to the address, in the order of `_order`."""
        for number in self._order():
            url = self._urls[number]
            request.url = request.url.copy_with(scheme=url.scheme, host=url.host, port=url.port)
            request.headers["Host"] = url.netloc.decode("ascii")
            yield number, request


class AsyncFailover(_Replicas[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport):
    """An httpx transport over the replicas of one service."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request to each replica in order until one answers."""
        failure: httpx.TransportError | None = None
        for number, each in self._requests(request):
            try:
                response = await self._transport.handle_async_request(each)
                return self._observe(number, response)
            except httpx.TransportError as error:
                self._skip(number, error)
                failure = error
        assert failure is not None  # noqa: S101 -- there is at least one address
        raise failure

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._transport.aclose()


class Failover(_Replicas[httpx.BaseTransport], httpx.BaseTransport):
    """`AsyncFailover` for blocking clients."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request to each replica in order until one answers."""
        failure: httpx.TransportError | None = None
        for number, each in self._requests(request):
            try:
                return self._observe(number, self._transport.handle_request(each))
            except httpx.TransportError as error:
                self._skip(number, error)
                failure = error
        assert failure is not None  # noqa: S101 -- there is at least one address
        raise failure

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()
