"""Whether a load test tells the generator's limit from the server's: four loads held back.

    python -m benchmarks.bench_load [share of the rates below, default 1]

`riffle load` with 2,000 nodes, services on one processor and the generator on another, four minutes
in all: more than the shuffler can store; more than the nodes can seal; and one moderate load with
busy loops on the generator's processor, then on the services'. Only the loops' place differs
between the last two, so the verdict must follow them. Printed: a row each, as in docs/load.md.
Exit code 1 where another limit is named than the one that was made, or none: a faster machine
carries these rates, so give a larger share there.
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
    """Reports a second, how they are made, what is held back by busy loops, what must be named."""

    rate: float
    presealed: bool
    held: str | None
    limit: str


LOADS = (
    Load(100, presealed=True, held=None, limit="shuffler"),
    Load(80, presealed=False, held=None, limit="generator"),
    Load(60, presealed=True, held="generator", limit="generator"),
    Load(60, presealed=True, held="services", limit="shuffler"),
)


@contextmanager
def busy(core: int, loops: int) -> Iterator[None]:
    """Processes that want one processor all the time."""
    command = [sys.executable, "-c", LOOP, str(core), str(LONGEST_SECONDS)]
    started = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measured(load: Load, share: float, cores: dict[str, int], out: Path) -> dict[str, Any]:
    """The document of one load test."""
    command = [sys.executable, "-m", "riffle.deploy.cli.main", "load", "--nodes", str(NODES)]
    command += ["--rate", str(load.rate * share), "--duration", str(SECONDS), "--out", str(out)]
    command += [part for side, core in cores.items() for part in (f"--{side}-cores", str(core))]
    command += ["--presealed"] if load.presealed else []
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LONGEST_SECONDS, check=False)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


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
            found = measured(load, share, cores, Path(folder) / "load")
        seen, verdict = found["evidence"], found["verdict"]
        demand = ", ".join(f"{seen[name]:.2f}" for name in ("loops", "sealing", "shuffler"))
        how = "presealed" if load.presealed else "sealing"
        print(
            f"{load.rate * share:g} {how}, {load.held or 'nothing'} | {demand} | "
            f"{seen['prompt']:,} / {seen['due']:,} | {verdict['limit']} | {verdict['why']}",
            flush=True,
        )
        right = right and verdict["limit"] == load.limit
    if not right:
        print("another limit was named than the one that was made", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
