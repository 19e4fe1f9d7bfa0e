"""``riffle up``, ``run`` and ``compare``: live runs, from the spec to the results."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.specs import RunSpec
from riffle.deploy.cli.options import (
    SECRETS,
    CoordinatorUrl,
    Force,
    Network,
    Nodes,
    Out,
    RunOptions,
    Workers,
    expand_options,
)
from riffle.deploy.follow import TRUST_MODELS, compare, run_to_end, stop_unfinished, with_trust
from riffle.deploy.load.benchmark import Split
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.processes import lock_folder
from riffle.deploy.operator import Operator
from riffle.deploy.output import Output, counted, emit, one_line_errors, progress, table
from riffle.deploy.report import FILES
from riffle.experiments.presets import Preset
from riffle.node_client.environments.registry import declaration_of, make

COMPARISON = "comparison.json"
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 means any free port")]
COMPARISON_FILES = (COMPARISON, *(f"{trust}/{name}" for trust in TRUST_MODELS for name in FILES))


@one_line_errors
@expand_options()
def up_command(
    options: RunOptions,
    test_seed: Annotated[
        int | None,
        typer.Option(help="seed of repeatable noise and episodes, which protects nobody"),
    ] = None,
    nodes: Nodes = 20,
    workers: Workers = 2,
    shuffler_port: Port = 0,
    coordinator_port: Port = 0,
    out: Out = Path("runs/up"),
    force: Force = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="leave the network up after the run, until Ctrl-C")
    ] = False,
    output: Output = "text",
) -> None:
    """Start a network on loopback, run to the end, write the results.

    The network is a shuffler, a coordinator and nodes, in processes of their own. The command first
    stops an unfinished run that an earlier command left in the folder.
    """
    started = time.monotonic()
    chosen = options.apply(test_seed=test_seed)
    _refuse_unsupported(chosen, chosen.spec)
    config = replace(
        LoopbackConfig.of(chosen, out, nodes, workers, (chosen.spec.trust,)),
        shuffler_port=shuffler_port,
        coordinator_port=coordinator_port,
    )
    with results(out, force=force) as lock, LoopbackNetwork(config, lock) as network:
        _print_summary(_run_on(network, chosen, started), output, out)
        if keep:
            command = f"riffle list --network {network.secrets}"
            progress.print(f"the network stays up: {command}; Ctrl-C ends it")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    network.check_alive()
                    time.sleep(1)


@one_line_errors
@expand_options(without=["preset"])
def run_command(
    options: RunOptions,
    preset: Annotated[str, typer.Argument(help="preset to start from: demo or riverswim")] = "demo",
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    name: Annotated[str | None, typer.Option(help="name of the run; default the preset's")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="create the run, print its id, do not follow it")
    ] = False,
    out: Out = Path("runs/run"),
    force: Force = False,
    output: Output = "text",
) -> None:
    """Run on a network that is up, follow the run to its end, write the results."""
    if detach and (force or out != Path("runs/run")):
        raise ValueError("--detach writes no results, so drop --out and --force; see riffle show")
    started = time.monotonic()
    chosen = replace(options, preset=preset).apply(name=name)
    with Operator.of(network, coordinator_url) as operator:
        if detach:
            run = operator.create_run(chosen.spec)
            emit(run, output, lambda: typer.echo(run["id"]))
            return
        with results(out, force=force):
            summary = run_to_end(operator, chosen, out, started)
    _print_summary(summary, output, out)


@one_line_errors
@expand_options(without=["trust"])
def compare_command(
    options: RunOptions,
    nodes: Nodes = 20,
    workers: Workers = 2,
    out: Out = Path("runs/compare"),
    force: Force = False,
    output: Output = "text",
) -> None:
    """Run shuffle, local and central trust on one loopback network.

    The command measures messages, bytes and seconds on live services, which a simulation (riffle
    sweep) cannot do. Each run has its own users. The command first stops an unfinished run in the
    folder.
    """
    chosen = options.apply()
    for trust in TRUST_MODELS:
        _refuse_unsupported(chosen, with_trust(chosen.spec, trust))
    config = LoopbackConfig.of(chosen, out, nodes, workers, TRUST_MODELS)
    with (
        results(out, force=force, names=COMPARISON_FILES) as lock,
        LoopbackNetwork(config, lock) as network,
        Operator.of(network.secrets) as operator,
    ):
        stop_unfinished(operator)
        models = compare(operator, chosen, out)
        (out / COMPARISON).write_text(json.dumps(models, indent=2) + "\n")
    emit({"models": models}, output, lambda: _print_comparison(models, out))


def _refuse_unsupported(chosen: Preset, spec: RunSpec) -> None:
    """Refuses, before anything is started, a spec that no network of ``riffle up`` could run."""
    registry = Registry(files=chosen.learners)
    if spec.learner not in registry.names:
        # Imported only for this message.
        from riffle.experiments.adversaries import ALGORITHMS  # noqa: PLC0415
        from riffle.experiments.per_episode import PER_EPISODE  # noqa: PLC0415

        if spec.learner in {*PER_EPISODE, *ALGORITHMS}:
            command = f"riffle simulate --learner {spec.learner}"
            raise ValueError(f"{spec.learner} is on the simulator only: {command}")
    made = make(spec.environment, **chosen.environment)
    if spec.homogeneous and declaration_of(made).homogeneous is False:
        raise ValueError(f"homogeneous: nodes of {spec.environment} would refuse, its steps differ")
    registry.build(spec)


@contextlib.contextmanager
def results(out: Path, *, force: bool, names: Sequence[str] = FILES) -> Iterator[int]:
    """Locks the results folder for the block and removes earlier results; yields the lock.

    Results are files of these ``names``. Raises LocalError ``unavailable`` if another command uses
    the folder. Raises FileExistsError if there are results and ``force`` is false.
    """
    with lock_folder(out) as lock:
        earlier = [out / name for name in names if (out / name).exists()]
        if earlier and not force:
            raise FileExistsError(f"{earlier[0]} exists; choose another --out or pass --force")
        for file in earlier:
            file.unlink()
        yield lock


def _run_on(network: LoopbackNetwork, chosen: Preset, started: float) -> dict[str, Any]:
    """Runs a preset to its end on a new network; writes files and returns the summary."""
    out = network.config.folder
    progress.print(
        f"shuffler {network.shuffler_url}, coordinator and page {network.coordinator_url}, "
        f"{counted(network.config.nodes, 'node')}; logs in {out / 'logs'}"
    )
    with Operator.of(network.secrets) as operator:
        stop_unfinished(operator)
        usage, opening = network.usage(), network.opening_seconds()
        summary = run_to_end(operator, chosen, out, started)
    used = {role: now.since(usage[role]) for role, now in network.usage().items()}
    split = asdict(Split.of(used, network.opening_seconds() - opening))
    times = {"wall_seconds": summary["timings"], "core_seconds": split}
    (out / "timings.json").write_text(json.dumps(times, indent=2) + "\n")
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in split.items())
    progress.print(f"seconds of one core: {parts}")
    return summary


def _print_summary(summary: dict[str, Any], output: Output, out: Path) -> None:
    rows = [(key, value) for key, value in summary.items() if key not in {"policy", "timings"}]
    emit(summary, output, lambda: table(("quantity", "value"), rows, f"written to {out}"))


def _print_comparison(models: list[dict[str, Any]], out: Path) -> None:
    rows = [(quantity, *(model[quantity] for model in models)) for quantity in models[0]]
    table(("quantity", *(model["trust"] for model in models)), rows[1:], f"written to {out}")
