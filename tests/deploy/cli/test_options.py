"""Options as dataclasses: every field is an option, with its type, default and help."""

import re
from dataclasses import dataclass, fields
from typing import Annotated, get_args

import pytest
import typer
from typer.core import TyperGroup, TyperOption
from typer.main import get_command
from typer.testing import CliRunner

from riffle.common.mechanism.counters import Families
from riffle.deploy.cli import options
from riffle.deploy.cli.main import build
from riffle.deploy.cli.options import RunOptions, expand_options


@dataclass(frozen=True)
class Size:
    """Two options."""

    width: Annotated[int, typer.Option(min=1, help="its width")] = 1
    name: Annotated[str | None, typer.Option(help="its name")] = None


@expand_options()
def print_size(first: Annotated[bool, typer.Option()] = False, size: Size = Size()) -> None:
    """Print it."""
    typer.echo(f"{first} {size}")


def call(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(print_size)
    result = CliRunner().invoke(app, arguments)
    return result.stdout + result.stderr


def test_fields_of_a_dataclass_are_options() -> None:
    assert call().strip() == f"False {Size()}"
    assert call("--width", "3", "--name", "x", "--first").strip() == f"True {Size(3, 'x')}"
    assert "its name" in call("--help")
    assert "0 is not in the range" in call("--width", "0") or "greater than" in call("--width", "0")


def options_of(command: str) -> list[str]:
    root = get_command(build([command]))
    assert isinstance(root, TyperGroup)
    parameters = root.commands[command].params
    return [str(p.name) for p in parameters if isinstance(p, TyperOption)]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("up", set()),
        ("simulate", {"batch_seconds", "episode_seconds", "reissues"}),
        ("compare", {"trust"}),
        ("run", {"preset"}),
    ],
)
def test_commands_have_the_options_of_a_run_in_one_order(command: str, missing: set[str]) -> None:
    names = [field.name for field in fields(RunOptions) if field.name not in missing]
    assert [name for name in options_of(command) if name in names] == names
    assert not missing & set(options_of(command))


def test_counter_families_have_the_same_names_as_in_the_mechanism() -> None:
    assert get_args(options.Families) == get_args(Families)


@pytest.mark.parametrize(
    ("text", "number"), [("2e4", 20_000), ("20000", 20_000), ("1.5e3", 1_500), ("3.0", 3)]
)
def test_2e4_is_a_whole_number(text: str, number: int) -> None:
    assert options.whole_number(text) == number


@pytest.mark.parametrize("text", ["2.5", "1e-3", "many", "nan", "inf", "1e999", ""])
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(repr(text))):
        options.whole_number(text)


def test_pairs_have_types() -> None:
    texts = ["map=8x8", "ice=false", "n=3", "K=2e4", "x=0.5", "means=[0.1,1e-2]", "odd=[a]"]
    assert options.read_pairs(texts) == {
        "map": "8x8", "ice": False, "n": 3, "K": 20_000, "x": 0.5, "means": [0.1, 0.01],
        "odd": "[a]",
    }  # fmt: skip
