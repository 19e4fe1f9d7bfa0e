"""Throughput of the services, compared with the primitive (HPKE) alone on the same cores.

On each core, one process seals messages in s seconds each and opens them in o seconds each. The
primitive's rate is the sum of 1 / (s + o) over the cores. Riffle's rate is n L messages divided by
the wall time of one deployment on live services. The primitive is measured before and after the
deployment, which shows if the machine's speed changes.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from riffle.common.process.workers import SPAWN
from riffle.common.protocol.descriptor import MAX_MESSAGES
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import LABEL_MESSAGE
from riffle.coordinator.batches.issue import calibrated
from riffle.coordinator.specs import RunSpec
from riffle.deploy.load.feed import constant_deployment, manual_spec
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.processes import Usage
from riffle.deploy.operator import LAST_EVENTS, Answer, Operator
from riffle.deploy.output import progress, timed_bar
from riffle.experiments.presets import Preset, preset, with_aggregation

PRIMITIVE_SECONDS = 4.0
WARM_EPISODES, WARM_SECONDS = 400, 5.0
LEAST_EPISODES = 300
SHARE_BAR, SERVER_BAR = 0.85, 1.5
SPEEDUP_BAR = 10.0
SUM_SECONDS = 0.001
"""A rough guess of the seconds that one masked report takes, for the progress bar only."""
STEADY = 1.1
"""A measurement counts as disturbed if the primitive's two rates differ by a larger factor."""

CallTime = tuple[float, float]
"""Seconds of processor time and of wall time of one call."""


@dataclass(frozen=True, slots=True)
class Primitive:
    """Seconds to seal and to open a message on one core, and messages a second on all cores."""

    seal: float
    open: float
    rate: float


@dataclass(frozen=True, slots=True)
class Split:
    """Processor time by purpose, in seconds of one core.

    ``crypto``: worker pools, and opening outer seals in the shuffler. ``http``: all event loops.
    Other threads: ``store`` in the shuffler, ``episodes`` in nodes, ``coordinator`` in that role.
    """

    crypto: float
    http: float
    store: float
    episodes: float
    coordinator: float

    @classmethod
    def of(cls, used: dict[str, Usage], outer_seconds: float) -> "Split":
        """Splits the roles' processor time, of which opening outer seals took ``outer_seconds``."""
        node, shuffler, coordinator = used["node"], used["shuffler"], used["coordinator"]
        return cls(
            crypto=node.pool + coordinator.pool + outer_seconds,
            http=node.main + shuffler.main + coordinator.main,
            store=max(0.0, shuffler.threads - outer_seconds),
            episodes=node.threads,
            coordinator=coordinator.threads,
        )


def run_benchmark(messages: int, folder: Path, cores: int, chosen: Preset) -> dict[str, Any]:
    """Runs the benchmark on a new network in ``folder``, with at least ``messages`` messages.

    Raises LocalError if the network does not start or the deployment fails.
    """
    spec = manual_spec(chosen.spec, "wire")
    n = batch_for(spec, messages)
    total = n * calibrated(spec, n, None).padding.messages
    progress.print(f"a batch of {total} messages in {n} reports, {cores} cores", highlight=False)
    width = spec.layout().width
    before = measure_primitive(width, cores)
    row, seconds, used, split = _measure(chosen, n, folder, cores, total / before.rate)
    after = measure_primitive(width, cores)
    return summarize(row, seconds, split, used["node"].main, (before, after), cores)


def run_sums_benchmark(
    messages: int, n: int, folder: Path, cores: int, chosen: Preset
) -> dict[str, Any]:
    """Compares the processor time of a report as a masked vector and as messages.

    The vectors have the counters of ``chosen``, in a batch of n reports. The cost of a message
    does not depend on the number of counters. It is measured first, on at least ``messages``
    messages of the preset `riverswim`. Raises the errors of `run_benchmark`.
    """
    folder.mkdir(exist_ok=True)
    single = run_benchmark(messages, folder / "messages", cores, preset("riverswim"))
    summed, spec = with_aggregation(chosen, "sums"), manual_spec(chosen.spec)
    most = {"max_messages": MAX_MESSAGES}
    L = calibrated(spec.model_copy(update=most), n, None).padding.messages
    row, seconds, _, split = _measure(summed, n, folder / "sums", cores, n * SUM_SECONDS)
    a_message = single["core_us_a_message"]
    cost, of_messages = sum(asdict(split).values()) / n * 1e6, sum(a_message.values()) * L
    return {
        "aggregation": "sums",
        "reports": n,
        "counters": spec.layout().counters,
        "cores": cores,
        "seconds": seconds,
        "reports_a_second": n / seconds,
        "bytes_a_report": row["report_bytes"],
        "core_us_a_report": {name: t / n * 1e6 for name, t in asdict(split).items()},
        "wall_seconds": row["timings"],
        "messages": {
            "messages_a_report": L,
            "measured_messages": single["messages"],
            "core_us_a_message": a_message,
            "core_us_a_report": of_messages,
        },
        "speedup": of_messages / cost,
        "speedup_bar": SPEEDUP_BAR,
    }


