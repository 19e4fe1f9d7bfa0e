"""Run the coordinator as a process."""

from collections.abc import Callable

from riffle.common.service import serve
from riffle.common.tracing import collecting
from riffle.coordinator.app import create_app, release_waiting
from riffle.coordinator.settings import Settings


def run(settings: Settings, *, on_start: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        LocalError: a setting, a key file, the store or the port cannot be used.
    """
    tls = settings.tls()
    app = create_app(settings)
    with collecting("coordinator"):
        serve(
            app,
            settings.host,
            settings.port,
            tls=tls,
            on_start=on_start,
            on_stop=lambda: release_waiting(app),
        )
