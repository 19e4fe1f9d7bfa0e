"""Types the commands and programs of pages as a newcomer would, and expects that they work.

A page with the line `MARK` is typed from top to bottom, in a directory that has nothing but the
examples of a clone. Every line of a console block is a command. One that ends in ``&`` keeps
running, and the next line waits until it prints `WAITS`, as a reader is told to. A Python block
that begins with a file's name is written to that file; any other is run. CI itself runs the lines
of `ELSEWHERE`.

A command whose comment ends in ``quick: FLAGS`` gets these flags by default. RIFFLE_WALK=1 leaves
them out: every command then runs as it stands, and may take the five minutes that a reader may wait
on an idle machine.

Of pages without the mark only the commands that compute are run, with one seed.
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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TYPED_PAGES = [page for page in PAGES if MARK in page.read_text()]
COMPUTING = {"simulate": ["--seeds", "1", "--workers", "1"], "account": []}
ELSEWHERE = ("make", "source")
WAITS = "waits for deployments"
PATIENCE = 300
WALK = os.environ.get("RIFFLE_WALK") == "1"


def blocks(page: Path, section: str = "") -> list[tuple[str, str]]:
    """Returns the kind and the text of each block, of the whole page or of a section."""
    text = page.read_text()
    if section:
        text = text.split(section)[1].split("\n## ")[0]
    return re.findall(r"^```(console|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    """Returns a block's commands, as they stand or with their quick flags."""
    lines = []
    for text in block.splitlines():
        line, _, comment = text.removeprefix("$ ").partition("#")
        _, _, quick = comment.partition("quick: ")
        words, background, _ = line.strip().partition(" &")
        lines.append(" ".join([words, *([] if WALK or not quick else [quick])]) + background)
    return lines


class Newcomer:
    """A person with terminals in a directory that has nothing but the examples of a clone."""

    def __init__(self, folder: Path, terminals: ExitStack) -> None:
        self.folder, self._terminals = folder, terminals
        (folder / "examples").symlink_to(ROOT / "examples")

    def types(self, line: str) -> None:
        """Runs a command to its end."""
        started = time.monotonic()
        with terminal(line, self.folder):
            pass
        print(f"{time.monotonic() - started:.1f} s: {line}")

    def leaves_running(self, line: str) -> None:
        """Starts a command in the background and waits until it prints `WAITS`."""
        output = self._terminals.enter_context(terminal(line, self.folder))
        deadline = time.monotonic() + PATIENCE
        while WAITS not in output.read_text():
            assert time.monotonic() < deadline, line
            time.sleep(0.1)

    def writes(self, program: str) -> None:
        """Writes a Python block to the file that its first line names, or runs it."""
        name = re.match(r"# (\w+\.py)\n", program)
        (self.folder / (name[1] if name else "typed.py")).write_text(program)
        if name is None:
            self.types("python typed.py")


@contextmanager
def terminal(line: str, folder: Path) -> Iterator[Path]:
    """Starts a command, which must end well by itself after the block.

    Yields the file of its output. A command that does not end gets SIGTERM, so that it ends what it
    started.
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
        # On a busy machine a load test names the machine and exits with 1.
        success = (0, 1) if line.startswith("riffle load") else (0,)
        assert process.wait(PATIENCE) in success, f"{line}\n{output.read_text()}"
    except subprocess.TimeoutExpired:
        pytest.fail(f"over {PATIENCE} s, at load {os.getloadavg()[0]:.0f}: {line}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@pytest.mark.long
@pytest.mark.timeout(10 * PATIENCE)
@pytest.mark.parametrize("page", TYPED_PAGES, ids=lambda page: page.stem)
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


COMPUTING_LINES = [
    line
    for page in (ROOT / "README.md", ROOT / "docs" / "own.md")
    if page not in TYPED_PAGES
    for kind, block in blocks(page)
    if kind == "console"
    for line in commands(block)
    if line.split()[0] == "riffle" and line.split()[1] in COMPUTING
]


@pytest.mark.parametrize("line", COMPUTING_LINES)
def test_the_computing_commands_of_a_page_succeed(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    result = CliRunner().invoke(build(words), [*words, *COMPUTING[words[0]]])
    assert result.exit_code == 0, result.stderr
    assert result.stdout


def test_some_page_is_typed_and_some_line_computed() -> None:
    assert "tutorial" in {page.stem for page in TYPED_PAGES}
    assert len(COMPUTING_LINES) >= 3
