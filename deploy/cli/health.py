"""``riffle health``: is a service ready? Asked often, so little is loaded."""

from pathlib import Path
from typing import Annotated

import httpx
import typer

from riffle.common.protocol.errors import LocalError
from riffle.deploy.network.processes import probe
from riffle.deploy.output import Exit, Format, Output, emit, fail, one_line_errors


@one_line_errors
def health_command(
    url: Annotated[str, typer.Argument(help="as http://host:port/readyz")],
    ca: Annotated[Path | None, typer.Option(help="PEM of a private CA, for https")] = None,
    output: Output = Format.text,
) -> None:
    """Ask a service whether it is ready: exit code 0 yes, 1 no, 4 no answer."""
    try:
        answer = probe(url, ca)
    except httpx.HTTPError as error:
        raise LocalError("unavailable", f"{url} does not answer: {error}") from error
    document = {"url": url, "ready": answer.is_success, "status": answer.status_code}
    emit(document, output, lambda: None)
    if answer.is_error:
        fail(f"{url} answers {answer.status_code}: {answer.text}", Exit.NO)
