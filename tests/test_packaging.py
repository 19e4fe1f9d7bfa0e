"""Only `riffle` is installed, and nothing in the user's folders takes its place."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from venv import EnvBuilder

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
FOLDERS = ("common", "coordinator", "deploy", "experiments", "node_client", "shuffler")


def users_environment() -> dict[str, str]:
    """Returns the environment without what tests, and commands called within them, set in it."""
    ours = ("RIFFLE_", "PYTHONSAFEPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git tracks."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
        check=True,
    ).stdout  # fmt: skip
    pack = ["tar", "-c", "--null", "--ignore-failed-read", "--files-from=-"]
    archive = subprocess.run(pack, cwd=ROOT, input=tracked, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(built), str(source)], check=True)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel and, by a path, what it depends on."""
    folder = tmp_path_factory.mktemp("clean")
    EnvBuilder(symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names has its own .pth files ignored: the checkout stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*install, "--quiet", "--no-deps", "--ignore-installed", wheel], check=True)
    return folder / "bin"


@pytest.fixture(params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest) -> Path:
    """`bin` of an environment that Riffle is installed in."""
    if request.param == "editable":
        return Path(sys.executable).parent
    found: Path = request.getfixturevalue("clean")
    return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A user's folder, in which everything that has a name of ours refuses to be imported."""
    for name in FOLDERS:
        for package in (tmp_path / name, tmp_path / "also" / name):
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(f"raise RuntimeError('{name}')")
    for name in ("numpy", "multiprocessing", "errors"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name}')")
    yield tmp_path


def test_every_link_leads_into_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    links = [file for file in files if file.is_symlink()]
    assert {link.name for link in links} >= {"common", "shuffler"}
    assert [
        link for link in links if not (link.parent / link.readlink()).resolve().is_relative_to(ROOT)
    ] == []


def test_wheel_holds_riffle_alone_and_the_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {re.split(r"[/-]", name)[0] for name in names} == {"riffle", "riffle_rl"}
    below = {name.split("/")[1] for name in names if name.startswith("riffle/")}
    assert below == {*FOLDERS, "__init__.py"}
    assert any(name.endswith("page/index.html") for name in names)


NETWORK = ("up", "--epsilon", "8", "--nodes", "2", "--episodes", "400", "--env", "Bandit-v0")
POOL = ("simulate", "--episodes", "400", "--env", "Bandit-v0", "--seeds", "2", "--workers", "2")


@pytest.mark.parametrize("command", [NETWORK, POOL], ids=["up", "simulate"])
def test_command_runs_where_the_user_has_folders_of_the_same_names(
    installed: Path, home: Path, command: tuple[str, ...]
) -> None:
    words = [str(installed / "riffle"), *command, "--format", "json"]
    done = subprocess.run(
        words, cwd=home, env=users_environment() | {"PYTHONPATH": str(home / "also")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_bare_name_is_refused_with_the_name_to_import(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT, env=users_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.endswith(f"ImportError: import riffle.{name} instead of {name}\n")


def test_public_names_can_be_imported_anywhere(installed: Path, home: Path) -> None:
    program = "import riffle; print([getattr(riffle, name) for name in dir(riffle)])"
    subprocess.run([installed / "python", "-P", "-c", program], cwd=home, check=True)
    with pytest.raises(AttributeError, match="no attribute 'simulator'"):
        __import__("riffle").simulator  # noqa: B018
