"""Logs by allow-list: one JSON object a line, with fields from a list of the role's own.

A line has ``time`` (UTC), ``level``, ``service``, ``event`` and the event's fields. What a role may
name is in its own folder; a field that is not on its list cannot be logged. Of an error that nobody
expected the log has the type and the places in the code, of a request the template of its route:
texts of exceptions, values of variables and paths that were asked for can name people. For the same
reason a library's line is its logger, the place that wrote it and the type of its error, and its
text is left out.
"""

import json
import logging
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType

from riffle.common.protocol.errors import RiffleError, one_line

Value = str | float
FRAMES = 3
"""Innermost places in the code that are named of an error."""

_OF_ERRORS = frozenset({"error", "where", "method", "route"})


@dataclass(frozen=True, slots=True)
class Event:
    """What one line says. As text it is the line without time, level and service."""

    event: str
    fields: MappingProxyType[str, Value]

    def document(self) -> dict[str, Value]:
        """Its fields, the event's name first."""
        return {"event": self.event, **self.fields}

    def __str__(self) -> str:
        return json.dumps(self.document())


class Journal:
    """What one role logs: events with fields of ``allowed``, under the logger ``riffle.<role>``."""

    def __init__(self, role: str, *allowed: str) -> None:
        self.role = role
        self.allowed = frozenset(allowed)
        self._log = logging.getLogger(f"riffle.{role}")

    def note(self, event: str, level: int = logging.INFO, **fields: Value) -> None:
        """Log one event.

        Raises:
            ValueError: a field is not on the allow-list: a mistake of ours, caught by the tests.
        """
        self._write(level, event, **fields)

    def problem(
        self, event: str, error: RiffleError, level: int = logging.WARNING, **fields: Value
    ) -> None:
        """Log one of Riffle's own errors, where the role may log its sentence."""
        self.note(event, level, problem=error.slug, detail=one_line(error.detail), **fields)

    def failed(self, event: str, error: BaseException, **fields: Value) -> None:
        """Log an error that nobody expected: its type and places in the code, never its text."""
        places = _places(error.__traceback__)
        self._write(logging.ERROR, event, error=type(error).__name__, where=places, **fields)

    def ended(self, error: RiffleError) -> None:
        """Why the process ends: of all errors the one whose sentence every role's log has.

        It is about the role's own settings, files and credentials, not about a request.
        """
        told = {"problem": error.slug, "detail": error.detail}
        self._log.error(Event("ended", MappingProxyType(told)))

    def _write(self, level: int, event: str, **fields: Value) -> None:
        unknown = sorted(fields.keys() - self.allowed - _OF_ERRORS)
        if unknown:
            raise ValueError(f"fields {unknown} may not be logged")
        self._log.log(level, Event(event, MappingProxyType(fields)))


def _places(trace: TracebackType | None) -> str:
    """The innermost places of a traceback, ``folder/file.py:line``, innermost last."""
    frames = traceback.extract_tb(trace)[-FRAMES:]
    return " ".join(_place(frame.filename, frame.lineno) for frame in frames)


def _place(file: str, line: int | None) -> str:
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"


class JsonLines(logging.Formatter):
    """Every record as one JSON object a line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        event = record.msg.document() if isinstance(record.msg, Event) else _library(record)
        moment = datetime.fromtimestamp(record.created, UTC)
        head = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
        }
        return json.dumps(head | event)


def _library(record: logging.LogRecord) -> dict[str, Value]:
    told: dict[str, Value] = {
        "event": "library",
        "logger": record.name,
        "where": _place(record.pathname, record.lineno),
    }
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        told |= {"error": type(error).__name__, "raised": _places(error.__traceback__)}
    return told


def log_to_stderr(service: str) -> None:
    """Send all of this process's log to stderr, as JSON lines.

    Libraries log at WARNING only: an HTTP client's INFO lines would tell who sent when.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("riffle").setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
