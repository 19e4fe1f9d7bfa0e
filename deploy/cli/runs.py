"""``riffle up`` and ``riffle run``: a run from its spec to its results.

``riffle compare``: what a trust model costs, live.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from riffle.deploy.cli import options
from riffle.deploy.cli.options import NETWORK, CoordinatorUrl, Network
from riffle.deploy.follow import TRUST_MODELS, compare, run_to_end, stop_earlier
from riffle.deploy.load.benchmark import Split
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.processes import lock_folder
from riffle.deploy.operator import Operator
from riffle.deploy.output import Format, Output, emit, one_line_errors, progress, table
from riffle.deploy.presets import Preset
from riffle.deploy.report import FILES

Out = Annotated[Path, typer.Option(help="folder for the results")]
Nodes = Annotated[int, typer.Option(min=1, help="nodes to start")]
Workers = Annotated[int, typer.Option(min=1, help="processes for cryptography")]
Force = Annotated[bool, typer.Option("--force", help="replace results that are already there")]


@one_line_errors
def up_command(
    preset: options.PresetName = "demo",
    learner: options.Learner = "sdp-pe",
    env: options.Environment = None,
    param: options.Param = None,
    horizon: options.Horizon = None,
    episodes: options.Episodes = None,
    epsilon: options.Epsilon = None,
    beta: options.Beta = None,
    trust: options.TrustOption = None,
    families: options.FamiliesOption = None,
    constants: options.Constants = None,
    option: options.Option = None,
    test_seed: Annotated[
        int | None,
        typer.Option(help="seed noise and episodes: protects nobody, can be repeated by simulate"),
    ] = None,
    nodes: Nodes = 20,
    workers: Workers = 2,
    shuffler_port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    coordinator_port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    out: Out = Path("runs/up"),
    force: Force = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="leave the network up after the run, until Ctrl-C")
    ] = False,
    output: Output = Format.text,
) -> None:
    """Start shuffler, coordinator and nodes on loopback, run to the end, write the results.

    An earlier run of the same folder that was left unfinished is stopped first.
    """
    started = time.monotonic()
    chosen = options.resolve(
        preset,
        env,
        param,
        horizon,
        option,
        learner=learner,
        episodes=episodes,
        epsilon=epsilon,
        beta=beta,
        trust=trust,
        families=families,
        preset=constants,
        test_seed=test_seed,
    )
    options.check(chosen, chosen.spec)
    config = replace(
        LoopbackConfig.of(chosen, out, nodes, workers, (chosen.spec.trust,)),
        shuffler_port=shuffler_port,
        coordinator_port=coordinator_port,
    )
    with results(out, force=force) as lock, LoopbackNetwork(config, lock) as network:
        show(_carried_out(network, chosen, started), output, out)
        if keep:
            stay(network)


def _carried_out(network: LoopbackNetwork, chosen: Preset, started: float) -> dict[str, object]:
    """Run to the end on a network that was just started; writes files, returns the summary."""
    out = network.config.folder
    progress.print(
        f"shuffler {network.shuffler_url}, coordinator and page {network.coordinator_url}, "
        f"{network.config.nodes} nodes; logs in {out / 'logs'}"
    )
    with Operator.of(network.secrets) as operator:
        stop_earlier(operator)
        before, opened = network.usage(), network.opening_seconds()
        document = run_to_end(operator, chosen, out, started)
    used = {role: now.since(before[role]) for role, now in network.usage().items()}
    split = asdict(Split.of(used, network.opening_seconds() - opened))
    times = {"wall_seconds": document["timings"], "core_seconds": split}
    (out / "timings.json").write_text(json.dumps(times, indent=2) + "\n")
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in split.items())
    progress.print(f"seconds of one core: {parts}")
    return document


@one_line_errors
def run_command(
    preset: Annotated[str, typer.Argument(help="demo or paper: what to start from")] = "demo",
    network: Network = NETWORK,
    coordinator_url: CoordinatorUrl = None,
    name: Annotated[str | None, typer.Option(help="name of the run; default the preset's")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="create the run, print its id, do not follow it")
    ] = False,
    learner: options.Learner = "sdp-pe",
    env: options.Environment = None,
    param: options.Param = None,
    horizon: options.Horizon = None,
    episodes: options.Episodes = None,
    epsilon: options.Epsilon = None,
    beta: options.Beta = None,
    trust: options.TrustOption = None,
    families: options.FamiliesOption = None,
    constants: options.Constants = None,
    option: options.Option = None,
    out: Out = Path("runs/run"),
    force: Force = False,
    output: Output = Format.text,
) -> None:
    """Create a run on a network that is already up, follow it to its end, write the results."""
    started = time.monotonic()
    chosen = options.resolve(
        preset,
        env,
        param,
        horizon,
        option,
        learner=learner,
        episodes=episodes,
        epsilon=epsilon,
        beta=beta,
        trust=trust,
        families=families,
        preset=constants,
        name=name,
    )
    with Operator.of(network, coordinator_url) as operator:
        if detach:
            run = operator.create_run(chosen.spec)
            emit(run, output, lambda: typer.echo(run["id"]))
            return
        with results(out, force=force):
            document = run_to_end(operator, chosen, out, started)
    show(document, output, out)


@contextlib.contextmanager
def results(out: Path, *, force: bool, names: Sequence[str] = FILES) -> Iterator[int]:
    """The results' folder, ours alone in the block and without earlier results; yields its lock.

    Results are files of these ``names``.

    Raises:
        LocalError: ``unavailable``, a network is up in it or another command writes there.
        FileExistsError: there are results, finished or not, and ``force`` is false.
    """
    with lock_folder(out) as lock:
        earlier = [out / name for name in names if (out / name).exists()]
        if earlier and not force:
            raise FileExistsError(f"{earlier[0]} exists; choose another --out or say --force")
        for file in earlier:
            file.unlink()
        yield lock


def stay(network: LoopbackNetwork) -> None:
    """Keep the network up until Ctrl-C.

    Raises:
        LocalError: ``unavailable``, one of its processes ended.
    """
    progress.print(f"the network stays up: riffle list --network {network.secrets}; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            network.check_alive()
            time.sleep(1)


def show(document: dict[str, object], output: Format, out: Path) -> None:
    """Print a run's summary."""
    hidden = {"policy", "timings"}

    def text() -> None:
        rows = [(key, value) for key, value in document.items() if key not in hidden]
        table(("quantity", "value"), rows, title=f"written to {out}")

    emit(document, output, text)


