"""A coordinator on loopback, over real HTTP, whose shuffler is in memory and fills at once."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from riffle.coordinator.app import create_app
from riffle.deploy.network.secrets import TOKEN_FILE, URL_FILE, init_network
from tests.coordinator.world import TOKEN, FakeShuffler, analyzer, registry, settings


@contextmanager
def live_coordinator(folder: Path) -> Iterator[tuple[Path, FakeShuffler]]:
    """The network's folder, as the operator has it, and the shuffler."""
    shuffler = FakeShuffler()
    app = create_app(
        settings(folder / "data"),
        shuffler=shuffler,
        registry=registry(),
        analyzer=analyzer(),
        clock=time.time,
    )
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        init_network(folder / "network")
        secrets = folder / "network" / "operator"
        (secrets / TOKEN_FILE).write_text(TOKEN)
        (secrets / URL_FILE).write_text(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield folder / "network", shuffler
        finally:
            app.state.coordinator.signals.close()
            server.should_exit = True
            thread.join()
