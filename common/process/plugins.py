"""Loads external code, from a Python file or by an entry point of a package.

A reference to a file is ``path/to/file.py:name``. The file's code runs with the rights of this
process. Therefore references to files come from a command line or from a process's own settings,
never from a request (`coordinator.specs.LearnerName`).
"""

import difflib
import dis
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from riffle.common.protocol.errors import LocalError

Constructor = Callable[..., Any]
FILE_MODULE = "riffle_file_"
DEFINED = (ModuleType, type, FunctionType)


def is_file_reference(reference: str) -> bool:
    """Returns whether a reference is ``path/to/file.py:name`` and not the name of known code.

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

    Raises LocalError ``invalid-spec`` if file or name is missing, or the file's code fails.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path).resolve()
    module_name = f"{FILE_MODULE}{file.stem}"
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

    The line is the innermost line in ``file``, the external code's own file. If the traceback has
    no such line, the line is the innermost of all. Call `describe_error` in the function that
    called the external code: the frame of that function is left out.
    """
    place = place_of(error, file)
    if isinstance(error, SyntaxError):
        place = f" (line {error.lineno})"
    return f"{type(error).__name__}: {error}{place}"


def place_of(error: BaseException, file: str | None, *, within: bool = False) -> str:
    """Returns the place that `describe_error` names, such as `` (mine.py, line 7)``.

    With ``within``, returns "" for a place in another file.
    """
    called = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in called if frame.filename == file] or ([] if within else called)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def source_file(code: object) -> str | None:
    """Returns the source file of a class, a function, or an object's class; None for a built-in."""
    definition = code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
    try:
        return inspect.getfile(definition)
    except (TypeError, OSError):
        return None


def fingerprint(code: object) -> str:
    """Returns a digest (16 hexadecimal digits) of the code as it was loaded, not of its file.

    The digest covers byte code, defaults, base classes, and all functions, modules and other
    globals that the code uses. Parts of Riffle, installed packages and Python count only by their
    names.
    """
    return hashlib.sha256(repr(_described(code, {})).encode()).hexdigest()[:16]


def own_files() -> tuple[tuple[str, int], ...]:
    """Returns the user's own imported files (`_is_own`), and when each last changed."""
    names = [name for name in sys.modules if not name.startswith(FILE_MODULE) and _is_own(name)]
    files = {str(getattr(sys.modules[name], "__file__", "")) for name in names}
    return tuple((f, Path(f).stat().st_mtime_ns) for f in sorted(files) if Path(f).is_file())


def _is_own(name: str | None) -> bool:
    """Returns whether a module is the user's own: not Riffle's, not installed, not Python's own."""
    module = sys.modules.get(name or "")
    if module is None or name == "__main__":
        return True
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    installed = {"site-packages", "dist-packages"}.intersection(Path(place).parts)
    python = not place or Path(place).is_relative_to(sysconfig.get_path("stdlib"))
    return not (installed or python or str(name).partition(".")[0] == "riffle")


def _described(value: Any, seen: dict[int, object]) -> object:  # noqa: ANN401
    """Returns a value as nested lists of text, equal in every process. ``seen`` breaks cycles."""
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_described(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_described(item, seen)) for item in value)
    if isinstance(value, dict):
        return _described(list(value.items()), seen)
    called = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value))
    name = f"{getattr(value, '__module__', None)}.{called}"
    if id(value) in seen:
        return name
    seen[id(value)] = value
    described = [name, _described(_content(value), seen)]
    if not isinstance(value, DEFINED):  # describe a shared object like equal copies
        del seen[id(value)]
    return described


def _content(value: Any) -> object:  # noqa: ANN401
    """Returns the parts of an object that `fingerprint` covers."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, value.co_consts
    if isinstance(value, DEFINED):
        own = _is_own(value.__name__ if isinstance(value, ModuleType) else value.__module__)
        content = _function if isinstance(value, FunctionType) else _attributes
        return content(value) if own else None
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if hasattr(value, "__wrapped__"):  # a static method, or a cache, whose state is not code
        return value.__wrapped__
    try:
        return [
            list(part) if hasattr(part, "__next__") else part for part in value.__reduce_ex__(4)
        ]
    except Exception:  # it cannot be copied, such as a lock
        return None


def _attributes(owner: Any) -> object:  # noqa: ANN401
    """Returns a class's bases (none for a module), and all attributes except Python's own."""
    kept = (FunctionType, classmethod, staticmethod, property)
    given = {k: v for k, v in vars(owner).items() if k[:2] != "__" or isinstance(v, kept)}
    return getattr(owner, "__bases__", ()), [(k, given[k]) for k in sorted(given)]


def _function(function: Any) -> object:  # noqa: ANN401
    """Returns a function's code, defaults, closure, and the globals and modules that it names."""
    codes, modules = [function.__code__], []
    for code in codes:  # the list grows by nested code
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    names = {step.argval for step in steps if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"}}
    for name in sorted({step.argval for step in steps if step.opname == "IMPORT_NAME"}):
        with suppress(Exception):
            modules.append(importlib.import_module(name))
    cells = [c.cell_contents for c in function.__closure__ or () if c != CellType()]
    used = [(name, value) for name, value in function.__globals__.items() if name in names]
    return (codes[0], function.__defaults__, function.__kwdefaults__, cells,
            sorted(used, key=lambda pair: pair[0]), modules)  # fmt: skip


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` with the most similar known word, or nothing."""
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns, say, ``there is no figure 'fig-6a'; did you mean 'fig6a'? known are fig6a``."""
    names = list(known)
    hint, listed = suggestion(name, names) or ";", ", ".join(names) or "none"
    return f"there is no {kind} {name!r}{hint} known are {listed}"
