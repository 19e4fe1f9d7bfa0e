"""Rows of a run as CSV: deployments, stages and ledger, whole or growing while the run goes on.

Columns are those of the coordinator's CSV (`common.process.tables`).

What a run leaves behind: summary, stages, ledger, regret curve and manifest.

The regret is exact pseudo-regret over what was deployed. It needs the environment's true MDP, so
only the owner of a simulated environment can write it; the coordinator never knows it.
"""

import csv
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.common.process.tables import columns_of, csv_text, flatten
from riffle.coordinator.api.models import STAGE_COLUMNS
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec
from riffle.deploy.operator import Answer, Operator
from riffle.experiments.regret import Regret, optimal_value, policy_value, regret
from riffle.node_client.environments.tabular import TabularMDP

Row = dict[str, Any]
Table = Literal["deployments", "stages", "ledger"]
TABLES: tuple[Table, ...] = ("deployments", "stages", "ledger")
OTHERWISE: dict[Table, tuple[str, ...]] = {"stages": STAGE_COLUMNS}
"""Columns of a table that may be empty at a run's end, as the stages of one by hand are."""


class Source(Protocol):
    """Where the rows come from: the operator's client."""

    def deployments(self, run_id: str, /) -> list[Row]:
        """All deployments."""

    def stages(self, run_id: str, /) -> list[Row]:
        """Finished stages."""

    def ledger(self, run_id: str, /) -> Row:
        """What was spent, under ``entries``."""


def rows_of(source: Source, run_id: str, table: Table) -> list[Row]:
    """The rows of a table, in order."""
    found = (
        source.ledger(run_id)["entries"] if table == "ledger" else _listed(source, run_id, table)
    )
    return [flatten(row) for row in found]


def replace_csv(file: Path, rows: Sequence[Row], otherwise: Sequence[str] = ()) -> None:
    """Write a whole file aside and rename it, so that nobody reads half of it.

    Without rows it has the columns of ``otherwise``.
    """
    aside = file.with_name(file.name + ".new")
    aside.write_text(csv_text(rows, otherwise))
    aside.replace(file)


def _listed(source: Source, run_id: str, table: Table) -> list[Row]:
    return source.stages(run_id) if table == "stages" else source.deployments(run_id)


class Growing:
    """The tables of a run as files to which rows are added once they are settled.

    What comes later, as the acknowledgement, is in the files that are written at the end.
    """

    def __init__(self, folder: Path, source: Source, run_id: str) -> None:
        self._folder, self._source, self._run_id = folder, source, run_id
        self._written = dict.fromkeys(TABLES, 0)
        self._columns: dict[Table, list[str]] = {}

    def grow(self) -> None:
        """Add what is new."""
        for table in TABLES:
            rows = rows_of(self._source, self._run_id, table)
            done = list(takewhile(lambda row: row.get("settled_at", 0) is not None, rows))
            self._append(table, done[self._written[table] :])
            self._written[table] = len(done)

    def _append(self, table: Table, rows: list[Row]) -> None:
        if not rows:
            return
        first = table not in self._columns
        columns = self._columns.setdefault(table, columns_of(rows))
        with (self._folder / f"{table}.csv").open("w" if first else "a") as stream:
            writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
            if first:
                writer.writeheader()
            writer.writerows(rows)


PACKAGES = ("riffle-rl", "numpy", "scipy", "cryptography", "fastapi", "uvicorn", "sqlalchemy")
FILES = (
    "summary.json",
    "manifest.json",
    "regret.png",
    "timings.json",
    *(f"{table}.csv" for table in TABLES),
)
SPENT = ("counted", "rejected")


@dataclass(frozen=True, slots=True)
class Finished:
    """All that the coordinator says of a run that is over."""

    run: Answer
    result: Answer
    deployments: list[Answer]
    stages: list[Answer]
    ledger: Answer

    @classmethod
    def collect(cls, operator: Operator, run_id: str) -> "Finished":
        """Ask the coordinator for everything."""
        return cls(
            run=operator.run(run_id),
            result=operator.result(run_id),
            deployments=operator.deployments(run_id),
            stages=operator.stages(run_id),
            ledger=operator.ledger(run_id),
        )

    def regret(self, mdp: TabularMDP) -> Regret:
        """Exact pseudo-regret of what was deployed, every episode executed counted."""
        return regret(mdp, [_deployment(row) for row in self.deployments if _executed(row)])


def summary(finished: Finished, mdp: TabularMDP | None, wall_seconds: float) -> dict[str, Any]:
    """The run in one document; the keys are documented in the README.

    Exact values are null when the environment can only be run (``mdp`` None).
    """
    result = finished.result
    return {
        "run_id": finished.run["id"],
        "state": result["state"],
        "environment": finished.run["spec"]["environment"],
        "trust": finished.run["spec"]["trust"],
        "epsilon": result["epsilon"],
        "beta": result["beta"],
        "episodes": result["episodes_executed"],
        "reports_accepted": result["reports"],
        "messages_forwarded": result["messages_forwarded"],
        "messages_counted": result["messages_counted"],
        "messages_failed": result["failed"],
        **_exact(finished, mdp),
        "value_estimate": result["value_estimate"],
        "policy_switches": result["policy_switches"],
        "active_policies": result["active"],
        "wall_seconds": wall_seconds,
        "timings": result["timings"],
        "policy": result["policy"],
    }


def _exact(finished: Finished, mdp: TabularMDP | None) -> dict[str, float | None]:
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
    finished: Finished,
    mdp: TabularMDP | None,
    wall_seconds: float,
    seeds: dict[str, Any],
) -> dict[str, Any]:
    """Write all files into ``folder`` and return the summary; no curve without an ``mdp``."""
    document = summary(finished, mdp, wall_seconds)
    _write_json(folder / "summary.json", document)
    rows = (finished.deployments, finished.stages, finished.ledger["entries"])
    for table, found in zip(TABLES, rows, strict=True):
        replace_csv(folder / f"{table}.csv", found, OTHERWISE.get(table, ()))
    if mdp is not None:
        plot_regret(folder / "regret.png", finished.regret(mdp), document)
    _write_json(folder / "manifest.json", manifest(finished, seeds))
    return document


def manifest(finished: Finished, seeds: dict[str, Any]) -> dict[str, Any]:
    """Versions, constants and seeds: what is needed to read the numbers, or to run them again."""
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
    """Cumulative regret against episodes, beside what doing nothing useful would lose."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (half a second, and only here)

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


def _executed(row: Answer) -> bool:
    return row["state"] in SPENT or row["episodes_executed"] > 0


def mixture_of(answer: Answer) -> Mixture:
    """The mixture that the coordinator describes."""
    policies = np.array(answer["policies"], dtype=np.int64)
    return Mixture(policies, np.array(answer["weights"], dtype=np.int64))


def _deployment(row: Answer) -> Deployment:
    n = max(row["episodes_executed"], row["n"] if row["state"] in SPENT else 0)
    return Deployment(row["stage"], row["purpose"], mixture_of(row["mixture"]), n, row["layer"])


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")
