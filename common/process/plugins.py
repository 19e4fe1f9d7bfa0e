"""Code that people bring: by an entry point of their package, or from a Python file.

A file is named as ``path/to/file.py:name``. What it holds runs with the rights of this process. So
a reference to a file comes from a command line or from a process's own settings, never from a
request: the names that requests may carry (`coordinator.specs.LearnerName`) cannot spell one.
"""

import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from riffle.common.protocol.errors import LocalError

Maker = Callable[..., Any]


def is_file(reference: str) -> bool:
    """Whether this is ``path/to/file.py:name`` and not the name of something known."""
    return ".py:" in reference


def name_of(reference: str) -> str:
    """A short name for what a file holds: ``dir/Own_learner.py:Mine`` is ``own-learner``."""
    path, _, _ = reference.rpartition(":")
    return re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")[:50]


def from_file(reference: str) -> Maker:
    """What ``path/to/file.py:name`` names; the file is run.

    Raises:
        LocalError: ``invalid-spec``: there is no such file or name, or running it failed; the
            detail says in which line.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path).resolve()
    module_name = f"riffle_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise LocalError("invalid-spec", f"{reference}: there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise LocalError("invalid-spec", f"{reference}: {where(error, str(file))}") from error
    return _callable(reference, vars(module), name)


def from_entry_point(entry: EntryPoint) -> Maker:
    """What another package offers.

    Raises:
        LocalError: ``invalid-spec``: it cannot be imported.
    """
    try:
        found: Maker = entry.load()
    except Exception as error:
        raise LocalError("invalid-spec", f"{entry.name} ({entry.value}): {where(error)}") from error
    return found


def offered(group: str) -> dict[str, EntryPoint]:
    """What other packages offer in a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def parameters(maker: Maker) -> list[str]:
    """Names of the parameters that a class or function takes by name, in order."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(maker).parameters.values() if p.kind in kinds]


def where(error: BaseException, file: str | None = None) -> str:
    """An error of somebody's code in one line: what, and in which line of which file.

    The line is the innermost of ``file``, theirs, where the error passed through it, for whoever
    has made a mistake looks for it there and not in a library. Else it is the innermost of all but
    our call of their code: call this where the error was caught, in the function that called their
    code, whose own frame is the outermost and is left out.
    """
    called = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in called if frame.filename == file] or called
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" (line {error.lineno})"
    return f"{type(error).__name__}: {error}{place}"


def file_of(code: object) -> str | None:
    """The file of a class, of a function, or of an object's class; None of what is built in."""
    written = code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
    try:
        return inspect.getfile(written)
    except (TypeError, OSError):
        return None


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the known word that is most like this one, or nothing."""
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """``there is no figure 'fig-6a'; did you mean 'fig6a'? known are`` all that there are."""
    found = list(known)
    hint, listed = nearest(name, found) or ";", ", ".join(found) or "none"
    return f"there is no {what} {name!r}{hint} known are {listed}"


def _callable(reference: str, names: dict[str, Any], name: str) -> Maker:
    found = names.get(name)
    if not callable(found):
        own = [key for key, value in names.items() if callable(value) and not key.startswith("_")]
        hint = nearest(name, own)
        raise LocalError("invalid-spec", f"{reference}: there is no class or function {name}{hint}")
    maker: Maker = found
    return maker
