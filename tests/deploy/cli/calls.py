"""The command line called within the tests' own process."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from riffle.deploy.cli.main import build


def riffle(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments))


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
