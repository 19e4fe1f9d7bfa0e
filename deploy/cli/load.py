"""``riffle load``: the load that a network can carry. ``riffle bench``: Riffle's own speed.
``riffle conformance`` and ``check-report``: whether somebody else's client follows the protocol.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.common.process.configuration import hex_file
from riffle.common.process.plugins import unknown_name
from riffle.common.protocol.descriptor import SignedDescriptor, parse
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.wire import LEASE_BYTES
from riffle.deploy import conformance, offers, report_check
from riffle.deploy.cli.options import (
    CoordinatorUrl,
    Families,
    Force,
    ShufflerUrl,
    expand_options,
    is_given,
)
from riffle.deploy.cli.up import results
from riffle.deploy.load import benchmark
from riffle.deploy.load.html_page import LATENCY, RATES, card, numbers, write_summary
from riffle.deploy.load.run import LoadConfig, Target, find_capacity, loopback_target, run
from riffle.deploy.load.summary import step_text
from riffle.deploy.network.processes import interrupt_on_termination, make_folder
from riffle.deploy.network.secrets import SHUFFLER_URL_FILE, URL_FILE, address
from riffle.deploy.output import (
    Exit,
    Output,
    dotted_rows,
    emit,
    emit_findings,
    fail,
    one_line_errors,
    progress,
    table,
)
from riffle.deploy.owner import BatchKeys, Finding, MistakeError, Owner, open_report
from riffle.experiments.presets import customize, preset

SEARCH = "start at --rate and search for the largest rate that a new network carries"
OF_A_NETWORK_THAT_IS_UP = ("shuffler_url", "coordinator_url")
OF_A_NEW_NETWORK = ("workers", "service_cores")


@one_line_errors
@expand_options(folder=Path("runs/load"))
def load_command(
    context: typer.Context,
    config: LoadConfig,
    network: Annotated[
        Path | None, typer.Option(help="secrets of a network that is up; default: a new one")
    ] = None,
    shuffler_url: ShufflerUrl = None,
    coordinator_url: CoordinatorUrl = None,
    capacity: Annotated[bool, typer.Option("--find-capacity", help=SEARCH)] = False,
    force: Force = False,
    output: Output = "text",
) -> None:
    """Load a network with real nodes and name its bottleneck.

    The exit code is 1 if there is a bottleneck: too few reports were accepted promptly.
    With --find-capacity, the exit code is 1 if the network carried no rate.
    """
    if capacity and network is not None:
        fail("--find-capacity would overload the network of --network: leave one out", Exit.USAGE)
    for name in OF_A_NETWORK_THAT_IS_UP if network is None else OF_A_NEW_NETWORK:
        if is_given(context, name):
            use = "is for a network that is up: give --network, too"
            if network is not None:
                use = "is for a new network, not for that of --network"
            fail(f"--{name.replace('_', '-')} {use}", Exit.USAGE)
    with ExitStack() as stack:
        stack.enter_context(interrupt_on_termination())
        lock = stack.enter_context(results(config.folder, force=force))
        progress.print(
            f"{config.nodes} nodes, {config.rate:g} reports a second for {config.seconds:g} s"
        )
        target = (
            stack.enter_context(loopback_target(config, lock))
            if network is None
            else Target(
                network,
                address(network, SHUFFLER_URL_FILE, shuffler_url),
                address(network, URL_FILE, coordinator_url),
            )
        )
        summary = (find_capacity if capacity else run)(config, target)
        write_summary(config.folder, summary)
    title = f"written to {config.folder}"
    emit(summary, output, lambda: table(("quantity", "value"), report_rows(summary), title))
    if summary["interrupted"]:
        raise typer.Exit(Exit.INTERRUPTED)
    carried = summary["verdict"]["limit"] == "none"
    if capacity:
        carried = summary["capacity"]["carried_a_second"] > 0
    raise typer.Exit(Exit.DONE if carried else Exit.NO)


def report_rows(summary: dict[str, Any]) -> list[tuple[str, object]]:
    """Returns the report's first lines and main tables as rows of one table."""
    steps, tables = summary.get("capacity", {"steps": {}})["steps"], numbers(summary)
    rows: list[tuple[str, object]] = list(card(summary).items())
    for rate, step in steps.items():
        rows.append((f"{RATES}: {rate}", f"{step_text(step)}; tries: {step['tries']}"))
    tables[LATENCY] = {
        f"{name}, {kind}": value
        for name in ("from due", "from send")
        for kind, value in tables[LATENCY][name].items()
    }
    for title in ("Reports", "Rejected reports", "Unsuccessful answers", LATENCY):
        for name, value in tables[title].items():
            rows.append((f"{title}: {name}".replace("_", " "), value))
    return rows


