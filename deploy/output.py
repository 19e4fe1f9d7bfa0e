"""Output of every command: one document on stdout, all other text on stderr, an exit code.

Exit codes: 0 done; 1 a negative result (a failed or stopped run, a failed check); 2 wrong usage; 3
an input was refused; 4 a required service or file is not available, or is in use; 130 interrupted.
"""

import datetime
import json
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from functools import wraps
from typing import Annotated, Any, Literal, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from riffle.common.process.tables import Row, columns_of, csv_text
from riffle.common.protocol.errors import LocalError, RiffleError

Output = Annotated[Literal["text", "json"], typer.Option("--format", help="text or json")]
TableOutput = Annotated[
    Literal["text", "json", "csv"], typer.Option("--format", help="text, json or csv")
]


class Exit(IntEnum):
    """Exit codes; the module's docstring explains them."""

    DONE = 0
    NO = 1
    USAGE = 2
    REFUSED = 3
    UNAVAILABLE = 4
    INTERRUPTED = 130


class RunError(LocalError):
    """Raised if a run failed or was stopped: a negative result, not a refusal."""


class Commands(TyperGroup):
    """A group of commands. Its usage errors quote the value that was refused; Typer's do not."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  (Typer's own types)
        """Runs the command that the context names."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError  # noqa: PLC0415  (slow; for this message only)

            if isinstance(error.__cause__, ValidationError):
                value, text = error.__cause__.errors()[0]["input"], error.message
                quoted = text if repr(value) in text else f"{text.rstrip('.')}, not {value!r}"
                error.message = quoted.removeprefix("Value error, ")
            raise


P = ParamSpec("P")
T = TypeVar("T")

TICK_SECONDS = 0.5
FIRST_LINE_SECONDS, LINE_SECONDS, SILENT_SECONDS = 1.0, 5.0, 10.0
PIPE_WIDTH = 1_000
"""Width of a table that goes to a file or a program: wide enough that no cell is cut off."""

progress = Console(stderr=True)
_UNAVAILABLE = {"unavailable", "internal", "too-many-requests"}


def emit(document: Mapping[str, Any], output: Output, text: Callable[[], None]) -> None:
    """Prints the answer: the document as JSON, or what ``text`` prints."""
    if output == "json":
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
    else:
        text()


def emit_findings(findings: Iterable[Any], output: Output) -> NoReturn:
    """Prints findings as a table or as JSON. The exit code is 1 if a finding is not ``ok``."""
    documents = [asdict(finding) for finding in findings]
    well = all(found["ok"] for found in documents)
    columns = [name for name in documents[0] if name != "ok"]
    rows = [("ok" if f["ok"] else "WRONG", *(f[name] for name in columns)) for f in documents]
    emit({"ok": well, "findings": documents}, output, lambda: table(("", *columns), rows))
    raise typer.Exit(Exit.DONE if well else Exit.NO)


