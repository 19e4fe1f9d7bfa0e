"""Logs by allow-list: one JSON object per line, with fields from the role's own list.

A line has ``time`` (UTC), ``level``, ``service``, ``event`` and the event's fields. Each role's
``JOURNAL`` lists the only fields that the role may log: the shuffler's in `shuffler.metrics`, the
coordinator's in `coordinator.metrics`, a node's in `node_client.settings`.

No log contains texts of unexpected exceptions, values of variables or requested paths, because they
can name people.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from riffle.common.protocol.errors import RiffleError, one_line

Value = str | float
FRAMES = 3
"""The number of a traceback's innermost places that are logged for an error."""

_ERROR_FIELDS = frozenset({"error", "where", "method", "route"})


class Event(dict[str, Value]):
    """The event of one line: its name and its fields, without time, level and service."""

    def __str__(self) -> str:
        return json.dumps(self)


class Journal:
    """The log ``riffle.<role>`` of one role. Its events may have the fields ``allowed``."""

    def __init__(self, role: str, *allowed: str) -> None:
        self.role = role
        self.allowed = frozenset(allowed)
        self._log = logging.getLogger(f"riffle.{role}")

    def note(self, event: str, level: int = logging.INFO, **fields: Value) -> None:
        """Logs one event. Raises ValueError if a field is not on the allow-list."""
        unknown = sorted(fields.keys() - self.allowed - _ERROR_FIELDS)
        if unknown:
            raise ValueError(f"fields {unknown} may not be logged")
        self._log.log(level, Event(event=event, **fields))

    def problem(
        self, event: str, error: RiffleError, level: int = logging.WARNING, **fields: Value
    ) -> None:
        """Logs a Riffle error's slug and sentence. Raises ValueError if a field is not allowed."""
        self.note(event, level, problem=error.slug, detail=one_line(error.detail), **fields)

    def exception(self, event: str, error: BaseException, **fields: Value) -> None:
        """Logs an unexpected error: its type and its places in the code, never its text."""
        places = _places(error.__traceback__)
        self.note(event, logging.ERROR, error=type(error).__name__, where=places, **fields)

    def fatal(self, error: RiffleError) -> None:
        """Logs why the process ends.

        The error's sentence is about the role's own settings and files, so it may be logged.
        """
        self._log.error(Event(event="ended", problem=error.slug, detail=error.detail))


def _places(trace: TracebackType | None) -> str:
    """Returns a traceback's innermost places as ``folder/file.py:line``, the innermost last."""
    frames = traceback.extract_tb(trace)[-FRAMES:]
    return " ".join(_place(frame.filename, frame.lineno) for frame in frames)


def _place(file: str, line: int | None) -> str:
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"


class JsonLines(logging.Formatter):
    """Formats every record as a JSON object on one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Returns the JSON line for a record."""
        event = record.msg if isinstance(record.msg, Event) else _library_event(record)
        moment = datetime.fromtimestamp(record.created, UTC)
        head = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
        }
        return json.dumps(head | event)


def _library_event(record: logging.LogRecord) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "event": "library",
        "logger": record.name,
        "where": _place(record.pathname, record.lineno),
    }
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        fields |= {"error": type(error).__name__, "raised": _places(error.__traceback__)}
    return fields


def log_to_stderr(service: str) -> None:
    """Sends this process's whole log to stderr, as JSON lines.

    Libraries log from WARNING up: an HTTP client's INFO lines would reveal who sent what when.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("riffle").setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