# The callback makes it a group, although it has only one command.
bench_command = typer.Typer(
    help="Measure Riffle's own speed.", no_args_is_help=True, callback=lambda: None
)


@bench_command.command("wire")
@one_line_errors
def wire_command(
    messages: Annotated[
        int,
        typer.Option(
            min=10_000,
            max=5_000_000,
            help="least number n L of messages in the batch; at least 96,600",
        ),
    ] = 100_000,
    aggregation: Annotated[
        Aggregation, typer.Option(help="sums: compare a summed report with one of messages")
    ] = "messages",
    episodes: Annotated[int, typer.Option(min=300, help="with sums: n, reports of a batch")] = 4096,
    states: Annotated[int, typer.Option(min=2, help="with sums: X of RiverSwim")] = 4,
    horizon: Annotated[int, typer.Option(min=1, help="with sums: H of RiverSwim")] = 6,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes for cryptography; default: one a core")
    ] = None,
    output: Output = "text",
) -> None:
    """Measure messages a second: through live services, and of the cryptography alone.

    With --aggregation sums, compare the processor time of a summed report and a report of messages.

    Three numbers have targets: Riffle's rate divided by the cryptography's rate, the servers'
    processor time for a message, and the speedup. The exit code is 1 if a number misses its target.
    """
    cores = workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="riffle-wire-") as folder:
        if aggregation == "sums":
            sizes = {"states": states, "horizon": horizon}
            paper = preset("riverswim")
            chosen = customize(paper, "sdp-pe", parameters=sizes, options={}, changes={})
            document = benchmark.run_sums_benchmark(messages, episodes, Path(folder), cores, chosen)
        else:
            document = benchmark.run_benchmark(messages, Path(folder), cores, preset("riverswim"))
    emit(document, output, lambda: table(("quantity", "value"), list(dotted_rows(document))))
    for limit in benchmark.missed_bars(document):
        progress.print(f"missed: {limit}", highlight=False)
    if why := benchmark.disturbance(document):
        progress.print(why, highlight=False)
    raise typer.Exit(Exit.NO if benchmark.missed_bars(document) else Exit.DONE)


