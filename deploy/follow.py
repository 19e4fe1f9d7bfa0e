"""Follows runs on a live network to their ends: one run, or one run under each trust model."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from riffle.common.mechanism.parameters import Trust
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.specs import MANUAL, RunSpec, TrueValue, TrueValueSpec
from riffle.deploy.operator import Answer, Operator
from riffle.deploy.output import RunError, bar, line, progress, time_left
from riffle.deploy.report import FinishedRun, mixture_of, write, write_settled_rows
from riffle.experiments.presets import Preset
from riffle.experiments.regret import mixture_value, optimal_value
from riffle.node_client.environments.registry import make
from riffle.node_client.environments.tabular import Modelled, TabularMDP

EARLY = 0.05  # part of a run; first batches are small, so their speed predicts nothing
SETTLED = {"batch_counted", "batch_rejected", "batch_abandoned"}
TRUST_MODELS: tuple[Trust, ...] = get_args(Trust)
VIEWS: Mapping[Trust, tuple[str, str, str]] = {
    "shuffle": ("sealed", "mixed noisy bits of all", "shuffler, others' noise"),
    "local": ("sealed", "one randomised report", "nobody"),
    "central": ("sealed", "the episode itself", "coordinator"),
}
SUMS = ("masked", "one noisy sum of all", "shuffler, others' noise and software")
"""What shuffler and coordinator see of an episode, and whom users trust (paper 000, Fig. 2)."""


def run_to_end(operator: Operator, preset: Preset, folder: Path, started: float) -> dict[str, Any]:
    """Creates a preset's run, follows it to its end and writes its files; returns the summary.

    Raises RunError, with the reason, if the run failed or was stopped.
    """
    run = operator.create_run(preset.spec)
    by_hand = preset.spec.learner == MANUAL
    if by_hand:
        progress.print(f"run {run['id']} waits for deployments, as by 'riffle deploy'")
    environment = make(preset.spec.environment, **preset.environment)
    mdp = environment.mdp if isinstance(environment, Modelled) else None
    watch = None if mdp is None else TrueValues(operator, run["id"], mdp)
    follow(operator, run["id"], preset.spec.episodes, folder, watch, by_hand=by_hand)
    finished = FinishedRun.fetch(operator, run["id"])
    if finished.result["state"] != "finished":
        reason = finished.result["message"] or f"it was {finished.result['state']}"
        raise RunError("wrong-state", f"run {run['id']} did not finish: {reason}")
    seeds = {"learner": preset.spec.seed, "test": preset.spec.test_seed}
    return write(folder, finished, mdp, time.monotonic() - started, seeds)


def stop_unfinished(operator: Operator) -> None:
    """Stops runs that an interrupted command left in the folder of this newly started network.

    Raises RemoteError if a run cannot be stopped, unless it has ended meanwhile.
    """
    for run in operator.runs():
        if run["state"] == "running":
            try:
                operator.stop(run["id"])
            except RemoteError as error:
                if error.slug != "wrong-state":
                    raise
            else:
                progress.print(f"stopped run {run['id']}, which was left here unfinished")


class TrueValues:
    """Supplies each deployment's true value once the deployment is issued (simulations only)."""

    def __init__(self, operator: Operator, run_id: str, mdp: TabularMDP) -> None:
        self._operator, self._run_id, self._mdp = operator, run_id, mdp
        self._optimal = optimal_value(mdp)
        self._waiting: list[int] = []

    def __call__(self, event: Answer) -> None:
        """Handles an event of the run."""
        if event["kind"] == "deployment_issued":
            self._waiting.append(event["data"]["index"])
        with contextlib.suppress(LocalError):
            while self._waiting:
                self._supply(self._waiting[0])
                del self._waiting[0]

    def _supply(self, index: int) -> None:
        mixture = self._operator.deployment(self._run_id, index)["mixture"]
        value = TrueValue(deployment=index, value=mixture_value(self._mdp, mixture_of(mixture)))
        values = TrueValueSpec(optimal_value=self._optimal, values=(value,))
        self._operator.supply_true_values(self._run_id, values)


def follow(
    operator: Operator,
    run_id: str,
    episodes: int,
    folder: Path,
    watch: Callable[[Answer], None] | None = None,
    *,
    by_hand: bool = False,
) -> None:
    """Follows a run to its end, shows its progress and writes the run's tables to CSV files.

    A run ``by_hand`` waits for a person, so there is no remaining time to show. Calls ``watch``
    with every event. If the run cannot go on, prints the reason.
    """
    began, explained = time.monotonic(), ""

    def explain(trouble: str | None) -> None:
        nonlocal explained
        if trouble and trouble != explained:
            progress.print(f"the run waits: {trouble}", highlight=False, soft_wrap=True)
        explained = trouble or ""

    with bar("{task.completed:.0f}/{task.total:.0f} episodes", eta=not by_hand) as shown:
        task = shown.add_task("run", total=episodes)
        for event in operator.events(run_id, on_run=lambda run: explain(run["trouble"])):
            kind, data = event["kind"], event["data"]
            if watch is not None:
                watch(event)
            if kind == "deployment_issued":
                shown.update(task, description=f"stage {data['stage']} {data['purpose']}")
            if kind in SETTLED:
                counted = operator.run(run_id)["episodes"]
                shown.update(task, completed=counted)
                what = kind.replace("_", f" {data['index']} ")
                rest = "" if by_hand else _time_left(began, counted, episodes)
                line(f"{what}: {counted} of {episodes} episodes{rest}")
                write_settled_rows(folder, operator, run_id)
            if kind == "stage_finished":
                active = data.get("active_after")
                policies = "" if active is None else f", active policies: {active}"
                line(f"stage {data['stage']} finished{policies}")


def _time_left(began: float, counted: int, episodes: int) -> str:
    """Returns a text such as ``, about 9 s left``, or "" as long as few episodes are counted."""
    early = counted < EARLY * episodes
    return "" if early else time_left(time.monotonic() - began, counted, episodes)


def compare(operator: Operator, preset: Preset, folder: Path) -> list[dict[str, Any]]:
    """Runs the preset once under each trust model; returns one row for each run.

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
    """Returns the spec under another trust model. Only ``shuffle`` keeps aggregation by sums."""
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
