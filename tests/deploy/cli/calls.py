"""The command line called within the tests' own process."""

import json

from typer.testing import CliRunner, Result

from riffle.deploy.cli.main import build


def riffle(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments))


def document(result: Result) -> dict[str, float]:
    assert result.exit_code == 0, result.stderr
    answer: dict[str, float] = json.loads(result.stdout)
    return answer