@one_line_errors
def conformance_command(
    client: Annotated[
        list[str] | None, typer.Argument(help="command that starts the client, after --")
    ] = None,
    families: Annotated[str, typer.Option(help="the client's families")] = "joint,lean,paper",
    trust: Annotated[str, typer.Option(help="the client's trust models")] = "shuffle",
    aggregations: Annotated[str, typer.Option(help="the client's aggregations")] = "messages",
    idle: Annotated[float, typer.Option(help="seconds without a request that end the test")] = 30.0,
    seconds: Annotated[float, typer.Option(help="seconds that the whole test may take")] = 900.0,
    out: Annotated[Path, typer.Option(help="folder for settings")] = Path("runs/conformance"),
    output: Output = "text",
) -> None:
    """Offer batches to a client that you wrote, and name its mistakes.

    The client talks to a shuffler on loopback with throwaway keys. The variable RIFFLE_CONFORMANCE
    has the path of the client's settings.json. The client is offered batches that a node must
    refuse. The client is also offered good batches, while the network has faults. A correct client
    fails with probability at most 1e-6. The exit code is 1 if something is wrong. A mistake names a
    section of docs/protocol.md.
    """
    names: list[Any] = [tuple(text.split(",")) for text in (families, trust, aggregations)]
    for given, kind in zip(names, (Families, Trust, Aggregation), strict=True):
        for name in set(given) - set(get_args(kind)):
            raise ValueError(unknown_name("name", name, get_args(kind)))
    folder, cases = make_folder(out.absolute()), offers.good_cases(*names)
    owner = Owner(*names[1:])
    recorder, bad = conformance.Recorder(owner), list(offers.bad_offers(owner, cases))
    with (
        interrupt_on_termination(),
        conformance.serving(recorder) as url,
        (folder / "client.log").open("wb") as log,
        ExitStack() as stack,
    ):
        owner.write_settings(folder, url)
        progress.print(f"start the client with the settings in {folder / 'settings.json'}")
        if client:
            environment = os.environ | {"RIFFLE_CONFORMANCE": str(folder / "settings.json")}
            process = subprocess.Popen(client, env=environment, stdin=-3, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            recorder.is_over = lambda: process.poll() is not None
        findings = list(conformance.session(recorder, cases, bad, idle, seconds))
    emit_findings(findings, output)


@one_line_errors
def check_report_command(
    descriptor: Annotated[Path, typer.Argument(help="file: descriptor, or shuffler's answer")],
    report: Annotated[Path, typer.Argument(help="file: uploaded report, with or without lease id")],
    analyzer_key: Annotated[Path, typer.Option(help="file: analyzer's private key, 64 hex digits")],
    batch_key: Annotated[Path, typer.Option(help="file: batch's private key, 64 hex digits")],
    output: Output = "text",
) -> None:
    """Say what is right and what is wrong about one report of a test batch.

    The exit code is 1 if something is wrong. A mistake names a section of docs/protocol.md.
    """
    data, private = descriptor.read_bytes(), hex_file("--analyzer-key", analyzer_key)
    if b'"batch_key"' in data:
        data = SignedDescriptor.model_validate_json(data).descriptor.encode()
    context = parse(data)
    if KeyPair.from_private(private).public.hex() != context.descriptor.analyzer_key:
        raise ValueError(f"{analyzer_key} is not the private half of the descriptor's analyzer_key")
    sealed, size = report.read_bytes(), context.descriptor.report_bytes
    sealed = sealed[-size:] if len(sealed) == size + LEASE_BYTES else sealed
    keys = BatchKeys(context, data, private, hex_file("--batch-key", batch_key))
    emit_findings(_check_report(keys, sealed), output)


def _check_report(keys: BatchKeys, sealed: bytes) -> Iterator[Finding]:
    """Yields the findings about one report that do not depend on its episode.

    A number of ones is wrong if its tail probability for a correct client is at most `ERROR_RATE`.
    """
    d, layout = keys.context.descriptor, keys.context.descriptor.layout
    try:
        counts = open_report([(keys, sealed)], set())[: layout.counters]
    except MistakeError as mistake:
        yield Finding(False, "seals", *mistake.args)
        return
    detail = f"all open, each with its own ephemeral key; {d.padding.messages} messages"
    yield Finding(True, "seals", "3.4", detail)
    (bits, p), data = report_check.noise_bits(d), layout.cells
    ones, most = int(counts.sum()), int(counts.max())
    law = report_check.binomial(bits * layout.counters, p)
    likely = min(law[: ones + 1].sum(), law[max(0, ones - data) :].sum()) > report_check.ERROR_RATE
    detail = f"{ones} ones of counters; expected about {bits * p * layout.counters:.4g} of noise"
    yield Finding(bool(likely), "noise", "7", f"{detail}, up to {data} of data")
    detail = f"at most {most} ones of a counter; expected up to {1 + bits}"
    yield Finding(most <= 1 + bits, "counters", "7", detail)
