"""What a role logs when it ends."""

import json

import pytest
import typer

from riffle.common.process.journal import Journal
from riffle.deploy.cli.network import _logged_errors


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "no memory")]
)
def test_a_role_without_memory_or_threads_ends_with_a_sentence(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.deploy.cli.network.log_to_stderr", lambda _: None)
    with pytest.raises(typer.Exit) as caught, _logged_errors(Journal("test")):
        raise error
    line = json.loads(caplog.records[-1].getMessage())
    assert (caught.value.exit_code, line["event"]) == (4, "ended")
    assert line.get("problem") == "unavailable" and "memory" in line["detail"]
