"""Code from files: it is loaded and named, and its errors are explained."""

import subprocess
import sys
from pathlib import Path

import pytest

from riffle.common.process.plugins import (
    fingerprint,
    is_file_reference,
    load_file,
    parameter_names,
    short_name,
    suggestion,
)
from riffle.common.protocol.errors import LocalError


def test_a_file_gives_the_class_that_the_reference_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Mine:\n    problem: 'int'\n    share: float = 0.5\n"
    )
    maker = load_file(f"{file}:Mine")
    assert parameter_names(maker) == ["problem", "share"]
    assert maker(1, share=0.25).share == 0.25


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "Mine", "there is no class or function Mine"),
        ("class Mine: ...", "Mime", "did you mean 'Mine'"),
        ("Mine = 3", "Mine", "there is no class or function Mine"),
        ("\n1 / 0", "Mine", r"ZeroDivisionError: division by zero \(mine.py, line 2\)"),
        ("\nclass", "Mine", r"SyntaxError: .*\(line 2\)"),
        ("import nowhere_to_be_found", "Mine", "ModuleNotFoundError"),
    ],
)
def test_a_wrong_file_is_explained(text: str, name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(LocalError, match=message) as caught:
        load_file(f"{tmp_path}/mine.py:{name}")
    assert caught.value.slug == "invalid-spec"


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="there is no Python file"):
        load_file(f"{tmp_path}/mine.py:Mine")


def test_references_short_names_and_suggestions() -> None:
    assert is_file_reference("a/b.py:C")
    assert not is_file_reference("gymnasium:FrozenLake-v1")
    with pytest.raises(LocalError, match=r"a/b\.py: name the class or function in it"):
        is_file_reference("a/b.py")
    assert short_name("dir/Own_learner.py:Mine") == "own-learner"
    assert (
        suggestion("riverswin-v0", ["RiverSwim-v0", "Bandit-v0"])
        == "; did you mean 'RiverSwim-v0'?"
    )
    assert suggestion("xyz", ["abc"]) == ""


SOURCE = """
from functools import lru_cache
import numpy as np

SCALES = {"one": [1, 2], "two": {3, 4}}
ARRAY = np.arange(3.0)

@lru_cache
def cached(x):
    return x + 1

class Base:
    rate: float = 0.5

class Mine(Base):
    def go(self, share=0.25):
        import distant
        return [cached(SCALES["one"][0] * share * n) for n in ARRAY], distant.FAR

    @property
    def best(self):
        return {"a", "b", "c"}

def unrelated():
    return 1
"""
PRINT = "import sys, plain; from riffle.common.process.plugins import fingerprint as f; "


def printed(folder: Path, source: str, distant: str = "FAR = 1") -> str:
    """Returns the fingerprint that a fresh process computes."""
    (folder / "plain.py").write_text(source)
    (folder / "distant.py").write_text(distant)
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {PRINT} print(f(plain.Mine))"
    command = [sys.executable, "-B", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_fingerprint_is_of_the_code_and_all_that_it_uses(tmp_path: Path) -> None:
    first = printed(tmp_path, SOURCE)
    assert first == printed(tmp_path, SOURCE), "the order of sets differs from process to process"
    assert first == printed(tmp_path, "# a comment\n" + SOURCE.replace("return 1\n", "return 2\n"))
    changes = ("x + 1", "1, 2", "3, 4", "3.0", "0.5", "0.25", '"b"')
    others = [printed(tmp_path, SOURCE.replace(old, f"{old}5")) for old in changes[:-1]]
    others += [
        printed(tmp_path, SOURCE.replace('"b"', '"d"')),
        printed(tmp_path, SOURCE, "FAR = 2"),
    ]
    assert len({first, *others}) == 1 + len(changes) + 1


def test_state_that_is_no_code_and_cycles_are_no_obstacle() -> None:
    import threading

    lock = threading.Lock()
    loop: list[int] = []
    assert fingerprint(lambda: lock) == fingerprint(lambda: lock)

    def again(n: int) -> int:
        return again(n - 1) if n else len(loop)

    assert len(fingerprint(again)) == 16
