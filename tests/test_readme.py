"""A newcomer types what a page says, from top to bottom, and it works.

A page that has the line `MARK` is typed whole: in a directory of its own that has the examples of a
clone and nothing else, every line of a console block is a command, in order; one that ends in ``&``
goes on by itself, and the next line waits until it says `WAITS`, as a reader is told to. A Python
block that begins with a file's name is that file, any other is a program. Lines of `ELSEWHERE` are
run by CI itself.

A command whose comment ends in ``quick: FLAGS`` gets these flags by default. RIFFLE_WALK=1 leaves
them out: then every command runs as it stands, each within the five minutes a reader may wait on a
machine that has nothing else to do.

Of pages without the mark the commands that compute are run, with one seed.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from riffle.deploy.cli.main import build

ROOT = Path(__file__).parents[1]
MARK = "<!-- typed by tests/test_readme.py -->"
WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TYPED = [page for page in WRITTEN if MARK in page.read_text()]
COMPUTING = {"simulate": ["--seeds", "1", "--workers", "1"], "account": []}
ELSEWHERE = ("make", "source")
WAITS = "waits for deployments"
PATIENCE = 300
WALK = os.environ.get("RIFFLE_WALK") == "1"


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(
        r"^```(console|python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )


def commands(block: str) -> list[str]:
    """A block's commands, as they stand or the quick way."""
    found = []
    for shown in block.splitlines():
        line, _, comment = shown.removeprefix("$ ").partition("#")
        _, _, quick = comment.partition("quick: ")
        words, aside, _ = line.strip().partition(" &")
        found.append(" ".join([words, *([] if WALK or not quick else [quick])]) + aside)
    return found


class Newcomer:
    """Someone with terminals in a directory that has the examples of a clone and nothing else."""

    def __init__(self, folder: Path, terminals: ExitStack) -> None:
        self.folder, self._terminals = folder, terminals
        (folder / "examples").symlink_to(ROOT / "examples")

    def types(self, line: str) -> None:
        """One command, until it is done."""
        started = time.monotonic()
        with terminal(line, self.folder):
            pass
        print(f"{time.monotonic() - started:.1f} s: {line}")

    def leaves_running(self, line: str) -> None:
        """One command that goes on, until it says that it waits."""
        output = self._terminals.enter_context(terminal(line, self.folder))
        deadline = time.monotonic() + PATIENCE
        while WAITS not in output.read_text():
            assert time.monotonic() < deadline, line
            time.sleep(0.1)

    def writes(self, program: str) -> None:
        """A Python block: a file, where its first line is a name; else a program to run."""
        name = re.match(r"# (\w+\.py)\n", program)
        (self.folder / (name[1] if name else "typed.py")).write_text(program)
        if name is None:
            self.types("python typed.py")


@contextmanager
def terminal(line: str, folder: Path) -> Iterator[Path]:
    """A command that is started here, and at the end of the block must end well by itself.

    When it does not, it is asked to leave, so that it ends what it started. Yields the file of all
    it says.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    output = folder / f"{sum(1 for _ in folder.glob('*.output'))}.output"
    with output.open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        yield output
        # A load test has an answer also where the machine is the limit.
        well = (0, 1) if line.startswith("riffle load") else (0,)
        assert process.wait(PATIENCE) in well, f"{line}\n{output.read_text()}"
    except subprocess.TimeoutExpired:
        pytest.fail(f"over {PATIENCE} s, at load {os.getloadavg()[0]:.0f}: {line}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@pytest.mark.long
@pytest.mark.timeout(10 * PATIENCE)
@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_a_page_is_typed_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    with ExitStack() as terminals:
        newcomer = Newcomer(tmp_path, terminals)
        for kind, block in blocks(page):
            if kind == "python":
                newcomer.writes(block)
                continue
            for line in commands(block):
                if line.startswith(ELSEWHERE):
                    assert_run_by_ci(line)
                elif line.endswith("&"):
                    newcomer.leaves_running(line.removesuffix("&"))
                else:
                    newcomer.types(line)


def assert_run_by_ci(line: str) -> None:
    word, argument, *_ = line.split()
    assert word == "source" or f"make {argument}" in (ROOT / ".ci" / "run").read_text(), line


COMPUTED = [
    line
    for page in (ROOT / "README.md", ROOT / "docs" / "own.md")
    if page not in TYPED
    for kind, block in blocks(page)
    if kind == "console"
    for line in commands(block)
    if line.split()[0] == "riffle" and line.split()[1] in COMPUTING
]


@pytest.mark.parametrize("line", COMPUTED)
def test_what_a_page_says_is_computed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    result = CliRunner().invoke(build(words), [*words, *COMPUTING[words[0]]])
    assert result.exit_code == 0, result.stderr
    assert result.stdout


def test_there_is_something_to_type() -> None:
    assert "tutorial" in {page.stem for page in TYPED}
    assert len(COMPUTED) >= 3
