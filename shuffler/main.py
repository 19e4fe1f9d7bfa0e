"""Runs the shuffler as a process."""

from collections.abc import Callable

from riffle.common.service import serve
from riffle.common.tracing import collecting
from riffle.shuffler.app import create_app, release_polls
from riffle.shuffler.core import preflight
from riffle.shuffler.settings import Settings


def run(settings: Settings, *, on_start: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        LocalError: settings, store or port cannot be used.
    """
    preflight(settings)
    app = create_app(settings)
    with collecting("shuffler"):
        serve(
            app,
            settings.host,
            settings.port,
            tls=settings.tls(),
            on_start=on_start,
            on_stop=lambda: release_polls(app),
        )
