"""A newcomer types what README and the guide to bringing your own say, and it works.

By default commands that compute are run with fewer seeds and episodes, those that start a network
are left to tests/system and tests/examples. With RIFFLE_WALK=1 every command of the README is run
as it stands, each within the five minutes that a reader may wait.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.main import build

ROOT = Path(__file__).parents[1]
PATIENCE = 300
SHORTER = {"simulate": ["--seeds", "1", "--workers", "1"], "account": []}
WALK = os.environ.get("RIFFLE_WALK") == "1"


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("riffle ")]


COMPUTING = [
    line
    for line in dict.fromkeys(commands("README.md") + commands("docs/own.md"))
    if line.split()[1] in SHORTER
]


@pytest.mark.parametrize("line", COMPUTING)
def test_what_a_page_says_is_computed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    result = CliRunner().invoke(build(words), [*words, *SHORTER[words[0]]])
    assert result.exit_code == 0, result.stderr
    assert result.stdout


def test_the_pages_have_such_commands() -> None:
    assert len(COMPUTING) >= 6


@pytest.mark.skipif(not WALK, reason="minutes long: RIFFLE_WALK=1 runs it")
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("line", commands("README.md"))
def test_the_readme_as_it_stands(line: str, tmp_path: Path) -> None:
    started = time.monotonic()
    words = [sys.executable, "-m", "deploy.cli.main", *shlex.split(line)[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    print(f"{time.monotonic() - started:.1f} s: {line}")
