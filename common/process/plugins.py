"""Loads external code, from a Python file or by an entry point of a package.

A file is named as ``path/to/file.py:name``. Its code runs with the rights of this process, so
references to files come from a command line or from a process's own settings, never from a request.
The names that a request may contain (`coordinator.specs.LearnerName`) cannot refer to a file.
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

Constructor = Callable[..., Any]


def is_file_reference(reference: str) -> bool:
    """Returns whether this is ``path/to/file.py:name``, not a known name.

    Raises LocalError ``invalid-spec`` if the name after a file is missing.
    """
    if reference.endswith(".py"):
        text = f"{reference}: name the class or function in it, too, as {reference}:Name"
        raise LocalError("invalid-spec", text)
    return ".py:" in reference


def short_name(reference: str) -> str:
    """Returns a short name for a file's code: ``own-learner`` for ``dir/Own_learner.py:Mine``."""
    path, _, _ = reference.rpartition(":")
    return re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")[:50]


def load_file(reference: str) -> Constructor:
    """Runs a file and returns the class or function that ``path/to/file.py:name`` names.

    Raises LocalError ``invalid-spec`` if the file or the name is missing, or if the file's code
    fails (the error names the line).
    """
    path, _, name = reference.rpartition(":")
    file = Path(path).resolve()
    module_name = f"riffle_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise LocalError("invalid-spec", f"{reference}: there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        detail = f"{reference}: {describe_error(error, str(file))}"
        raise LocalError("invalid-spec", detail) from error
    constructor = vars(module).get(name)
    if not callable(constructor):
        names = (key for key, value in vars(module).items() if callable(value))
        own = [key for key in names if not key.startswith("_")]
        hint = "; --option or --param gives parameters" if "," in name else suggestion(name, own)
        raise LocalError("invalid-spec", f"{reference}: there is no class or function {name}{hint}")
    return constructor  # type: ignore[no-any-return]


def load_entry_point(entry: EntryPoint) -> Constructor:
    """Imports another package's entry point; raises LocalError ``invalid-spec`` if that fails."""
    try:
        constructor: Constructor = entry.load()
    except Exception as error:
        detail = f"{entry.name} ({entry.value}): {describe_error(error)}"
        raise LocalError("invalid-spec", detail) from error
    return constructor


def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def parameter_names(constructor: Constructor) -> list[str]:
    """Returns, in order, the parameters that a class or function takes by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(constructor).parameters.values() if p.kind in kinds]


def takes_any_name(constructor: Constructor) -> bool:
    """Returns whether a class or function has ``**parameters``."""
    kinds = {p.kind for p in inspect.signature(constructor).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def describe_error(error: BaseException, file: str | None = None) -> str:
    """Describes an error in external code in one line: its type, text, file and line.

    ``file`` is the external code's file. If the error passed through this file, the named line is
    the innermost line in it, because the code's author looks for a mistake there. Otherwise, the
    named line is the innermost line of all. Call this in the function that called the external
    code: the frame of that function is left out.
    """
    called = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in called if frame.filename == file] or called
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" (line {error.lineno})"
    return f"{type(error).__name__}: {error}{place}"


def source_file(code: object) -> str | None:
    """Returns the source file of a class, a function, or an object's class; None for a built-in."""
    definition = code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
    try:
        return inspect.getfile(definition)
    except (TypeError, OSError):
        return None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` with the most similar known word, or nothing."""
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns ``there is no figure 'fig-6a'; did you mean 'fig6a'? known are ...``."""
    names = list(known)
    hint, listed = suggestion(name, names) or ";", ", ".join(names) or "none"
    return f"there is no {kind} {name!r}{hint} known are {listed}"
