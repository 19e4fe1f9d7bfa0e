"""The three workflows of `000`, Fig. 2, side by side: one run of each on one live network."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from riffle.common.noise import Trust
from riffle.deploy.cli.output import progress
from riffle.deploy.follow import run_to_end
from riffle.deploy.operator import Answer, Operator
from riffle.deploy.presets import Preset

TRUST_MODELS: tuple[Trust, ...] = get_args(Trust)


@dataclass(frozen=True, slots=True)
class Sees:
    """What whoever holds a role sees of one user's episode."""

    shuffler: str
    coordinator: str
    trusted: str


SEES: Mapping[Trust, Sees] = {
    "shuffle": Sees("sealed", "mixed noisy bits of all", "shuffler, others' noise"),
    "local": Sees("sealed", "one randomised report", "nobody"),
    "central": Sees("sealed", "the episode itself", "coordinator"),
}


def compare(operator: Operator, preset: Preset, folder: Path) -> list[dict[str, Any]]:
    """Run the preset under every trust model in turn; one row each.

    Every run leaves its own files in ``folder/<trust>``.

    Raises:
        RunError: a run failed or was stopped.
    """
    return [_one(operator, preset, folder / trust, trust) for trust in TRUST_MODELS]


def _one(operator: Operator, preset: Preset, folder: Path, trust: Trust) -> dict[str, Any]:
    progress.print(f"trust {trust}")
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{preset.spec.name}-{trust}"
    spec = preset.spec.model_copy(update={"trust": trust, "name": name, "run_id": None})
    summary = run_to_end(operator, replace(preset, spec=spec), folder, time.monotonic())
    return row(summary, operator.deployments(summary["run_id"]), trust)


def row(summary: Mapping[str, Any], deployments: Sequence[Answer], trust: Trust) -> dict[str, Any]:
    """What a run cost and came to. Messages and bytes are means over all reports.

    ``noise`` is the standard deviation on a counter of the last batch.
    """
    reports = sum(d["n"] for d in deployments)
    sees = SEES[trust]
    return {
        "trust": trust,
        "value_share": summary["policy_value_share"],
        "regret": summary["regret"],
        "epsilon": summary["epsilon"],
        "beta": summary["beta"],
        "noise": deployments[-1]["noise"]["variance"] ** 0.5,
        "messages_a_report": sum(d["n"] * d["messages"] for d in deployments) / reports,
        "bytes_a_report": sum(d["n"] * d["report_bytes"] for d in deployments) / reports,
        "seconds": summary["wall_seconds"],
        "shuffler_sees": sees.shuffler,
        "coordinator_sees": sees.coordinator,
        "trusted": sees.trusted,
    }
