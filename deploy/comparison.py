"""Runs a preset once under every trust model, and compares the runs' costs and results."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from riffle.common.mechanism.parameters import Trust
from riffle.coordinator.specs import RunSpec
from riffle.deploy.follow import run_to_end
from riffle.deploy.operator import Answer, Operator
from riffle.deploy.output import progress
from riffle.experiments.presets import Preset

TRUST_MODELS: tuple[Trust, ...] = get_args(Trust)
VIEWS: Mapping[Trust, tuple[str, str, str]] = {
    "shuffle": ("sealed", "mixed noisy bits of all", "shuffler, others' noise"),
    "local": ("sealed", "one randomised report", "nobody"),
    "central": ("sealed", "the episode itself", "coordinator"),
}
SUMS = ("masked", "one noisy sum of all", "shuffler, others' noise and software")
"""An episode as shuffler and coordinator see it, and whom users trust (paper 000, Fig. 2)."""


def compare(operator: Operator, preset: Preset, folder: Path) -> list[dict[str, Any]]:
    """Runs the preset under every trust model in turn; returns a row for each.

    Every run writes its files to ``folder/<trust>``. Raises RunError if a run fails or is stopped.
    """
    rows = []
    for trust in TRUST_MODELS:
        progress.print(f"trust {trust}")
        (folder / trust).mkdir(parents=True, exist_ok=True)
        name = f"{preset.spec.name}-{trust}"
        spec = with_trust(preset.spec, trust).model_copy(update={"name": name, "run_id": None})
        chosen = replace(preset, spec=spec)
        summary = run_to_end(operator, chosen, folder / trust, time.monotonic())
        rows.append(_comparison(summary, operator.deployments(summary["run_id"]), spec))
    return rows


def with_trust(spec: RunSpec, trust: Trust) -> RunSpec:
    """Returns the spec under another trust model. Only ``shuffle`` keeps the aggregation."""
    aggregation = spec.aggregation if trust == "shuffle" else "messages"
    return spec.model_copy(update={"trust": trust, "aggregation": aggregation})


def _comparison(
    summary: Mapping[str, Any], deployments: Sequence[Answer], spec: RunSpec
) -> dict[str, Any]:
    """Returns a run's cost and result. Messages and bytes are means over all reports.

    ``noise`` is the standard deviation of the noise on one counter of the last batch.
    """
    reports = sum(d["n"] for d in deployments)
    views = SUMS if spec.aggregation == "sums" else VIEWS[spec.trust]
    return {
        "trust": spec.trust,
        "aggregation": spec.aggregation,
        "value_share": summary["policy_value_share"],
        "regret": summary["regret"],
        "epsilon": summary["epsilon"],
        "beta": summary["beta"],
        "noise": deployments[-1]["noise"]["variance"] ** 0.5,
        "messages_a_report": sum(d["n"] * d["messages"] for d in deployments) / reports,
        "bytes_a_report": sum(d["n"] * d["report_bytes"] for d in deployments) / reports,
        "seconds": summary["wall_seconds"],
        **dict(zip(("shuffler_sees", "coordinator_sees", "trusted"), views, strict=True)),
    }
