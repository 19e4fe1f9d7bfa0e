"""``riffle compare``: what a trust model costs, live."""

import json
from pathlib import Path
from typing import Any

from riffle.deploy.cli import specs
from riffle.deploy.cli.output import Format, Output, emit, one_line_errors, table
from riffle.deploy.cli.runs import Force, Nodes, Out, Workers, results
from riffle.deploy.comparison import TRUST_MODELS, compare
from riffle.deploy.follow import stop_earlier
from riffle.deploy.local import LocalConfig, LocalNetwork
from riffle.deploy.operator import Operator
from riffle.deploy.report import FILES

FILE = "comparison.json"
WRITTEN = (FILE, *(f"{trust}/{name}" for trust in TRUST_MODELS for name in FILES))


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
    constants: specs.Constants = None,
    option: specs.Option = None,
    nodes: Nodes = 20,
    workers: Workers = 2,
    out: Out = Path("runs/compare"),
    force: Force = False,
    output: Output = Format.text,
) -> None:
    """Run shuffle, local and central trust on one network of loopback, and print the table.

    The three run one after another, each with users of its own. An earlier run of the same folder
    that was left unfinished is stopped first.
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
        preset=constants,
    )
    for trust in TRUST_MODELS:
        specs.check(chosen, chosen.spec.model_copy(update={"trust": trust}))
    config = LocalConfig.of(chosen, out, nodes, workers, TRUST_MODELS)
    with (
        results(out, force=force, names=WRITTEN) as lock,
        LocalNetwork(config, lock) as network,
        Operator.of(network.secrets) as operator,
    ):
        stop_earlier(operator)
        rows = compare(operator, chosen, out)
        (out / FILE).write_text(json.dumps(rows, indent=2) + "\n")
    emit({"models": rows}, output, lambda: _show(rows, out))


def _show(rows: list[dict[str, Any]], out: Path) -> None:
    columns = [(quantity, *(row[quantity] for row in rows)) for quantity in rows[0]]
    table(("quantity", *(row["trust"] for row in rows)), columns[1:], title=f"written to {out}")