FILE = "comparison.json"
WRITTEN = (FILE, *(f"{trust}/{name}" for trust in TRUST_MODELS for name in FILES))


@one_line_errors
def compare_command(
    preset: options.PresetName = "demo",
    learner: options.Learner = "sdp-pe",
    env: options.Environment = None,
    param: options.Param = None,
    horizon: options.Horizon = None,
    episodes: options.Episodes = None,
    epsilon: options.Epsilon = None,
    beta: options.Beta = None,
    families: options.FamiliesOption = None,
    constants: options.Constants = None,
    option: options.Option = None,
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
    chosen = options.resolve(
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
        options.check(chosen, chosen.spec.model_copy(update={"trust": trust}))
    config = LoopbackConfig.of(chosen, out, nodes, workers, TRUST_MODELS)
    with (
        results(out, force=force, names=WRITTEN) as lock,
        LoopbackNetwork(config, lock) as network,
        Operator.of(network.secrets) as operator,
    ):
        stop_earlier(operator)
        rows = compare(operator, chosen, out)
        (out / FILE).write_text(json.dumps(rows, indent=2) + "\n")
    emit({"models": rows}, output, lambda: _show(rows, out))


def _show(rows: list[dict[str, Any]], out: Path) -> None:
    columns = [(quantity, *(row[quantity] for row in rows)) for quantity in rows[0]]
    table(("quantity", *(row["trust"] for row in rows)), columns[1:], title=f"written to {out}")
