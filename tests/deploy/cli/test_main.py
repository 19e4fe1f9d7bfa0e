"""The start of the program: version, interruption, and the modules that a command imports."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from riffle.deploy import output
from riffle.deploy.cli.main import COMMANDS, INTERRUPTED, build, main
from tests.deploy.cli.calls import riffle

ROOT = Path(__file__).parents[3]
HEAVY = {"scipy", "fastapi", "uvicorn", "sqlalchemy", "matplotlib", "coordinator", "experiments"}
LEARNING = HEAVY | {"numpy", "pydantic", "shuffler", "node_client"}


def test_version_is_printed() -> None:
    assert riffle("--version").stdout == f"{version('riffle-rl')}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_the_first_paragraph_of_the_command_s_help(name: str) -> None:
    root = get_command(build([name]))
    assert isinstance(root, TyperGroup)
    paragraph = str(root.commands[name].help).split("\n\n")[0]
    assert COMMANDS[name][1] == " ".join(paragraph.split())


@pytest.mark.parametrize("module", ["typer", "riffle.deploy.cli.network"])
def test_interruption_of_an_import_ends_in_one_line(module: str) -> None:
    program = (
        "import sys\n"
        "from riffle.deploy.cli.main import main\n"
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
    ("command", "excluded"),
    [
        (["--help"], LEARNING | {"httpx", "cryptography", "rich.progress"}),
        (["--version"], LEARNING | {"httpx", "cryptography", "rich"}),
        (["simulate", "--help"], LEARNING | {"httpx", "cryptography"}),
        (["health", "http://127.0.0.1:1/readyz"], LEARNING - {"pydantic"}),
        # The coordinator's own code keeps the analyzer's keys; it imports little else.
        (["network", "init", "network"], HEAVY - {"coordinator"} | {"shuffler"}),
        # It reads the settings of every role, to name misspelt ones.
        (["doctor", "--out", "out"], {"matplotlib", "experiments"}),
        # A role that checks guarantees imports the accountant, and so SciPy.
        (["node"], HEAVY - {"scipy"} | {"shuffler"}),
        # It imports the learners, and no service.
        (["simulate", "--preset", "none"], {"fastapi", "uvicorn", "sqlalchemy", "shuffler"}),
        (["shuffler"], HEAVY - {"scipy", "fastapi", "uvicorn", "sqlalchemy"} | {"node_client"}),
    ],
)
def test_command_imports_only_what_it_needs(
    command: list[str], excluded: set[str], tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from riffle.deploy.cli.main import main\n"
        "sys.argv = ['riffle', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "finally:\n    names = [name.removeprefix('riffle.') for name in sys.modules]\n"
        "    print('\\nloaded', *{name.partition('.')[0] for name in names}, *names)\n"
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
    imported = set(done.stdout.splitlines()[-1].split())
    assert "typer" in imported
    assert not imported & excluded, done.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("riffle si", {"simulate"}),
        ("riffle con", {"conservation"}),
        ("riffle simulate --zz", set()),
        ("riffle simulate --lear", {"--learner"}),
        ("riffle simulate --env River", {"RiverSwim-v0"}),
        ("riffle simulate --learner sdp", {"sdp-pe", "sdp-pe-conference"}),
        ("riffle simulate --preset d", {"demo"}),
        ("riffle show --network nowhere x", set()),
    ],
)
def test_shell_completes_commands_options_and_values(
    words: str,
    offered: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["riffle"])
    monkeypatch.setenv("_RIFFLE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        main()
    completions = set(capsys.readouterr().out.split())
    assert offered <= completions if offered else not completions, completions


def test_completion_of_a_command_s_name_imports_no_command() -> None:
    program = "import sys\nfrom riffle.deploy.cli.main import main\nsys.argv = ['riffle']\n" + (
        "try:\n    main()\nfinally:\n    print(*sys.modules)"
    )
    words = {"_RIFFLE_COMPLETE": "complete_bash", "COMP_WORDS": "riffle s", "COMP_CWORD": "1"}
    path = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | words | path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert {"show", "simulate", "stop"} <= set(done.stdout.split())
    assert not {"numpy", "riffle.coordinator", "httpx"} & set(done.stdout.split())


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    program = (
        "import typer; from riffle.deploy.output import one_line_errors\n"
        "def rows() -> None: [print('row', flush=True) for _ in range(100_000)]\n"
        "typer.run(one_line_errors(rows))"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_another_broken_pipe_is_an_error() -> None:
    program = (
        "import errno, typer; from riffle.deploy.output import one_line_errors\n"
        "def send() -> None: raise BrokenPipeError(errno.EPIPE, 'Broken pipe')\n"
        "typer.run(one_line_errors(send))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (4, b"riffle: Broken pipe\n")