def _measure(
    chosen: Preset, n: int, folder: Path, cores: int, expected: float
) -> tuple[Answer, float, dict[str, Usage], Split]:
    """Measures one deployment on a new network. ``expected`` is its likely time in seconds.

    Returns the deployment's row, its seconds, and its processor time by role and by purpose.
    """
    spec = manual_spec(chosen.spec, "wire")
    config = LoopbackConfig.of(chosen, folder, chosen.nodes, cores)
    with (
        LoopbackNetwork(config) as network,
        Operator.of(network.secrets, network.coordinator_url) as operator,
    ):
        run_id = operator.create_run(spec)["id"]
        with timed_bar("warming up", WARM_SECONDS):
            _deploy(operator, run_id, spec, WARM_EPISODES)
        with timed_bar(f"{n} reports", expected):
            opening, use = network.opening_seconds(), network.usage()
            start = time.monotonic()
            row = _deploy(operator, run_id, spec, n)
            seconds = time.monotonic() - start
        used = {role: now.since(use[role]) for role, now in network.usage().items()}
        return row, seconds, used, Split.of(used, network.opening_seconds() - opening)


def summarize(
    row: Answer,
    seconds: float,
    split: Split,
    nodes_http: float,
    primitives: tuple[Primitive, Primitive],
    cores: int,
) -> dict[str, Any]:
    """Returns the benchmark's document: how fast one deployment was counted, and at what cost.

    ``nodes_http`` is the nodes' part of ``split.http``, and not part of the servers' cost.
    """
    n, total = row["n"], row["n"] * row["messages"]
    own = Primitive(*map(fmean, zip(*map(astuple, primitives), strict=True)))
    servers = split.http - nodes_http + split.store + split.coordinator
    return {
        "messages": total,
        "reports": n,
        "messages_a_report": row["messages"],
        "cores": cores,
        "seconds": seconds,
        "messages_a_second": total / seconds,
        "primitive_messages_a_second": own.rate,
        "primitive_before": primitives[0].rate,
        "primitive_after": primitives[1].rate,
        "seal_us": own.seal * 1e6,
        "open_us": own.open * 1e6,
        "share_of_primitive": total / seconds / own.rate,
        "share_by_core_time": (own.seal + own.open) * total / sum(asdict(split).values()),
        "share_bar": SHARE_BAR,
        "server_us_a_message": servers / total * 1e6,
        "server_bar": SERVER_BAR,
        "core_us_a_message": {name: t / total * 1e6 for name, t in asdict(split).items()},
        "wall_seconds": row["timings"],
    }


def missed_bars(document: dict[str, Any]) -> list[str]:
    """Returns the targets that a benchmark missed, each with the measured value."""
    if "speedup" in document:
        speedup = document["speedup"]
        return [f"speedup {speedup:.1f} < {SPEEDUP_BAR}"] if speedup < SPEEDUP_BAR else []
    share, server = document["share_of_primitive"], document["server_us_a_message"]
    bars = {
        f"share_of_primitive {share:.3f} < {SHARE_BAR}": share < SHARE_BAR,
        f"server_us_a_message {server:.1f} > {SERVER_BAR}": server > SERVER_BAR,
    }
    return [bar for bar, missed in bars.items() if missed]


def disturbance(document: dict[str, Any]) -> str | None:
    """Returns a warning if the machine's speed changed during the benchmark."""
    if "primitive_before" not in document:
        return None
    before, after = document["primitive_before"], document["primitive_after"]
    if max(before, after) <= STEADY * min(before, after):
        return None
    return (
        f"the primitive alone took {before:,.0f} messages a second before and {after:,.0f} after: "
        "something else uses this machine; measure again when nothing does"
    )


def batch_for(spec: RunSpec, messages: int) -> int:
    """Returns the smallest n with n L >= ``messages`` (n L grows with n, except for rounding)."""
    most = max(LEAST_EPISODES + 1, messages)

    def total(n: int) -> int:
        return n * calibrated(spec, n, None).padding.messages

    return bisect_left(range(most), messages, LEAST_EPISODES, most, key=total)


def measure_primitive(width: int, cores: int) -> Primitive:
    """Measures how fast ``cores`` processes seal and open plaintexts of ``width`` bytes."""
    pool = ProcessPoolExecutor(cores, mp_context=SPAWN)
    with timed_bar("the primitive alone", PRIMITIVE_SECONDS), pool:
        list(pool.map(_measure_core, [(width, 0.05)] * cores))  # start and warm up the processes
        times = list(pool.map(_measure_core, [(width, PRIMITIVE_SECONDS / 2)] * cores))
    seal, opening = (sum(pair[i][0] for pair in times) / cores for i in range(2))
    return Primitive(seal, opening, sum(1 / (s[1] + o[1]) for s, o in times))


def _measure_core(job: tuple[int, float]) -> tuple[CallTime, CallTime]:
    """Times sealing and opening; ``job``: the plaintext's bytes, and seconds to spend on each."""
    width, seconds = job
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)
    private, info = X25519PrivateKey.generate(), LABEL_MESSAGE + bytes(32)
    public, data = private.public_key(), os.urandom(width)
    sealed = suite.encrypt(data, public, info)
    return (
        _time(lambda: suite.encrypt(data, public, info), seconds),
        _time(lambda: suite.decrypt(sealed, private, info), seconds),
    )


def _time(work: Callable[[], object], seconds: float) -> CallTime:
    calls, start, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < start + seconds:
        for _ in range(50):
            work()
        calls += 50
    return (time.process_time() - used) / calls, (time.perf_counter() - start) / calls


def _deploy(operator: Operator, run_id: str, spec: RunSpec, n: int) -> Answer:
    """Deploys a constant policy for n episodes. Returns the deployment's row once it is counted."""
    row = operator.deploy(run_id, constant_deployment(spec, n))
    for event in operator.events(run_id):
        if event["kind"] == "batch_counted" and event["data"]["index"] == row["index"]:
            return operator.deployments(run_id)[row["index"]]
        if event["kind"] in LAST_EVENTS:
            break
    raise LocalError("unavailable", f"the deployment of {n} episodes was not counted")
