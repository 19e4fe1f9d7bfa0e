"""Options that say which network an operator's command speaks to."""

from pathlib import Path
from typing import Annotated

import typer

NETWORK = Path("network")
Network = Annotated[Path, typer.Option("--network", help="folder of the network's secrets")]
CoordinatorUrl = Annotated[
    str | None,
    typer.Option(
        "--coordinator-url",
        help="where the coordinator answers; default: as the folder says, or port 8400 here",
    ),
]
