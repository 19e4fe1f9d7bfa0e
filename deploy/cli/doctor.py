"""``riffle doctor``: look for what is wrong before a run does."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from riffle.deploy.network.doctor import examine
from riffle.deploy.output import Exit, Format, Output, emit, one_line_errors, table


@one_line_errors
def doctor_command(
    out: Annotated[Path, typer.Option(help="folder for results")] = Path("runs"),
    port: Annotated[list[int] | None, typer.Option(help="port to be used; repeatable")] = None,
    network: Annotated[Path | None, typer.Option(help="folder of a network's secrets")] = None,
    url: Annotated[list[str] | None, typer.Option(help="service to ask; repeatable")] = None,
    output: Output = Format.text,
) -> None:
    """Check this machine and, where given, a network. Exit code 1 when something is wrong."""
    findings = examine(out, port or [], network, url or [])
    well = all(finding.ok for finding in findings)
    rows = [("ok" if f.ok else "WRONG", f.check, f.detail) for f in findings]
    document = {"ok": well, "findings": [asdict(finding) for finding in findings]}
    emit(document, output, lambda: table(("", "check", "detail"), rows))
    raise typer.Exit(Exit.DONE if well else Exit.NO)
