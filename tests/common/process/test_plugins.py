"""Code from files: it is loaded and named, and its errors are explained."""

from pathlib import Path

import pytest

from riffle.common.process.plugins import (
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
