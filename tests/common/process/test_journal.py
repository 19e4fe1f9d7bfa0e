"""Logs: one JSON object a line, with allowed fields only."""

import ast
import json
import logging
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import riffle
from riffle.common.process.journal import Journal, JsonLines
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.metrics import JOURNAL as COORDINATOR
from riffle.node_client.settings import JOURNAL as NODE
from riffle.shuffler.metrics import JOURNAL as SHUFFLER

PRIVATE = frozenset({"user", "users", "lease", "slot", "token", "episode", "path"})
PROGRAM = """
import logging, sys, warnings
from riffle.common.process.journal import Journal, log_to_stderr
log_to_stderr("test")
Journal("test", "n").note("hello", n=3)
logging.getLogger("httpx").info("GET https://secret")
try:
    raise ValueError("secret")
except ValueError:
    logging.getLogger("uvicorn.error").exception("secret %s", "secret")
warnings.warn("secret")
"""


@pytest.mark.parametrize("journal", [SHUFFLER, COORDINATOR, NODE], ids=lambda j: j.role)
def test_no_journal_accepts_fields_that_name_people(journal: Journal) -> None:
    assert journal.allowed.isdisjoint(PRIVATE)
    assert journal is NODE or journal.allowed.isdisjoint({"node", "node_id", "host"})
    assert journal is not SHUFFLER or "detail" not in journal.allowed
    with pytest.raises(ValueError, match="lease"):
        journal.note("sealed", lease="cd")
    with pytest.raises(ValueError, match="lease"):
        journal.exception("sealed", OSError(), lease="cd")


def test_every_line_is_an_object_without_text_of_others() -> None:
    command = [sys.executable, "-W", "always", "-c", PROGRAM]
    wrote = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    hello, library, warning = map(json.loads, wrote.splitlines())
    assert hello.pop("time").endswith("+00:00")
    assert hello == {"level": "info", "service": "test", "event": "hello", "n": 3}
    assert (library["event"], library["logger"]) == ("library", "uvicorn.error")
    assert (library["error"], library["raised"]) == ("ValueError", "<string>:8")
    assert warning["logger"] == "py.warnings"
    assert "secret" not in wrote


def test_no_field_is_made_from_an_unexpected_error() -> None:
    """`Journal.exception` logs no text of an error, so no caller may pass the text as a field."""
    files = [file for folder in riffle.__path__ for file in Path(folder).glob("*/**/*.py")]
    calls = [
        node
        for file in files
        for node in nodes(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func).lower() == "journal.exception"
    ]
    assert len(calls) >= 7
    for call in calls:
        error, fields = ast.unparse(call.args[1]), [each.value for each in call.keywords]
        used = {ast.unparse(part) for field in fields for part in ast.walk(field)}
        assert error not in used, ast.unparse(call)


@cache
def nodes(file: Path) -> list[ast.AST]:
    """The nodes of a module."""
    return list(ast.walk(ast.parse(file.read_text())))


LOGGED = {"note", "problem", "fatal", "debug", "info", "warning", "error", "critical", "log"}


def test_no_handler_of_all_errors_logs_an_errors_text() -> None:
    """A caught `Exception` may hold anything, so it goes to `exception` only."""
    files = [file for folder in riffle.__path__ for file in Path(folder).glob("*/**/*.py")]
    handlers = [
        (file, node)
        for file in files
        if file.parent.name != "cli"  # commands tell their own user
        for node in nodes(file)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
    ]
    assert len(handlers) >= 10
    for file, handler in handlers:
        for call in ast.walk(handler):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                used = {ast.unparse(part) for part in ast.walk(call)}
                assert call.func.attr not in LOGGED or handler.name not in used, (file, call.lineno)


def test_no_service_logs_by_other_means_than_its_journal() -> None:
    files = [
        file
        for folder in riffle.__path__
        for role in ("common", "coordinator", "node_client", "shuffler")
        for file in (Path(folder) / role).glob("**/*.py")
    ]
    assert len(files) > 80
    for file in files:
        calls = [node for node in nodes(file) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        others = {"print", "warnings.warn", *(f"logging.{name}" for name in LOGGED)}
        assert names.isdisjoint(others), file
        assert "logging.getLogger" not in names or file.name == "journal.py", file


def test_the_list_of_each_journal_is_fixed() -> None:
    """Before you add a field here, look at what it tells of people, nodes and times."""
    lists = {
        SHUFFLER: "batch_id batches database keys listens_at messages n reports state",
        COORDINATOR: "batch_id database deployment detail failed listens_at messages n problem"
        " run_id runs",
        NODE: "accepted batch_id detail episodes failed messages node_id problem reason reports"
        " request",
    }
    for journal, names in lists.items():
        assert journal.allowed == {*names.split()}, journal.role


def test_a_line_stays_one_line() -> None:
    record = logging.LogRecord("x", logging.ERROR, "a/b/c.py", 7, "two\nlines", (), None)
    assert json.loads(JsonLines("test").format(record))["where"] == "b/c.py:7"


def test_a_fatal_error_is_logged_with_its_sentence(caplog: pytest.LogCaptureFixture) -> None:
    Journal("test").fatal(LocalError("invalid-spec", "set RIFFLE_X"))
    message = {"event": "ended", "problem": "invalid-spec", "detail": "set RIFFLE_X"}
    assert json.loads(caplog.messages[0]) == message


class SecretError(Exception):
    """An error of a library, which quotes what it worked on."""

    def __str__(self) -> str:
        return "secret"


def fail(error: BaseException) -> None:
    raise error


def chained() -> Exception:
    """An error whose cause, context, notes and arguments hold texts."""
    error = RuntimeError("secret", b"secret")
    error.__cause__, error.__context__ = ValueError("secret"), KeyError("secret")
    error.add_note("secret")
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(2, "secret", "secret", None, "secret"),
        ConnectionResetError("secret"),
        KeyError("secret"),
        UnicodeDecodeError("ascii", b"secret", 0, 1, "secret"),
        json.JSONDecodeError("secret", "secret", 0),
        RemoteError("late", "secret"),
        LocalError("unavailable", "secret"),
        ExceptionGroup("secret", [ValueError("secret")]),
        SystemExit("secret"),
        SecretError(),
        chained(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_unexpected_error_is_logged_without_its_text(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        fail(error)
    except BaseException as raised:
        Journal("test").exception("unexpected-error", raised, method="GET", route="/v1/x")
        logging.getLogger("library").exception("%s", raised)  # noqa: TRY401  (it must not show)
    own, library = (JsonLines("test").format(record) for record in caplog.records)
    assert json.loads(own)["error"] == json.loads(library)["error"] == type(error).__name__
    assert "test_journal.py:" in json.loads(own)["where"]
    assert "secret" not in own + library
