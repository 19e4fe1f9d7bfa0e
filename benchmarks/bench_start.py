"""Measures the processor time of help, as a multiple of the time that importing NumPy takes.

    python -m benchmarks.bench_start

Every command runs in a process of its own. The commands take turns, so a change of the machine's
speed affects all of them. It prints each command's median processor time (user and system), and the
ratio to NumPy's. The exit code is 1 if a ratio is above `BAR`.
"""

import resource
import statistics
import subprocess
import sys

ROUNDS, BAR = 11, 3.0
START = "import sys; sys.argv[0] = 'riffle'; from riffle.deploy.cli.main import main; main()"
PROGRAMS = {
    "import numpy": ["import numpy"],
    "riffle --help": [START, "--help"],
    "riffle simulate --help": [START, "simulate", "--help"],
}


def processor_seconds(program: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-P", "-c", *program]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS):
        for name, program in PROGRAMS.items():
            seconds[name].append(processor_seconds(program))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: median / medians["import numpy"] for name, median in medians.items()}
    for name, ratio in ratios.items():
        print(f"{name:24} {medians[name]:6.3f} s {ratio:5.2f}")
    return int(max(ratios.values()) > BAR)


if __name__ == "__main__":
    sys.exit(main())
