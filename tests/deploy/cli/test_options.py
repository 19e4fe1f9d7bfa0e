"""Options as dataclasses: every field is an option, with its type, default and help."""

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