def emit_rows(
    document: Mapping[str, Any],
    rows: Sequence[Row],
    output: TableOutput,
    columns: Sequence[str] | None = None,
) -> None:
    """Prints ``rows`` as a table or as CSV, or ``document`` as JSON. ``columns`` limits a table."""
    if output == "json":
        emit(document, "json", lambda: None)
    elif output == "csv":
        sys.stdout.write(csv_text(rows))
    else:
        names = columns or columns_of(rows)
        table(names, [[readable(name, row.get(name)) for name in names] for row in rows])


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Prints a plain table on stdout, numbers aligned right."""
    grid = Table(*columns, title=title or None, title_justify="left")
    for column, value in zip(grid.columns, rows[0] if rows else (), strict=False):
        column.justify = "right" if isinstance(value, int | float) else "left"
    for row in rows:
        grid.add_row(*(_cell(value) for value in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(grid)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def readable(name: str, value: object) -> object:
    """Returns a value formatted for people: times as UTC, all others unchanged."""
    return utc(value) if name.endswith("_at") and isinstance(value, int | float) else value


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as ``1 node``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def utc(seconds: float) -> str:
    """Returns seconds since 1970 as a date and time in UTC."""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}Z"


def dotted_rows(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields (path, value) for each value in a nested document. A path is names joined by dots."""
    for key, value in document.items():
        if isinstance(value, list):
            value = dict(enumerate(value))  # noqa: PLW2901
        if isinstance(value, dict):
            yield from dotted_rows(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def line(text: str) -> None:
    """Prints a line of progress. Prints nothing on a terminal, where a bar shows the progress."""
    if not progress.is_terminal:
        progress.print(text, highlight=False, soft_wrap=True)


def bar(columns: str = "{task.completed:.0f}/{task.total:.0f}", *, eta: bool = True) -> Progress:
    """Returns a progress bar with times, which shows nothing if stderr is not a terminal."""
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
    """Progress in steps: a bar on a terminal, occasional lines elsewhere."""

    def __init__(
        self, shown: Progress, what: str, total: int | None, clock: Callable[[], float]
    ) -> None:
        shown.add_task(what, total=total)
        self._shown, self._task = shown, shown.tasks[0]
        self._clock, self._lock = clock, threading.Lock()
        self._began = clock()
        self._first: tuple[float, float] | None = None
        self._next = self._began + FIRST_LINE_SECONDS

    def set_total(self, total: int) -> None:
        """Sets the number of steps, if it was not known at the start."""
        self._shown.update(self._task.id, total=total)

    def step(self, count: int = 1) -> None:
        """Counts one or more further steps as done."""
        self._shown.advance(self._task.id, count)
        self._first = self._first or (self._clock(), self._task.completed)
        self.print_if_due()

    def print_if_due(self) -> None:
        """Prints a line if the last line is `LINE_SECONDS` old."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return
            self._next = now + LINE_SECONDS
            task = self._task
            of = "" if task.total is None else f" of {task.total:.0f}"
            took = "" if task.completed else f" after {now - self._began:.0f} s"
            line(f"{task.description}: {task.completed:.0f}{of}{took}{self._time_left(now)}")

    def _time_left(self, now: float) -> str:
        """Returns a text such as ``, about 9 s left``, from the mean rate since the first step.

        Just after the first step, the text is empty. Parallel processes end their first steps at
        about the same time, so the rate is not known yet.
        """
        first, done = self._first or (now, 0)
        if now - first < (first - self._began) / 5:
            return ""
        return time_left(now - first, self._task.completed - done, (self._task.total or 0) - done)


def time_left(seconds: float, done: float, total: float) -> str:
    """Returns a text such as ``, about 9 s left``, from the mean rate; "" at the start and end."""
    rest = seconds * (total - done) / max(done, 1)
    return f", about {rest:.0f} s left" if 0 < done < total else ""


@contextmanager
def steps(
    what: str, total: int | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Steps]:
    """Shows during the block how many steps are done and how long the rest will take."""
    with bar() as shown:
        counted = Steps(shown, what, total, clock)
        with _call_every(SILENT_SECONDS, counted.print_if_due):
            yield counted


@contextmanager
def timed_bar(what: str, seconds: float) -> Iterator[None]:
    """Shows a bar that moves with the clock, for a block that takes about ``seconds``."""
    line(f"{what}: about {seconds:.0f} s")
    with bar("of about {task.total:.0f} s") as shown:
        task = shown.add_task(what, total=seconds)

        def tick() -> None:
            shown.update(task, completed=min(shown.tasks[0].elapsed or 0.0, seconds))

        with _call_every(TICK_SECONDS, tick):
            yield


@contextmanager
def _call_every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Runs ``call`` every ``seconds`` in a thread, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            call()

    clock = threading.Thread(target=run, daemon=True)
    clock.start()
    try:
        yield
    finally:
        over.set()
        clock.join()


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turns a command's errors into one line on stderr and an exit code, without a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except RiffleError as error:
            fail(error.detail, exit_code(error))
        except (ValueError, FileExistsError) as error:
            fail(str(error), Exit.REFUSED)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and _reader_is_gone():
                raise  # click then ends quietly
            fail(f"{error.strerror or error} {error.filename or ''}".strip(), Exit.UNAVAILABLE)
        except MemoryError as error:
            fail(f"this machine's memory is too small for it: {error}", Exit.UNAVAILABLE)
        except KeyboardInterrupt:
            fail("interrupted", Exit.INTERRUPTED)

    return run


def _reader_is_gone() -> bool:
    """Returns whether nobody reads this process's output any more, as after ``| head``."""
    output = select.poll()
    output.register(sys.stdout, select.POLLOUT)
    return any(event & select.POLLERR for _, event in output.poll(0))


def exit_code(error: RiffleError) -> Exit:
    """Returns the exit code of a command that ends with this error."""
    if isinstance(error, RunError):
        return Exit.NO
    return Exit.UNAVAILABLE if error.slug in _UNAVAILABLE else Exit.REFUSED


def fail(message: str, code: Exit) -> NoReturn:
    """Writes one line on stderr and ends the command: raises typer.Exit with ``code``."""
    sys.stderr.write(f"riffle: {' '.join(message.split())}\n")
    raise typer.Exit(code)
