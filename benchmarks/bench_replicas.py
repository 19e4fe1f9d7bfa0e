"""Measures uploads and opened messages a second, with one and two replicas of each service.

    python -m benchmarks.bench_replicas [reports of a batch, default 300]

Three sets of processes run on loopback: one of each service on SQLite, one of each on PostgreSQL,
two of each on PostgreSQL. Both databases sync every commit to the disk. Each of `ROUNDS` rounds
runs each set once. Two runs have an open batch; with two coordinators, each drives the run created
at it. Reports are sealed before the clock starts. Uploading ends with the last answer; opening
lasts from then until the coordinators have counted both batches. It also prints the processor
seconds of each role and of this process, which sends. If they add up to the cores' wall time, no
replica can help. The bar, two replicas on PostgreSQL at `BAR` times the rate of one, counts only if
they do not.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from riffle.common.protocol.descriptor import SignedDescriptor, parse
from riffle.common.protocol.signatures import batch_id
from riffle.common.protocol.wire import LeaseReply, frame
from riffle.coordinator.specs import RunSpec
from riffle.deploy.network.loopback import LoopbackConfig, LoopbackNetwork
from riffle.deploy.network.processes import Usage, read_usage
from riffle.deploy.network.secrets import enrol
from riffle.deploy.operator import Operator
from riffle.node_client.environments.registry import make
from riffle.node_client.episode import slot_report
from riffle.node_client.sealing import SealKeys, seal_reports
from tests import postgres

NODES, SENDERS, ROUNDS = 16, 8, 2
BAR, SATURATED = 1.5, 0.9
PARAMETERS: dict[str, Any] = {"states": 4, "horizon": 6}
SETS = {"SQLite, one": ("", 1), "PostgreSQL, one": ("pg", 1), "PostgreSQL, two": ("pg", 2)}
RUNS = ("1b" * 16, "2c" * 16)
Upload = tuple[str, str, bytes]
"""URL's path, token, body."""


def spec(run_id: str, n: int) -> RunSpec:
    return RunSpec(
        run_id=run_id,
        name="bench",
        learner="manual",
        environment="RiverSwim-v0",
        states=4,
        actions=2,
        horizon=6,
        episodes=n,
        epsilon=1.0,
        beta=1e-5,
    )


@contextmanager
def running(cluster: postgres.Cluster, engine: str, replicas: int) -> Iterator[LoopbackNetwork]:
    with ExitStack() as stack:
        shuffler, coordinator = (
            stack.enter_context(cluster.database(store)) if engine else ""
            for store in ("shuffler", "coordinator")
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cluster.folder.parent)))
        config = LoopbackConfig(
            folder,
            "RiverSwim-v0",
            PARAMETERS,
            nodes=0,
            replicas=replicas,
            shuffler_store=shuffler,
            coordinator_store=coordinator,
        )
        yield stack.enter_context(LoopbackNetwork(config))


def uploads(network: LoopbackNetwork, run_id: str, n: int, tokens: list[str]) -> Iterator[Upload]:
    """Yields one upload for each slot of a run's first batch, with one sealed report."""
    path = f"/v1/batches/{batch_id(run_id, 0)}"
    with httpx.Client(base_url=next(iter(network.shufflers.values())), timeout=60) as client:
        deadline = time.monotonic() + 60
        while not (answer := client.get(path, headers=bearer(tokens[0]))).is_success:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.05)
        signed = SignedDescriptor.model_validate_json(answer.content)
        context = parse(signed.descriptor.encode())
        keys = SealKeys.of(context, bytes.fromhex(signed.batch_key))
        plan, environment = context.descriptor, make("RiverSwim-v0", **PARAMETERS)
        for token, users in zip(tokens, np.array_split(np.arange(n), len(tokens)), strict=True):
            names = [f"{run_id[:8]}{user:024x}" for user in users.tolist()]
            answer = client.post(f"{path}/leases", json={"users": names}, headers=bearer(token))
            for lease in LeaseReply.model_validate_json(answer.content).leases:
                symbols = slot_report(plan, environment, lease.slot)[1]
                sealed = seal_reports(keys, symbols[None])
                yield f"{path}/reports", token, frame(lease.lease, sealed)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def send(url: str, mine: list[Upload]) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, token, body in mine:
            answer = client.post(path, content=body, headers=bearer(token))
            assert answer.is_success and b'"accepted"' in answer.content, answer.text


def usage(network: LoopbackNetwork, database: int) -> dict[str, Usage]:
    """Returns the usage of every role, and of the database server with this process id."""
    return network.usage() | {"database": read_usage([database])[database]}


def measure(network: LoopbackNetwork, database: int, n: int) -> dict[str, float]:
    """Returns reports and messages a second, and processor seconds by role while uploading."""
    enrol(network.secrets, network.shuffler_url, ["bench"], NODES, 1 << 30)
    credentials = json.loads((network.secrets / "nodes" / "credentials.json").read_text())
    tokens = [credential["token"] for credential in credentials]
    with ExitStack() as stack:
        desks = [
            stack.enter_context(Operator.of(network.secrets, url))
            for url in network.coordinators.values()
        ]
        for run_id, operator in zip(RUNS, cycle(desks)):
            operator.create_run(spec(run_id, n))
            operator.deploy(run_id, {"policy": [[1] * 4] * 6, "episodes": n})
        each = [list(uploads(network, run_id, n, tokens)) for run_id in RUNS]
        ready = [one for both in zip(*each, strict=True) for one in both]  # seal at the same time
        before, own, started = usage(network, database), time.process_time(), time.perf_counter()
        urls = list(network.shufflers.values())
        with ThreadPoolExecutor(SENDERS) as pool:
            sent = [
                pool.submit(send, urls[i % len(urls)], ready[i::SENDERS]) for i in range(SENDERS)
            ]
            for future in sent:
                future.result()
        uploaded, own = time.perf_counter() - started, time.process_time() - own
        use = usage(network, database)
        result = {"uploads/s": len(ready) / uploaded, "sender cpu": own}
        for role in use:
            result[f"{role} cpu"] = use[role].since(before[role]).total
        result["cpu of wall"] = (own + sum(result[f"{role} cpu"] for role in use)) / uploaded
        started, states = time.perf_counter(), [""]
        while any(state != "counted" for state in states):
            states = [operator.deployments(run_id)[0]["state"] for run_id in RUNS]
            time.sleep(0.02)
        messages = sum(operator.result(run_id)["messages_counted"] for run_id in RUNS)
        result["opened/s"] = messages / (time.perf_counter() - started)
    return result


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, 2 batches of {n} reports")
    best: dict[str, float] = dict.fromkeys(SETS, 0.0)
    busy = 0.0
    with postgres.cluster(postgres.DURABLE) as cluster:
        for _ in range(ROUNDS):
            for name, (engine, replicas) in SETS.items():
                with running(cluster, engine, replicas) as network:
                    result = measure(network, cluster.process.pid, n)
                best[name] = max(best[name], result["uploads/s"])
                busy = max(busy, result["cpu of wall"])
                text = ", ".join(f"{what} {value:.1f}" for what, value in result.items())
                print(f"{name}: {text}", flush=True)
    ratio, cores = best["PostgreSQL, two"] / best["PostgreSQL, one"], len(os.sched_getaffinity(0))
    print(f"uploads/s, two over one: {ratio:.2f}; {busy:.2f} of {cores} cores at work")
    met = ratio >= BAR or busy >= SATURATED * cores
    raise SystemExit(0 if met else f"a bar is missed: two at {BAR} times one, or all cores at work")


if __name__ == "__main__":
    main()
