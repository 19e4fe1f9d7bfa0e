"""The documentation says what the code does."""

import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import riffle
from docs.reference import PAGES, SETTINGS, apps, commands, option_meanings
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import PROBLEMS
from riffle.coordinator.learners.registry import BUILT_IN
from riffle.coordinator.learning.sdp_pe.constants import PAPER
from riffle.deploy.cli.main import COMMANDS, build
from riffle.node_client.environments.registry import BUILDERS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), ROOT / "deploy" / "README.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_those_of_the_code(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "say `make docs`"


def test_no_command_and_no_option_is_undocumented() -> None:
    for name, command in commands():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


def test_no_setting_is_undocumented() -> None:
    for role, settings in SETTINGS.items():
        for name, field in settings.model_fields.items():
            assert field.description, f"{role}: {name} has no description"


def test_no_route_is_undocumented() -> None:
    for service, app in apps().items():
        for path, methods in app.openapi()["paths"].items():
            for method, route in methods.items():
                assert route.get("description"), f"{service}: {method} {path} has no docstring"


def test_no_learner_option_environment_or_problem_is_undocumented() -> None:
    options = {field.name for field in fields(PAPER)} - {"name"}
    assert set(option_meanings()) == options, "see the docstring of Constants"
    for name, entry in {**BUILT_IN, **BUILDERS}.items():
        assert entry.__doc__, f"{name} has no docstring"
    pages = "".join(PAGES[name]() for name in ("learners.md", "problems.md"))
    for name in [*BUILT_IN, *BUILDERS, *options, *PROBLEMS]:
        assert f"\n| `{name}` |" in pages, name


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    assert set(re.findall(r":: riffle\.(\w+)\n", page)) == set(riffle.__all__)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.stem)
def test_every_page_is_in_the_index(page: Path) -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert page.stem == "index" or f"\n{page.stem}\n" in index


def commands_shown() -> list[tuple[str, str]]:
    lines = [
        (document.name, line.removeprefix("$ ").split("#")[0].split(" &")[0].strip())
        for document in DOCUMENTS
        for block in re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    return [(name, line) for name, line in lines if line.startswith("riffle ")]


@pytest.mark.parametrize(("document", "line"), commands_shown())
def test_every_command_shown_is_understood(document: str, line: str) -> None:
    """Parses it; other tests run it."""
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


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a page's headings, as links name them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_has_a_target() -> None:
    for document in DOCUMENTS:
        for link, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", document.read_text()):
            target = document.parent / link if link else document
            assert target.exists(), f"{document.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{document.name}: {link}#{anchor}"


def names_of_tests(path: Path) -> set[str]:
    """The names of the tests in a file, or in all files of a folder."""
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text())}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda page: page.name)
def test_named_tests_exist(document: Path) -> None:
    text = document.read_text()
    for path, name in re.findall(r"(tests/[\w/]+(?:\.py)?)(?:::(\w+))?", text):
        assert (ROOT / path).exists(), path
        assert not name or name in names_of_tests(ROOT / path), f"{path}::{name}"


def test_every_test_named_without_a_path_exists() -> None:
    known = names_of_tests(ROOT / "tests") | set(BatchDescriptor.model_fields)
    known |= {file.stem for file in (ROOT / "tests").rglob("test_*.py")}
    for document in DOCUMENTS:
        if document.name not in PAGES:
            for name in re.findall(r"\btest_\w+", document.read_text()):
                assert name in known, f"{document.name}: {name}"


FOLDERS = "coordinator|shuffler|node_client|common|deploy|experiments|benchmarks|examples"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda page: page.name)
def test_named_files_exist(document: Path) -> None:
    """A path in code font that begins with one of the folders is a file or a folder."""
    for path in re.findall(rf"`((?:{FOLDERS})/[\w/.]*)`", document.read_text()):
        assert (ROOT / path).exists(), path


def test_the_architecture_has_every_contract_and_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for contract in contracts["contracts"]:
        if contract["type"] == "layers":
            layers = " → ".join(layer.replace(" | ", ", ") for layer in contract["layers"])
            assert f"| `{contract['containers'][0]}` | {layers} |" in page
    for package in (ROOT / "src" / "riffle").glob("*/*/__init__.py"):
        folder = package.parent.relative_to(ROOT / "src" / "riffle")
        assert f"`{folder}/`" in page, folder


def test_every_log_event_is_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    call = re.compile(r"(?:\bnote|journal\.\w+)\(\s*\"([a-z-]+)\"", re.IGNORECASE)
    for folder in ("shuffler", "coordinator", "node_client", "common"):
        for file in (ROOT / folder).rglob("*.py"):
            for event in call.findall(file.read_text()):
                assert f"`{event}`" in page, f"{file.relative_to(ROOT)}: {event}"
