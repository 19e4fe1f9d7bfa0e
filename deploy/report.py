"""Files of a run: summary, manifest, regret curve, and the run's tables as CSV.

The tables have the columns of the coordinator's own CSV. The regret needs the environment's true
MDP, which the coordinator never knows.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.common.process.tables import csv_text, flatten
from riffle.coordinator.api.models import STAGE_COLUMNS
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec
from riffle.deploy.operator import Answer, Operator
from riffle.experiments.regret import Regret, optimal_value, policy_value, regret
from riffle.node_client.environments.tabular import TabularMDP

Table = Literal["deployments", "stages", "ledger"]
TABLES: tuple[Table, ...] = ("deployments", "stages", "ledger")
COLUMNS_IF_EMPTY: dict[Table, tuple[str, ...]] = {"stages": STAGE_COLUMNS}
"""Columns of each table that may be empty at a run's end; a manual run has no stages."""

PACKAGES = ("riffle-rl", "numpy", "scipy", "cryptography", "fastapi", "uvicorn", "sqlalchemy")
FILES = (
    "summary.json",
    "manifest.json",
    "regret.png",
    "timings.json",
    *(f"{table}.csv" for table in TABLES),
)
SPENT = ("counted", "rejected")
"""States of deployments with opened messages. All episodes of such a batch were executed."""


def rows_of(operator: Operator, run_id: str, table: Table) -> list[Answer]:
    """Returns the rows of a run's table, in order."""
    answer = getattr(operator, table)(run_id)
    return [flatten(row) for row in (answer["entries"] if table == "ledger" else answer)]


def replace_csv(file: Path, rows: Sequence[Answer], columns_if_empty: Sequence[str] = ()) -> None:
    """Writes a CSV file under another name and renames it, so that nobody reads half a file."""
    aside = file.with_name(file.name + ".new")
    aside.write_text(csv_text(rows, columns_if_empty))
    aside.replace(file)


def write_settled_rows(folder: Path, operator: Operator, run_id: str) -> None:
    """Writes the tables of an unfinished run. A table ends before the first batch that is not over.

    A row may still change after its batch is over, so `write` writes all rows again.
    """
    for table in TABLES:
        rows = rows_of(operator, run_id, table)
        settled = list(takewhile(lambda row: row.get("settled_at", 0) is not None, rows))
        if settled:
            replace_csv(folder / f"{table}.csv", settled)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The coordinator's documents about a run that is over.

    Each field has the name of the `Operator` method that returns its document.
    """

    run: Answer
    result: Answer
    deployments: list[Answer]
    stages: list[Answer]
    ledger: Answer

    @classmethod
    def fetch(cls, operator: Operator, run_id: str) -> "FinishedRun":
        """Asks the coordinator for all documents."""
        return cls(*(getattr(operator, field.name)(run_id) for field in fields(cls)))

    def regret(self, mdp: TabularMDP) -> Regret:
        """Returns the exact pseudo-regret of the deployments, over all executed episodes."""
        executed = (d for d in self.deployments if d["state"] in SPENT or d["episodes_executed"])
        return regret(mdp, [_deployment(answer) for answer in executed])


def summary(finished: FinishedRun, mdp: TabularMDP | None, wall_seconds: float) -> dict[str, Any]:
    """Returns the run in one document, the content of summary.json.

    Exact values are null if ``mdp`` is None: then the environment's probabilities are unknown.
    """
    result = finished.result
    return {
        "run_id": finished.run["id"],
        "state": result["state"],
        "environment": finished.run["spec"]["environment"],
        "trust": finished.run["spec"]["trust"],
        "aggregation": finished.run["spec"]["aggregation"],
        "epsilon": result["epsilon"],
        "beta": result["beta"],
        "episodes": result["episodes_executed"],
        "reports_accepted": result["reports"],
        "messages_forwarded": result["messages_forwarded"],
        "messages_counted": result["messages_counted"],
        "messages_failed": result["failed"],
        "suspicious_batches": result["suspicious_batches"],
        **_exact_values(finished, mdp),
        "value_estimate": result["value_estimate"],
        "policy_switches": result["policy_switches"],
        "active_policies": result["active"],
        "wall_seconds": wall_seconds,
        "timings": result["timings"],
        "policy": result["policy"],
    }


def _exact_values(finished: FinishedRun, mdp: TabularMDP | None) -> dict[str, float | None]:
    if mdp is None:
        return dict.fromkeys(("regret", "optimal_value", "policy_value", "policy_value_share"))
    policy = np.array(finished.result["policy"], dtype=np.int64)
    best, reached = optimal_value(mdp), policy_value(mdp, policy)
    return {
        "regret": finished.regret(mdp).total,
        "optimal_value": best,
        "policy_value": reached,
        "policy_value_share": reached / best if best > 0 else 1.0,
    }


def write(
    folder: Path,
    finished: FinishedRun,
    mdp: TabularMDP | None,
    wall_seconds: float,
    seeds: dict[str, Any],
) -> dict[str, Any]:
    """Writes all files into ``folder`` (no curve without ``mdp``) and returns the summary."""
    document = summary(finished, mdp, wall_seconds)
    _write_json(folder / "summary.json", document)
    rows = (finished.deployments, finished.stages, finished.ledger["entries"])
    for table, table_rows in zip(TABLES, rows, strict=True):
        replace_csv(folder / f"{table}.csv", table_rows, COLUMNS_IF_EMPTY.get(table, ()))
    if mdp is not None:
        plot_regret(folder / "regret.png", finished.regret(mdp), document)
    _write_json(folder / "manifest.json", manifest(finished, seeds))
    return document


def manifest(finished: FinishedRun, seeds: dict[str, Any]) -> dict[str, Any]:
    """Returns the versions, constants and seeds that one needs to interpret or repeat the run."""
    spec = RunSpec.model_validate(finished.run["spec"] | {"run_id": None}, strict=False)
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "spec": spec.model_dump(),
        "constants": finished.result["constants"],
        "seeds": seeds,
        "regret": "exact pseudo-regret over deployed mixtures; no reward was read",
    }


def plot_regret(file: Path, curve: Regret, document: Mapping[str, Any]) -> None:
    """Plots regret against episodes, with its ceiling V* K: the regret of earning nothing."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (slow to import; used only here)

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    episodes = np.concatenate([[0.0], curve.episodes])
    axes.plot(episodes, np.concatenate([[0.0], curve.cumulative]), label="regret of this run")
    ceiling = document["optimal_value"] * episodes[-1]
    axes.plot([0, episodes[-1]], [0, ceiling], ":", color="grey", label="ceiling, V* K")
    axes.set_xlabel("episodes")
    axes.set_ylabel("cumulative regret")
    axes.set_title(
        f"{document['environment']}, epsilon = {float(document['epsilon']):.3g}, "
        f"beta = {document['beta']:g}"
    )
    axes.legend()
    figure.savefig(file, dpi=150)


def mixture_of(answer: Answer) -> Mixture:
    """Returns the mixture in a document from the coordinator."""
    policies = np.array(answer["policies"], dtype=np.int64)
    return Mixture(policies, np.array(answer["weights"], dtype=np.int64))


def _deployment(answer: Answer) -> Deployment:
    n = max(answer["episodes_executed"], answer["n"] if answer["state"] in SPENT else 0)
    mixture = mixture_of(answer["mixture"])
    return Deployment(answer["stage"], answer["purpose"], mixture, n, answer["layer"])


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")
