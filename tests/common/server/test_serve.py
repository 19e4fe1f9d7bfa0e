"""Serving as a process: one clear line if it cannot start, and a drain on a signal.

The server runs in a process of its own, because it takes over the process's signals.
"""

import datetime
import hashlib
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from riffle.common.protocol.errors import LocalError
from riffle.common.server.service import GRACE_SECONDS, serve
from riffle.common.server.settings import ServerSettings, Tls
from riffle.deploy.network.certificates import make_authority
from tests.asking import taken_up

# Waits for news (ended by on_stop), or works for a while (must be finished in the drain).
PROGRAM = """
import asyncio, hashlib, json, sys
from collections.abc import AsyncIterator
from fastapi import FastAPI, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from prometheus_client import CollectorRegistry
from riffle.common.server.monitoring import MetricsMiddleware, RequestMetrics
from riffle.common.process.journal import Journal
from riffle.common.server.service import install_problem_handlers, read_body, serve
from riffle.common.server.settings import ServerSettings

app, stopping = FastAPI(), asyncio.Event()
install_problem_handlers(app, Journal("test"))
app.add_middleware(MetricsMiddleware, metrics=RequestMetrics(CollectorRegistry()))

@app.get("/events", response_class=EventSourceResponse)
async def events() -> AsyncIterator[ServerSentEvent]:
    while not stopping.is_set():
        yield ServerSentEvent(data="x" * 10_000)

@app.get("/news")
async def news() -> str:
    await stopping.wait()
    return "no news"

@app.get("/work")
async def work() -> str:
    await asyncio.sleep(1)
    return "done"

@app.get("/ready")
async def ready() -> str:
    return "yes"

@app.get("/known")
async def known(request: Request) -> str:
    request.state.known = True  # as after a token was checked
    return "yes"

@app.post("/body")
async def body(request: Request) -> str:
    return hashlib.sha256(await read_body(request, 1 << 23)).hexdigest()

settings = ServerSettings.model_validate_json(sys.argv[1])
serve(app, settings, "test", lambda: print("serving", flush=True), stopping.set)
"""


def free_port(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> int:
    with socket.socket(family) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def settings(host: str, port: int, tls: Tls | None) -> ServerSettings:
    return ServerSettings(
        host=host,
        port=port,
        signing_key_file=Path("key"),
        tls_cert_file=tls and tls.certificate,
        tls_key_file=tls and tls.key,
    )


def serve_here(app: FastAPI, host: str, port: int, tls: Tls | None = None) -> None:
    serve(app, settings(host, port, tls), "test", lambda: None, lambda: None)


@contextmanager
def served(
    host: str, port: int, tls: Tls | None = None, *, by: int = signal.SIGTERM, **limits: float
) -> Iterator[subprocess.Popen[str]]:
    """Runs the program; at the end a signal stops it, and it must exit silently with 0."""
    arguments = settings(host, port, tls).model_dump_json(exclude_defaults=True)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name.upper(): str(value) for name, value in limits.items()},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n", process.communicate()[1]
        yield process
        process.send_signal(by)
        output = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, ("", ""))
    finally:
        process.kill()
        process.wait()


def answered(process: subprocess.Popen[str], url: str, path: str) -> tuple[object, float]:
    """Returns the answer to a request during which the process is stopped, and its seconds."""
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = taken_up(client, path)
        process.terminate()
        started = time.monotonic()
        found = answer.result().json()
        process.wait(60)
    return found, time.monotonic() - started


def test_long_polls_do_not_delay_the_drain() -> None:
    port = free_port()
    with served("127.0.0.1", port) as process:
        found, seconds = answered(process, f"http://127.0.0.1:{port}", "/news")
    assert found == "no news"
    assert seconds < GRACE_SECONDS


def test_a_signal_wakes_an_idle_service_at_once() -> None:
    port = free_port()
    with served("127.0.0.1", port), httpx.Client() as client:
        assert client.get(f"http://127.0.0.1:{port}/ready").json() == "yes"


def test_answers_have_the_date_at_which_they_began() -> None:
    """Not that of their request: who asks takes it for the service's clock, and may have waited."""
    port = free_port()
    with served("127.0.0.1", port), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for path, seconds in (("/ready", 0), ("/work", 1), ("/ready", 0)):
            asked = int(time.time())
            date = parsedate_to_datetime(client.get(path).headers["Date"]).timestamp()
            assert asked + seconds <= date <= time.time()


