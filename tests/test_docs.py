"""The documentation says what the code does."""

import re
import shlex
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from deploy.cli.main import COMMANDS, build
from deploy.reference import PAGES

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "deploy" / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_those_of_the_code(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "say `make docs`"


def commands_shown() -> list[tuple[str, str]]:
    lines = [
        (document.name, line.removeprefix("$ ").split("#")[0].strip())
        for document in DOCUMENTS
        for block in re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    return [(name, line) for name, line in lines if line.startswith("riffle ")]


@pytest.mark.parametrize(("document", "line"), commands_shown())
def test_every_command_shown_is_understood(document: str, line: str) -> None:
    """Its options exist; running them is what other tests do."""
    words = shlex.split(line)[1:]
    command = get_command(build(words))
    while isinstance(command, TyperGroup):
        command = command.commands[words.pop(0)]
    assert isinstance(command, TyperCommand)
    command.make_context(document, list(words), resilient_parsing=False)


def test_the_readme_lists_every_command() -> None:
    table = (ROOT / "README.md").read_text()
    missing = [name for name in COMMANDS if not re.search(rf"`(riffle )?{name}\b", table)]
    assert not missing


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_named_tests_exist() -> None:
    for document in DOCUMENTS:
        for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", document.read_text()):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{document.name}: {file}::{name}"
