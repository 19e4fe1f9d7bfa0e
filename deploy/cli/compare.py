"""``riffle compare``: what a trust model costs, live."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.registry import Registry
from deploy.cli import specs
from deploy.cli.output import Format, Output, emit, one_line_errors, table
from deploy.cli.runs import Force
from deploy.comparison import TRUST_MODELS, compare
from deploy.local import LocalConfig, LocalNetwork
from deploy.operator import Operator

FILE = "comparison.json"


@one_line_errors
def compare_command(
    preset: specs.PresetName = "demo",
    learner: specs.Learner = "sdp-pe",
    env: specs.Environment = None,
    param: specs.Param = None,
    horizon: specs.Horizon = None,
    episodes: specs.Episodes = None,
    epsilon: specs.Epsilon = None,
    beta: specs.Beta = None,
    families: specs.FamiliesOption = None,
    option: specs.Option = None,
    nodes: Annotated[int, typer.Option(min=1, help="nodes to start")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="processes for cryptography")] = 2,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("runs/compare"),
    force: Force = False,
    output: Output = Format.text,
) -> None:
    """Run shuffle, local and central trust on one network of loopback, and print the table.

    The three run one after another, each with users of its own.
    """
    chosen = specs.resolve(
        preset,
        env,
        param,
        horizon,
        option,
        learner=learner,
        episodes=episodes,
        epsilon=epsilon,
        beta=beta,
        families=families,
    )
    for trust in TRUST_MODELS:  # refuse before anything is started
        spec = chosen.spec.model_copy(update={"trust": trust})
        Registry(files=chosen.learners).build(spec)
    if (out / FILE).exists() and not force:
        raise FileExistsError(f"{out / FILE} exists; choose another --out or say --force")
    config = LocalConfig.of(chosen, out, nodes, workers, TRUST_MODELS)
    with LocalNetwork(config) as network, Operator.of(network.secrets) as operator:
        rows = compare(operator, chosen, out)
        (out / FILE).write_text(json.dumps(rows, indent=2) + "\n")
    emit({"models": rows}, output, lambda: _show(rows, out))


def _show(rows: list[dict[str, Any]], out: Path) -> None:
    columns = [(quantity, *(row[quantity] for row in rows)) for quantity in rows[0]]
    table(("quantity", *(row["trust"] for row in rows)), columns[1:], title=f"written to {out}")
