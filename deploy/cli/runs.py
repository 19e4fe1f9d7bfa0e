"""``riffle up`` and ``riffle run``: a run from its spec to its results."""

import time
from pathlib import Path
from typing import Annotated

import typer

from common.errors import LocalError
from coordinator.registry import Registry
from deploy.cli import specs
from deploy.cli.output import Format, emit, one_line_errors, progress, table
from deploy.follow import run_to_end
from deploy.local import LocalConfig, LocalNetwork
from deploy.network import operator_client
from deploy.operator import Operator

Output = Annotated[Format, typer.Option("--format", help="text or json")]
Out = Annotated[Path, typer.Option(help="folder for the results")]
Force = Annotated[bool, typer.Option("--force", help="replace results that are already there")]


@one_line_errors
def up_command(
    preset: specs.PresetName = "demo",
    learner: specs.Learner = "sdp-pe",
    env: specs.Environment = None,
    param: specs.Param = None,
    horizon: specs.Horizon = None,
    episodes: specs.Episodes = None,
    epsilon: specs.Epsilon = None,
    beta: specs.Beta = None,
    families: specs.FamiliesOption = None,
    constants: specs.Constants = None,
    option: specs.Option = None,
    nodes: Annotated[int, typer.Option(min=1, help="nodes to start")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="processes for cryptography")] = 2,
    shuffler_port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    coordinator_port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    out: Out = Path("runs/up"),
    force: Force = False,
    output: Output = Format.text,
) -> None:
    """Start shuffler, coordinator and nodes on loopback, run to the end, write the results."""
    started = time.monotonic()
    chosen = specs.resolve(
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
    Registry(files=chosen.learners).build(chosen.spec)  # refuse before anything is started
    prepare(out, force=force)
    config = LocalConfig(
        folder=out,
        environment=chosen.spec.environment,
        environment_parameters=chosen.environment,
        nodes=nodes,
        max_epsilon=chosen.spec.epsilon,
        max_beta=chosen.spec.beta,
        min_dishonest_fraction=chosen.spec.dishonest_fraction,
        shuffler_port=shuffler_port,
        coordinator_port=coordinator_port,
        workers=workers,
        learners=chosen.learners,
    )
    with LocalNetwork(config) as network:
        progress.print(
            f"shuffler {network.shuffler_url}, coordinator {network.coordinator_url}, "
            f"{nodes} nodes; logs in {out / 'logs'}"
        )
        client = operator_client(network.secrets, network.coordinator_url, network.operator_token)
        with Operator(client) as operator:
            document = run_to_end(operator, chosen, out, started)
    show(document, output, out)


@one_line_errors
def run_command(
    preset: Annotated[str, typer.Argument(help="demo or paper: what to start from")] = "demo",
    network: Annotated[Path, typer.Option(help="folder of the network's secrets")] = Path(
        "network"
    ),
    coordinator_url: Annotated[str, typer.Option(help="where the coordinator answers")] = (
        "http://127.0.0.1:8400"
    ),
    learner: specs.Learner = "sdp-pe",
    env: specs.Environment = None,
    param: specs.Param = None,
    horizon: specs.Horizon = None,
    episodes: specs.Episodes = None,
    epsilon: specs.Epsilon = None,
    beta: specs.Beta = None,
    families: specs.FamiliesOption = None,
    constants: specs.Constants = None,
    option: specs.Option = None,
    out: Out = Path("runs/run"),
    force: Force = False,
    output: Output = Format.text,
) -> None:
    """Create a run on a network that is already up, follow it to its end, write the results."""
    started = time.monotonic()
    chosen = specs.resolve(
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
    prepare(out, force=force)
    with remote_operator(network, coordinator_url) as operator:
        document = run_to_end(operator, chosen, out, started)
    show(document, output, out)


def remote_operator(network: Path, coordinator_url: str) -> Operator:
    """The operator's client, with the token in the network's folder.

    Raises:
        LocalError: ``unavailable``, there is no such token.
    """
    file = network / "operator" / "coordinator_token"
    if not file.exists():
        raise LocalError(
            "unavailable", f"no token at {file}; make one with 'riffle network init {network}'"
        )
    return Operator(operator_client(network, coordinator_url, file.read_text()))


def prepare(out: Path, *, force: bool) -> None:
    """Make the results' folder, and refuse to write over earlier results.

    Raises:
        FileExistsError: there is a summary already, and ``force`` is false.
    """
    summary = out / "summary.json"
    if summary.exists() and not force:
        raise FileExistsError(f"{summary} exists; choose another --out or say --force")
    out.mkdir(parents=True, exist_ok=True)
    summary.unlink(missing_ok=True)


def show(document: dict[str, object], output: Format, out: Path) -> None:
    """Print a run's summary."""
    hidden = {"policy", "timings"}

    def text() -> None:
        rows = [(key, value) for key, value in document.items() if key not in hidden]
        table(("quantity", "value"), rows, title=f"written to {out}")

    emit(document, output, text)
