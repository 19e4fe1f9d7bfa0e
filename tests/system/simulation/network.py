"""The network between the roles: requests of real clients to real apps, and what can befall them.

A fault waits for the next request whose path has its word, and befalls it:

- lost: it never arrives, and the caller waits in vain;
- unanswered: it arrives, and its answer does not;
- twice: it arrives twice, and the second answer is the one that comes back;
- late: the caller gives up at once, and the request arrives seconds later, after newer ones;
- altered: something in between puts another answer into the place of the server's, which may not
  even have got the request: half of it, a proxy's page, a foreign document, or the answer that was
  last given to another question. The operator, who reads what comes, is spared this.

Every message takes a while drawn anew, so requests overtake each other also without a fault.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system.proxy import FOREIGN
from tests.system.simulation.machine import CURRENT, Process, step

FAULTS = ("lost", "unanswered", "twice", "late")
ALTERATIONS = ("half", "another's", *FOREIGN)
LATENCY_SECONDS = 0.4
TIMEOUT_SECONDS = 5.0
PATIENCE_SECONDS = 60.0


@dataclass
class Sent:
    """A request as it was sent, to be sent again."""

    target: str
    method: str
    url: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Network:
    """Routes requests to whoever serves a role now; ``answered`` sees every answer that leaves."""

    draws: random.Random
    pick: Callable[[str], tuple[Process, Any] | None]
    answered: Callable[[Sent, httpx.Response], None]
    faults: list[tuple[str, str]] = field(default_factory=list)
    uploads: list[Sent] = field(default_factory=list)
    strays: set[asyncio.Task[None]] = field(default_factory=set)
    answers: dict[str, httpx.Response] = field(default_factory=dict)

    def client(self, target: str, token: str | None = None) -> httpx.AsyncClient:
        """An HTTP client; who uses it may die when it sends, and before it hears the answer."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        wire = _Wire(self, target)
        return httpx.AsyncClient(
            transport=wire, base_url="http://127.0.0.1", headers=headers, timeout=PATIENCE_SECONDS
        )

    async def deliver(self, sent: Sent) -> httpx.Response:
        """Bring a request to its server, and its answer as far as the server's door."""
        await self._travel()
        found = self.pick(sent.target)
        if found is None:
            raise httpx.ConnectError("nobody listens (simulated)")
        server, app = found
        task = server.spawn(_serve(app, sent))
        await asyncio.wait([task], timeout=PATIENCE_SECONDS)
        if not task.done():
            raise httpx.ReadTimeout("no answer (simulated)")
        if server.dead or task.cancelled() or task.exception() is not None:
            raise httpx.ReadError("the server died (simulated)")
        response: httpx.Response = task.result()
        self.answered(sent, response)
        self.answers[sent.url] = response
        return response

    async def exchange(self, sent: Sent) -> httpx.Response:
        """A request with whatever befalls it."""
        if sent.url.split("?")[0].endswith("/reports"):
            self.uploads.append(sent)
        fault = self._fault(sent)
        if fault == "lost":
            await asyncio.sleep(TIMEOUT_SECONDS)
            raise httpx.ReadTimeout("no answer (simulated)")
        if fault == "late":
            asyncio.get_running_loop().call_later(TIMEOUT_SECONDS, self.stray, sent)
            raise httpx.ReadTimeout("no answer (simulated)")
        if fault == "twice":
            await self.deliver(sent)
        unsent = fault in FOREIGN and self.draws.random() < 0.5
        response = httpx.Response(200) if unsent else await self.deliver(sent)
        if fault == "unanswered":
            raise httpx.ReadError("the answer is lost (simulated)")
        await self._travel()
        return self._altered(fault, sent, response) if fault in ALTERATIONS else response

    def stray(self, sent: Sent) -> None:
        """A request that nobody waits for any more."""

        async def deliver() -> None:
            with suppress(httpx.TransportError):
                await self.deliver(sent)

        stray = asyncio.get_running_loop().create_task(deliver(), context=Context())
        self.strays.add(stray)
        stray.add_done_callback(self.strays.discard)

    def _fault(self, sent: Sent) -> str | None:
        for fault in self.faults:
            spared = fault[0] in ALTERATIONS and CURRENT.get() is None
            if fault[1] in f"{sent.method} {sent.url}" and not spared:
                self.faults.remove(fault)
                return fault[0]
        return None

    def _altered(self, kind: str, sent: Sent, response: httpx.Response) -> httpx.Response:
        if kind == "another's":
            others = [answer for url, answer in self.answers.items() if url != sent.url]
            return self.draws.choice(others) if others else response
        if kind == "half":
            body = response.content[: len(response.content) // 2]
            return httpx.Response(200, headers=response.headers, content=body)
        status, body = FOREIGN[kind]
        return httpx.Response(int(status[:3]), headers={"Location": "/login"}, content=body)

    async def _travel(self) -> None:
        await asyncio.sleep(self.draws.uniform(0.001, LATENCY_SECONDS))


class _Wire(httpx.AsyncBaseTransport):
    def __init__(self, network: Network, target: str) -> None:
        self._network, self._target = network, target

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        step()
        headers = list(request.headers.multi_items())
        body = await request.aread()
        sent = Sent(self._target, request.method, str(request.url), headers, body)
        response = await self._network.exchange(sent)
        step()
        return httpx.Response(
            response.status_code, headers=response.headers, content=response.content
        )


async def _serve(app: Any, sent: Sent) -> httpx.Response:
    request = httpx.Request(sent.method, sent.url, headers=sent.headers, content=sent.body)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    response = await transport.handle_async_request(request)
    await response.aread()
    return response
