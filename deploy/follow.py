"""Create a run, show how it goes, and write what it leaves behind."""

import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.errors import LocalError
from deploy.cli.output import progress
from deploy.operator import Operator
from deploy.presets import Preset
from deploy.report import Finished, write
from node_client.environments.environment import Modelled
from node_client.environments.registry import make


def run_to_end(operator: Operator, preset: Preset, folder: Path, started: float) -> dict[str, Any]:
    """Create the preset's run, follow it to its end, write its files; returns the summary.

    Raises:
        LocalError: ``wrong-state``, the run failed or was stopped; the message says why.
    """
    run = operator.create_run(preset.spec)
    follow(operator, run["id"], preset.spec.episodes)
    finished = Finished.collect(operator, run["id"])
    if finished.result["state"] != "finished":
        reason = finished.result["message"] or finished.result["state"]
        raise LocalError("wrong-state", f"run {run['id']} did not finish: {reason}")
    environment = make(preset.spec.environment, **preset.environment)
    mdp = environment.mdp if isinstance(environment, Modelled) else None
    seeds = {"learner": preset.spec.seed, "test": preset.spec.test_seed}
    return write(folder, finished, mdp, time.monotonic() - started, seeds)


def follow(operator: Operator, run_id: str, episodes: int) -> None:
    """Show a bar of counted episodes, with the stage, until the run is over."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} episodes"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=progress) as bar:
        task = bar.add_task("run", total=episodes)
        for event in operator.events(run_id):
            if event["kind"] == "deployment_issued":
                now = event["data"]
                what = f"stage {now['stage']} {now['purpose']}"
                bar.update(task, description=what)
            if event["kind"] == "batch_counted":
                bar.update(task, completed=operator.run(run_id)["episodes"])
