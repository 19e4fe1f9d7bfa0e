"""Checks that a load test tells the generator's limit from the server's, with three limited loads.

    python -m benchmarks.bench_load [share of the rates below, default 1]

It runs `riffle load` with 2,000 nodes, services on one processor and the generator on another, for
three minutes in all. The first load is more than the nodes can seal. A moderate load then runs
twice, with busy loops on the generator's processor and then on the services'. Only the place of the
loops differs, so the verdict must follow them. It prints a row for each load, as in docs/load.md.
The exit code is 1 if a verdict does not name the expected limit. A faster machine may carry these
rates: give a larger share there.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NODES, SECONDS, LOOPS = 2000, 30, 3
LONGEST_SECONDS = 180
LOOP = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end: pass
"""


@dataclass(frozen=True, slots=True)
class Load:
    """Reports a second, the side that busy loops slow, and the expected verdict."""

    rate: float
    held: str | None
    limit: str


LOADS = (
    Load(80, held=None, limit="generator"),
    Load(40, held="generator", limit="generator"),
    Load(40, held="services", limit="shuffler"),
)


@contextmanager
def busy(core: int, loops: int) -> Iterator[None]:
    """Runs processes that keep one processor busy."""
    command = [sys.executable, "-c", LOOP, str(core), str(LONGEST_SECONDS)]
    started = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(load: Load, share: float, cores: dict[str, int], out: Path) -> dict[str, Any]:
    """Runs one load test and returns its document."""
    command = [sys.executable, "-m", "riffle.deploy.cli.main", "load", "--nodes", str(NODES)]
    command += ["--rate", str(load.rate * share), "--duration", str(SECONDS), "--out", str(out)]
    command += [part for side, core in cores.items() for part in (f"--{side}-cores", str(core))]
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LONGEST_SECONDS, check=False)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def main() -> int:
    share = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        print("needs two processors, one for either side", file=sys.stderr)
        return 2
    cores = {"service": own[0], "generator": own[1]}
    print("reports/s, held back | event loops, sealing, shuffler | prompt / due | named | why")
    right = True
    for load in LOADS:
        core = cores["generator" if load.held == "generator" else "service"]
        with tempfile.TemporaryDirectory() as folder, busy(core, LOOPS if load.held else 0):
            result = measure(load, share, cores, Path(folder) / "load")
        evidence, verdict = result["evidence"], result["verdict"]
        demand = ", ".join(f"{evidence[name]:.2f}" for name in ("loops", "sealing", "shuffler"))
        print(
            f"{load.rate * share:g}, {load.held or 'nothing'} | {demand} | "
            f"{evidence['prompt']:,} / {evidence['due']:,} | {verdict['limit']} | {verdict['why']}",
            flush=True,
        )
        right = right and verdict["limit"] == load.limit
    if not right:
        print("a verdict does not name the limit that was set", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