@pytest.mark.parametrize("piece", [1, 1_000, 70_000, 3_000_000])
def test_bodies_arrive_whole_in_whatever_pieces(piece: int) -> None:
    """Bodies have a declared length, or come in chunks, many of them at once, one after another."""
    port = free_port()
    sent = random.Random(piece).randbytes(min(3_000_000, 10_000 * piece))
    pieces = [sent[start : start + piece] for start in range(0, len(sent), piece)]
    with served("127.0.0.1", port), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for whole, content in (
            (sent, sent),
            (sent, iter(pieces)),
            (b"", b""),
            (b"abc", iter([b"ab", b"c"])),
            (sent, sent),
        ):
            found = client.post("/body", content=content).json()
            assert found == hashlib.sha256(whole).hexdigest()


def test_work_is_finished_before_leaving() -> None:
    port = free_port()
    with served("127.0.0.1", port) as process:
        found, _ = answered(process, f"http://127.0.0.1:{port}", "/work")
    assert found == "done"


def test_a_follower_who_leaves_amid_events_is_no_error() -> None:
    port = free_port()
    with served("127.0.0.1", port):
        for _ in range(5):
            with httpx.stream("GET", f"http://127.0.0.1:{port}/events") as answer:
                next(answer.iter_raw())
                time.sleep(0.1)  # events wait for the follower
        assert httpx.get(f"http://127.0.0.1:{port}/ready").json() == "yes"


def test_an_interrupt_is_a_drain_too_even_before_the_first_request() -> None:
    with served("127.0.0.1", free_port(), by=signal.SIGINT):
        pass


def test_a_service_that_cannot_start_says_why_and_serves_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, started = free_port(), []

    @asynccontextmanager
    async def broken(_: FastAPI) -> AsyncIterator[None]:
        if port:
            raise LocalError("unavailable", "the store is of a newer Riffle")
        yield

    mine = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(LocalError, match="newer Riffle"):
            serve(
                FastAPI(lifespan=broken),
                settings("127.0.0.1", port, None),
                "test",
                lambda: started.append("serving"),
                lambda: None,
            )
    finally:  # a service's process ends with it; this one still heeds Ctrl-C
        for number, handler in mine.items():
            signal.signal(number, handler)
    assert (started, caplog.records) == ([], []), "no line of a library"


def test_idle_connections_outlive_those_of_all_clients() -> None:
    client_seconds = httpx.Limits().keepalive_expiry
    assert client_seconds is not None
    port = free_port()
    with served("127.0.0.1", port), socket.create_connection(("127.0.0.1", port)) as silent:
        for pause in (0, client_seconds + 1.5):
            time.sleep(pause)
            silent.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b'"yes"'):  # head and body may come apart
                part = silent.recv(65_536)
                assert part, "the connection was closed"
                answer += part
            assert b" 200 " in answer


def test_a_service_listens_on_ipv6() -> None:
    try:
        port = free_port(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with served("::1", port):
        assert httpx.get(f"http://[::1]:{port}/ready").json() == "yes"


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority(now)
    certificate, key = authority.issue("server", now)
    for name, text in (("tls.pem", certificate), ("tls.key", key), ("ca.pem", authority.pem)):
        (tmp_path / name).write_text(text)
    return Tls(tmp_path / "tls.pem", tmp_path / "tls.key")


def test_a_service_answers_over_tls(tls: Tls) -> None:
    port = free_port()
    url = f"https://127.0.0.1:{port}/ready"
    with served("127.0.0.1", port, tls):
        context = ssl.create_default_context(cafile=tls.key.with_name("ca.pem"))
        assert httpx.get(url, verify=context).json() == "yes"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url)


def test_a_port_in_use_is_one_error_and_nothing_leaks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(socket.socket()) as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(
            LocalError, match=rf"127\.0\.0\.1:{port} .*choose another port"
        ) as caught:
            serve_here(FastAPI(), "127.0.0.1", port)
    assert caught.value.slug == "unavailable"
    assert capfd.readouterr() == ("", "")  # a leaked socket would be a warning, an error here


def test_an_address_of_no_interface_is_refused() -> None:
    tls = Tls(Path("tls.pem"), Path("tls.key"))
    with pytest.raises(LocalError, match="TLS is mandatory off loopback"):
        serve_here(FastAPI(), "192.0.2.1", 8400)
    with pytest.raises(LocalError, match=r"cannot use the TLS files tls\.pem and tls\.key"):
        serve_here(FastAPI(), "192.0.2.1", 8400, tls)


def test_an_address_of_another_machine_cannot_be_listened_on(tls: Tls) -> None:
    with pytest.raises(LocalError, match=r"cannot listen on 192\.0\.2\.1:8400"):
        serve_here(FastAPI(), "192.0.2.1", 8400, tls)


def test_a_key_of_another_certificate_is_refused(tls: Tls, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    (tmp_path / "tls.key").write_text(make_authority(now).issue("other", now)[1])
    with pytest.raises(LocalError, match="cannot use the TLS files"):
        serve_here(FastAPI(), "127.0.0.1", free_port(), tls)
