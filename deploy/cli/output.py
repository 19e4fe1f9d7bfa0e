"""How every command speaks: one document on stdout, everything else on stderr, stated exit codes.

Exit codes: 0 done; 1 the answer is no (a failed run, a failed check); 2 wrong usage; 3 an input
was refused; 4 a service or file that is needed is not available; 130 interrupted.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, StrEnum
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from common.errors import RiffleError


class Format(StrEnum):
    """Output format of a command."""

    text = "text"
    json = "json"


class Exit(IntEnum):
    """Exit codes; see the module's docstring."""

    DONE = 0
    NO = 1
    USAGE = 2
    REFUSED = 3
    UNAVAILABLE = 4
    INTERRUPTED = 130


P = ParamSpec("P")
T = TypeVar("T")

progress = Console(stderr=True)
_UNAVAILABLE = {"unavailable", "internal", "too-many-requests"}


def emit(document: Mapping[str, Any], output: Format, text: Callable[[], None]) -> None:
    """Print the answer: the document as JSON, or the text form."""
    if output is Format.json:
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
    else:
        text()


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a plain table on stdout; numbers are aligned right."""
    grid = Table(*columns, title=title or None, title_justify="left")
    for column, value in zip(grid.columns, rows[0] if rows else (), strict=False):
        column.justify = "right" if isinstance(value, int | float) else "left"
    for row in rows:
        grid.add_row(*(_cell(value) for value in row))
    Console().print(grid)


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """End a command with one line on stderr and an exit code instead of a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except RiffleError as error:
            fail(error.detail, Exit.UNAVAILABLE if error.slug in _UNAVAILABLE else Exit.REFUSED)
        except (ValueError, FileExistsError) as error:
            fail(str(error), Exit.REFUSED)
        except OSError as error:
            fail(f"{error.strerror or error} {error.filename or ''}".strip(), Exit.UNAVAILABLE)
        except KeyboardInterrupt:
            fail("interrupted", Exit.INTERRUPTED)

    return run


def fail(message: str, code: Exit) -> NoReturn:
    """Write one line on stderr and leave.

    Raises:
        typer.Exit: always, with ``code``.
    """
    sys.stderr.write(f"riffle: {' '.join(message.split())}\n")
    raise typer.Exit(code)


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
