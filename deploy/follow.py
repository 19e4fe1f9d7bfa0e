"""Create a run, show how it goes, and write what it leaves behind.

The three workflows of `000`, Fig. 2, side by side: one run of each on one live network.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from riffle.common.mechanism.noise import Trust
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.specs import MANUAL, TrueValue, Truth
from riffle.deploy.operator import Answer, Operator
from riffle.deploy.output import RunError, bar, left, line, progress
from riffle.deploy.presets import Preset
from riffle.deploy.report import Finished, Growing, mixture_of, write
from riffle.experiments.regret import mixture_value, optimal_value
from riffle.node_client.environments.registry import make
from riffle.node_client.environments.tabular import Modelled, TabularMDP

SETTLED = {"batch_counted", "batch_rejected", "batch_abandoned"}


def run_to_end(operator: Operator, preset: Preset, folder: Path, started: float) -> dict[str, Any]:
    """Create the preset's run, follow it to its end, write its files; returns the summary.

    Raises:
        RunError: the run failed or was stopped; the message says why.
    """
    run = operator.create_run(preset.spec)
    by_hand = preset.spec.learner == MANUAL
    if by_hand:
        progress.print(f"run {run['id']} waits for deployments, as by 'riffle deploy'")
    environment = make(preset.spec.environment, **preset.environment)
    mdp = environment.mdp if isinstance(environment, Modelled) else None
    watch = ignore if mdp is None else TrueValues(operator, run["id"], mdp)
    follow(operator, run["id"], preset.spec.episodes, folder, watch, by_hand=by_hand)
    finished = Finished.collect(operator, run["id"])
    if finished.result["state"] != "finished":
        reason = finished.result["message"] or f"it was {finished.result['state']}"
        raise RunError("wrong-state", f"run {run['id']} did not finish: {reason}")
    seeds = {"learner": preset.spec.seed, "test": preset.spec.test_seed}
    return write(folder, finished, mdp, time.monotonic() - started, seeds)


def stop_unfinished(operator: Operator) -> None:
    """Stop what an interrupted command left running in the folder of a network just started.

    Raises:
        RemoteError: one of them cannot be stopped, for another reason than that it ended meanwhile.
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


def ignore(event: Answer) -> None:
    """Nothing is known of the environment that an event could be annotated with."""


class TrueValues:
    """Supplies the true value of every deployment of a simulated environment as it is issued.

    It is an annotation for the page: where the coordinator is away, it waits for a later event.
    """

    def __init__(self, operator: Operator, run_id: str, mdp: TabularMDP) -> None:
        self._operator, self._run_id, self._mdp = operator, run_id, mdp
        self._optimal = optimal_value(mdp)
        self._waiting: list[int] = []

    def __call__(self, event: Answer) -> None:
        """Take an event of the run."""
        if event["kind"] == "deployment_issued":
            self._waiting.append(event["data"]["index"])
        with contextlib.suppress(LocalError):
            while self._waiting:
                self._supply(self._waiting[0])
                del self._waiting[0]

    def _supply(self, index: int) -> None:
        mixture = self._operator.deployment(self._run_id, index)["mixture"]
        value = mixture_value(self._mdp, mixture_of(mixture))
        known = TrueValue(deployment=index, value=value)
        self._operator.supply_truth(
            self._run_id, Truth(optimal_value=self._optimal, values=(known,))
        )


def follow(
    operator: Operator,
    run_id: str,
    episodes: int,
    folder: Path,
    watch: Callable[[Answer], None],
    *,
    by_hand: bool = False,
) -> None:
    """Show a bar of counted episodes, with the stage, and let the CSV files grow to the end.

    Off a terminal: a line for every settled batch and finished stage. How long the rest takes is
    not told of a run ``by_hand``, which waits for a person.
    """
    files, began = Growing(folder, operator, run_id), time.monotonic()
    with bar("{task.completed:.0f}/{task.total:.0f} episodes", eta=not by_hand) as shown:
        task = shown.add_task("run", total=episodes)
        for event in operator.events(run_id):
            watch(event)
            if event["kind"] == "deployment_issued":
                now = event["data"]
                shown.update(task, description=f"stage {now['stage']} {now['purpose']}")
            if event["kind"] in SETTLED:
                counted = operator.run(run_id)["episodes"]
                shown.update(task, completed=counted)
                what = event["kind"].replace("_", f" {event['data']['index']} ")
                rest = "" if by_hand else left(time.monotonic() - began, counted, episodes)
                line(f"{what}: {counted} of {episodes} episodes{rest}")
                files.grow()
            if event["kind"] == "stage_finished":
                done = event["data"]
                active = done.get("active_after")
                said = "" if active is None else f", active policies: {active}"
                line(f"stage {done['stage']} finished{said}")


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
