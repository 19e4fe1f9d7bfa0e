"""A proxy in front of a live shuffler, in a thread of its own: what befalls requests on their way.

- lost: the connection is dropped, and the request never arrives;
- unanswered: it arrives, and the connection is dropped before the answer;
- twice: it arrives twice at the same time, and the second answer is the one that comes back;
- late: the connection is dropped, and the request arrives after newer ones;
- slow: it arrives after newer ones, and is answered.

Every request has a connection of its own to the shuffler, so an answer is whatever comes until the
end. Of ten requests in a row each fault befalls one, in an order drawn from the seed.

`AlteringProxy` puts other answers into the place of some, as proxies in between do.
"""

import asyncio
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

FAULTS = ("lost", "unanswered", "twice", "late", "slow")
LATE_SECONDS = 0.5


class Proxy:
    """Context manager; ``url`` is where it listens, ``befell`` how often each fault came."""

    def __init__(self, upstream: str, seed: object) -> None:
        host, port = upstream.removeprefix("http://").split(":")
        self._upstream = host, int(port)
        self._plan = _plan(random.Random(str(seed)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._strays: set[asyncio.Task[bytes]] = set()
        self._serving: set[asyncio.Task[None] | None] = set()  # asyncio itself may forget them
        self.befell: Counter[str] = Counter()
        self.faulty = False

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._serving.add(task)
        try:
            await self._answer(await _request(reader), writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # somebody was killed or gave up
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        fault = next(self._plan) if self.faulty else ""
        self.befell[fault] += 1
        writer.write(await self._befall(fault, request))
        await writer.drain()

    async def _befall(self, fault: str, request: bytes) -> bytes:
        if fault == "lost":
            return b""
        if fault == "late":
            stray = asyncio.create_task(self._deliver(request, LATE_SECONDS))
            self._strays.add(stray)
            stray.add_done_callback(self._strays.discard)
            return b""
        if fault == "twice":
            return (await asyncio.gather(self._deliver(request), self._deliver(request)))[1]
        answer = await self._deliver(request, LATE_SECONDS * (fault == "slow"))
        return b"" if fault == "unanswered" else answer

    async def _deliver(self, request: bytes, later: float = 0.0) -> bytes:
        await asyncio.sleep(later)
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()


PAGE = b"<html><body>Please log in to the portal</body></html>"
FOREIGN: dict[str, tuple[str, bytes]] = {
    "empty": ("200 OK", b""),
    "no content": ("204 No Content", b""),
    "a page": ("200 OK", PAGE),
    "another document": ("200 OK", b'{"status": "ok"}'),
    "moved": ("302 Found", PAGE),
    "bad request": ("400 Bad Request", PAGE),
    "not allowed": ("403 Forbidden", PAGE),
    "not found": ("404 Not Found", b'{"detail": "Not Found"}'),
    "broken": ("500 Internal Server Error", PAGE),
    "bad gateway": ("502 Bad Gateway", PAGE),
    "busy": ("503 Service Unavailable", b""),
}
ALTERATIONS = ("half", *FOREIGN)


@dataclass
class Alteration:
    """Alters ``times`` answers to a call, after ``skip`` others; unless ``sent`` it is held up."""

    call: str
    kind: str
    skip: int = 0
    times: int = 1
    sent: bool = True


class AlteringProxy(Proxy):
    """Alters the answers that ``alteration`` names; ``altered`` counts them."""

    alteration: Alteration | None = None
    altered = 0

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream, 0)

    def alter(self, alteration: Alteration | None) -> None:
        self.alteration, self.altered = alteration, 0

    async def _answer(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        chosen = self.alteration
        if chosen is None or chosen.call != call_of(request):
            await self._pass_on(request, writer)
        elif chosen.skip > 0:
            chosen.skip -= 1
            await self._pass_on(request, writer)
        elif self.altered >= chosen.times:
            await self._pass_on(request, writer)
        else:
            self.altered += 1
            streamed = b"/events" in request.split(b"\r\n", 1)[0]
            answer = b"" if streamed or not chosen.sent else await self._deliver(request)
            writer.write(_altered(chosen.kind, answer))
            await writer.drain()

    async def _pass_on(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        """Passes an answer on while it comes: a stream of events lasts as long as its run."""
        reader, upstream = await asyncio.open_connection(*self._upstream)
        try:
            upstream.write(request)
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        finally:
            upstream.close()


def call_of(request: bytes) -> str:
    """Returns method and path of a request, with ids and numbers replaced."""
    method, target = request.split(b"\r\n", 1)[0].decode().split(" ")[:2]
    path = re.sub(r"[0-9a-f]{32}", "{id}", target.partition("?")[0])
    return f"{method} {re.sub('/[0-9]+$', '/{index}', path)}"


def _altered(kind: str, answer: bytes) -> bytes:
    if kind != "half":
        status, body = FOREIGN[kind]
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nLocation: /login\r\n"
    else:
        body = answer.partition(b"\r\n\r\n")[2] or b'{"detail": "this goes on"}'
        body = body[: len(body) // 2]
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _plan(draws: random.Random) -> Iterator[str]:
    while True:
        yield from draws.sample([*FAULTS, *[""] * (10 - len(FAULTS))], 10)


async def _request(reader: asyncio.StreamReader) -> bytes:
    """One request with its body, made to ask for the end of its connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *fields = head[:-4].split(b"\r\n")
    named = {name.lower(): value for name, _, value in (line.partition(b":") for line in fields)}
    body = await reader.readexactly(int(named.get(b"content-length", b"0")))
    kept = [line for line in fields if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([first, *kept, b"Connection: close", b"", body])
