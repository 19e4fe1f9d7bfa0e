"""A role logs its start and its end."""

import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import typer

from riffle.common.process.journal import Journal
from riffle.deploy.cli.network import _run_role


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "no memory")]
)
def test_a_role_without_memory_or_threads_ends_with_a_sentence(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.deploy.cli.network.log_to_stderr", lambda _: None)

    def fail(_: object) -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        _run_role(Journal("test"), fail, print, None)
    line = json.loads(caplog.records[-1].getMessage())
    assert (caught.value.exit_code, line["event"]) == (4, "ended")
    assert line.get("problem") == "unavailable" and "memory" in line["detail"]


def test_a_role_logs_where_it_serves_and_that_it_has_stopped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.deploy.cli.network.log_to_stderr", lambda _: None)
    caplog.set_level(logging.INFO)

    def run(_: object, on_start: Callable[[], None]) -> None:
        on_start()

    settings, journal = SimpleNamespace(host="127.0.0.1", port=8400), Journal("test", "listens_at")
    for found, where in ((settings, {"listens_at": "127.0.0.1:8400"}), (object(), {})):
        caplog.clear()
        _run_role(journal, Mock(return_value=found), run, None)
        lines = [json.loads(record.getMessage()) for record in caplog.records]
        assert lines == [{"event": event} | where for event in ("serving", "stopped")]
