"""How every command speaks: one document on stdout, everything else on stderr, stated exit codes.

Exit codes: 0 done; 1 the answer is no (a run that failed or was stopped, a failed check); 2 wrong
usage; 3 an input was refused; 4 a service or file that is needed is not available, or is in use;
130 interrupted.
"""

import datetime
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from functools import wraps
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from riffle.common.process.tables import Row, columns_of, csv_text
from riffle.common.protocol.errors import LocalError, RiffleError


class Format(StrEnum):
    """Output format of a command."""

    text = "text"
    json = "json"


Output = Annotated[Format, typer.Option("--format", help="text or json")]


class TableFormat(StrEnum):
    """Output format of a command whose answer is rows."""

    text = "text"
    json = "json"
    csv = "csv"


class Exit(IntEnum):
    """Exit codes; see the module's docstring."""

    DONE = 0
    NO = 1
    USAGE = 2
    REFUSED = 3
    UNAVAILABLE = 4
    INTERRUPTED = 130


class RunError(LocalError):
    """A run failed or was stopped: nothing was refused, and the answer is no."""


P = ParamSpec("P")
T = TypeVar("T")

TICK_SECONDS = 0.5
FIRST_LINE_SECONDS, LINE_SECONDS, SILENT_SECONDS = 1.0, 5.0, 10.0
PIPE_WIDTH = 1_000
"""Columns of a table that is not for a terminal: nothing is cut off that a program may read."""

progress = Console(stderr=True)
_UNAVAILABLE = {"unavailable", "internal", "too-many-requests"}


def emit(document: Mapping[str, Any], output: Format, text: Callable[[], None]) -> None:
    """Print the answer: the document as JSON, or the text form."""
    if output is Format.json:
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
    else:
        text()


def emit_rows(
    document: Mapping[str, Any],
    rows: Sequence[Row],
    output: TableFormat,
    columns: Sequence[str] | None = None,
) -> None:
    """Print rows: as a table (of some columns), as CSV, or as the JSON document they are from."""
    if output is TableFormat.json:
        emit(document, Format.json, lambda: None)
    elif output is TableFormat.csv:
        sys.stdout.write(csv_text(rows))
    else:
        shown = columns or columns_of(rows)
        table(shown, [[told(name, row.get(name)) for name in shown] for row in rows])


def bar(columns: str = "{task.completed:.0f}/{task.total:.0f}", *, eta: bool = True) -> Progress:
    """A progress bar on stderr with elapsed time and ETA; nothing when stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(columns),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if eta else []),
        console=progress,
        disable=not progress.is_terminal,
    )


class Steps:
    """Progress of what has steps: the bar, or off a terminal a line now and then.

    Lines are told with a step, so that whoever is refused at the first one reads only why; a step
    that takes longer is told meanwhile.
    """

    def __init__(
        self, shown: Progress, what: str, total: int | None, clock: Callable[[], float]
    ) -> None:
        self._shown, self._task = shown, shown.add_task(what, total=total)
        self._what, self._total, self._done = what, total, 0
        self._clock, self._telling = clock, threading.Lock()
        self._began = clock()
        self._next = self._began + FIRST_LINE_SECONDS

    def expect(self, total: int) -> None:
        """Say how many steps there are, where that is known late."""
        self._total = total
        self._shown.update(self._task, total=total)

    def step(self, count: int = 1) -> None:
        """One more is done, or several."""
        self._done += count
        self._shown.advance(self._task, count)
        self.tell()

    def tell(self) -> None:
        """Write a line, if one is due."""
        with self._telling:
            now = self._clock()
            if now < self._next:
                return
            self._next = now + LINE_SECONDS
            seconds = now - self._began
            of = "" if self._total is None else f" of {self._total}"
            rest = left(seconds, self._done, self._total or 0)
            took = "" if self._done else f" after {seconds:.0f} s"
            line(f"{self._what}: {self._done}{of}{took}{rest}")


@contextmanager
def steps(
    what: str, total: int | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Steps]:
    """Show how many steps are done and how long the rest takes, while the block lasts."""
    with bar() as shown:
        found = Steps(shown, what, total, clock)
        with ticking(SILENT_SECONDS, found.tell):
            yield found


def left(seconds: float, done: int, total: int) -> str:
    """About how long the rest takes, at the mean rate so far, which took ``seconds``."""
    rest = seconds * (total - done) / max(done, 1)
    return f", about {rest:.0f} s left" if 0 < done < total else ""


@contextmanager
def expected(what: str, seconds: float) -> Iterator[None]:
    """A bar while something runs that takes about so long and does not tell how far it is.

    Off a terminal it is one line.
    """
    line(f"{what}: about {seconds:.0f} s")
    with bar("of about {task.total:.0f} s") as shown:
        task = shown.add_task(what, total=seconds)

        def tick() -> None:
            shown.update(task, completed=min(shown.tasks[0].elapsed or 0.0, seconds))

        with ticking(TICK_SECONDS, tick):
            yield


@contextmanager
def ticking(seconds: float, tick: Callable[[], None]) -> Iterator[None]:
    """Call ``tick`` every so many seconds, in a thread, while the block lasts."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            tick()

    clock = threading.Thread(target=run, daemon=True)
    try:
        clock.start()
        yield
    finally:
        over.set()
        if clock.is_alive():
            clock.join()


def line(text: str) -> None:
    """A line of progress where there is no terminal for a bar."""
    if not progress.is_terminal:
        progress.print(text, highlight=False, soft_wrap=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a plain table on stdout; numbers are aligned right."""
    grid = Table(*columns, title=title or None, title_justify="left")
    for column, value in zip(grid.columns, rows[0] if rows else (), strict=False):
        column.justify = "right" if isinstance(value, int | float) else "left"
    for row in rows:
        grid.add_row(*(_cell(value) for value in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(grid)


def told(name: str, value: object) -> object:
    """A value of a document as a table for people has it: when something was, not a number."""
    return utc(value) if name.endswith("_at") and isinstance(value, int | float) else value


def utc(seconds: float) -> str:
    """Seconds since 1970 as UTC."""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}Z"


def spread(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """A nested document as rows of a table, names joined by dots; for CSV see
    `common.process.tables.flatten`.
    """
    for key, value in document.items():
        if isinstance(value, dict):
            yield from spread(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield from spread({str(i): part for i, part in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """End a command with one line on stderr and an exit code instead of a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except RiffleError as error:
            fail(error.detail, exit_code(error))
        except (ValueError, FileExistsError) as error:
            fail(str(error), Exit.REFUSED)
        except OSError as error:
            fail(f"{error.strerror or error} {error.filename or ''}".strip(), Exit.UNAVAILABLE)
        except MemoryError as error:
            fail(f"this machine's memory is too small for it: {error}", Exit.UNAVAILABLE)
        except KeyboardInterrupt:
            fail("interrupted", Exit.INTERRUPTED)

    return run


def exit_code(error: RiffleError) -> Exit:
    """What a command ends with that an error ends."""
    if isinstance(error, RunError):
        return Exit.NO
    return Exit.UNAVAILABLE if error.slug in _UNAVAILABLE else Exit.REFUSED


def fail(message: str, code: Exit) -> NoReturn:
    """Write one line on stderr and leave.

    Raises:
        typer.Exit: always, with ``code``.
    """
    sys.stderr.write(f"riffle: {' '.join(message.split())}\n")
    raise typer.Exit(code)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
