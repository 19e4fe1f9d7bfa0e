"""Create a run, show how it goes, and write what it leaves behind."""

import time
from pathlib import Path
from typing import Any

from common.errors import LocalError
from coordinator.specs import MANUAL
from deploy.cli.output import bar, progress
from deploy.operator import Operator
from deploy.presets import Preset
from deploy.report import Finished, write
from deploy.tables import Growing
from node_client.environments.environment import Modelled
from node_client.environments.registry import make

SETTLED = {"batch_counted", "batch_rejected", "batch_abandoned"}


def run_to_end(operator: Operator, preset: Preset, folder: Path, started: float) -> dict[str, Any]:
    """Create the preset's run, follow it to its end, write its files; returns the summary.

    Raises:
        LocalError: ``wrong-state``, the run failed or was stopped; the message says why.
    """
    run = operator.create_run(preset.spec)
    if preset.spec.learner == MANUAL:
        progress.print(f"run {run['id']} waits for deployments, as by 'riffle deploy'")
    follow(operator, run["id"], preset.spec.episodes, folder)
    finished = Finished.collect(operator, run["id"])
    if finished.result["state"] != "finished":
        reason = finished.result["message"] or finished.result["state"]
        raise LocalError("wrong-state", f"run {run['id']} did not finish: {reason}")
    environment = make(preset.spec.environment, **preset.environment)
    mdp = environment.mdp if isinstance(environment, Modelled) else None
    seeds = {"learner": preset.spec.seed, "test": preset.spec.test_seed}
    return write(folder, finished, mdp, time.monotonic() - started, seeds)


def follow(operator: Operator, run_id: str, episodes: int, folder: Path) -> None:
    """Show a bar of counted episodes, with the stage, and let the CSV files grow to the end."""
    files = Growing(folder, operator, run_id)
    with bar("{task.completed:.0f}/{task.total:.0f} episodes") as shown:
        task = shown.add_task("run", total=episodes)
        for event in operator.events(run_id):
            if event["kind"] == "deployment_issued":
                now = event["data"]
                shown.update(task, description=f"stage {now['stage']} {now['purpose']}")
            if event["kind"] in SETTLED:
                shown.update(task, completed=operator.run(run_id)["episodes"])
                files.grow()
