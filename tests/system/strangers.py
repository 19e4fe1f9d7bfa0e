"""Strangers without a token, in a process of their own: endless heads and half-sent requests."""

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

HALF = b"GET /livez HTTP/1.1\r\nHost: a\r\nX: "
LINES = b"x-header: 0123456789012345678901234567890123456789\r\n" * 1_000
VALUE = b"v" * 65_536
VALUE_BYTES = 60 << 20
PATIENCE_SECONDS = 3.0

Action = Callable[[asyncio.StreamWriter, float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """Attack on some ports: for how long, and how many half-sent requests to hold at each."""

    ports: tuple[int, ...]
    seconds: float
    half_sent: int
    deadline: float


def run(attack: Attack, pipe: "Connection[int, int]") -> None:
    """Attacks; sends the number of half-sent requests that are open after the deadline."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    pipe.send(asyncio.run(_attack(attack)))


async def _attack(attack: Attack) -> int:
    end = time.monotonic() + attack.seconds
    open_now: set[asyncio.StreamWriter] = set()
    tasks = []
    for port in attack.ports:
        tasks.append(_repeat(port, end, _endless_lines))
        tasks.append(_repeat(port, end, _long_value))
        tasks.append(_repeat(port, end, _pipeline))
        tasks.append(_hold(port, end, attack, open_now))
    await asyncio.gather(*tasks)
    await asyncio.sleep(attack.deadline + PATIENCE_SECONDS)
    return len(open_now)


async def _repeat(port: int, end: float, attack: Action) -> None:
    while time.monotonic() < end:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await attack(writer, end)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.05)


async def _endless_lines(writer: asyncio.StreamWriter, end: float) -> None:
    writer.write(b"GET /livez HTTP/1.1\r\n")
    while time.monotonic() < end:
        writer.write(LINES)
        await writer.drain()


async def _long_value(writer: asyncio.StreamWriter, end: float) -> None:
    writer.write(HALF)
    for _ in range(VALUE_BYTES // len(VALUE)):
        writer.write(VALUE)
        await writer.drain()


async def _pipeline(writer: asyncio.StreamWriter, end: float) -> None:
    writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" * 5_000)
    await writer.drain()


async def _hold(port: int, end: float, attack: Attack, open_now: set[asyncio.StreamWriter]) -> None:
    """Holds half-sent requests, and opens each that is closed once more."""
    turn = asyncio.Semaphore(attack.half_sent)
    tasks = set()

    async def one() -> None:
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            open_now.add(writer)
            writer.write(HALF)
            while await reader.read(4_096):
                pass
        except OSError:
            pass
        finally:
            if writer is not None:
                open_now.discard(writer)
                writer.transport.abort()
            turn.release()

    while time.monotonic() < end:
        await turn.acquire()
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.001)
