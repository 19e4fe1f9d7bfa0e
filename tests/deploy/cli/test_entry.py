"""The program's start: its version, an interruption, and what each command loads."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from riffle.deploy import output
from riffle.deploy.cli.entry import INTERRUPTED, main
from tests.deploy.cli.calls import riffle

ROOT = Path(__file__).parents[3]
HEAVY = {"scipy", "fastapi", "uvicorn", "sqlalchemy", "matplotlib", "coordinator", "experiments"}


def test_the_version_is_told() -> None:
    assert riffle("--version").stdout == f"{version('riffle-rl')}\n"


@pytest.mark.parametrize("module", ["typer", "riffle.deploy.cli.health"])
def test_an_interruption_while_modules_are_loaded_is_one_line(module: str) -> None:
    program = (
        "import sys\n"
        "from riffle.deploy.cli.entry import main\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.argv = ['riffle', 'health', 'x']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (INTERRUPTED, "riffle: interrupted\n")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"riffle": f"{main.__module__}:main"}
    assert output.Exit.INTERRUPTED == INTERRUPTED


@pytest.mark.parametrize(
    ("command", "not_loaded"),
    [
        (["health", "http://127.0.0.1:1/readyz"], HEAVY | {"numpy", "shuffler", "node_client"}),
        # The analyzer's keys are kept by the coordinator's own code, which loads little else.
        (["network", "init", "network"], HEAVY - {"coordinator"} | {"shuffler"}),
        # It knows the settings of every role, to name the misspelt ones.
        (["doctor", "--out", "out"], {"matplotlib", "experiments"}),
        # A role that checks guarantees loads the accountant, and so SciPy.
        (["node"], HEAVY - {"scipy"} | {"shuffler"}),
        # The learners, and no service.
        (["simulate", "--preset", "none"], {"fastapi", "uvicorn", "sqlalchemy", "shuffler"}),
        (["shuffler"], HEAVY - {"scipy", "fastapi", "uvicorn", "sqlalchemy"} | {"node_client"}),
    ],
)
def test_a_command_loads_only_what_it_needs(
    command: list[str], not_loaded: set[str], tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from riffle.deploy.cli.main import main\n"
        "sys.argv = ['riffle', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "finally:\n    names = [name.removeprefix('riffle.') for name in sys.modules]\n"
        "    print('\\nloaded', *{name.partition('.')[0] for name in names})\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RIFFLE_")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "typer" in loaded
    assert not loaded & not_loaded, done.stderr
