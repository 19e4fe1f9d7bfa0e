"""Measures calibration and accounting: the cost of the noise, and the time to find it.

Run `python -m benchmarks.bench_accounting`. It prints three tables:

1. the noise of the reference setting (epsilon = 1, beta = 1e-5, X = 4, A = 2, H = 6, n = 4096)
   beside the analytic Gaussian mechanism's and the papers' calibration;
2. this noise for several epsilon, and for n from 1 to 10^7;
3. CPU times: cold (nothing cached), warm (other n), near (n changed slightly), and one account.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from riffle.common.accounting import (
    BatchEvent,
    Calibration,
    CalibrationName,
    account,
    calibrate,
    gaussian_variance,
    loss_curve,
)
from riffle.common.accounting.binomial import binomial_losses
from riffle.common.accounting.least_noise import needed_bits
from riffle.common.mechanism.counters import CounterLayout, Families, Sizes
from riffle.common.mechanism.parameters import Guarantee, Noise, Padding

SIZES = Sizes(X=4, A=2, H=6)
BETA = 1e-5
SCOPES: list[tuple[Families, int | None]] = [
    ("paper", None),
    ("paper", 0),
    ("lean", None),
    ("joint", None),
]
EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0)
BATCHES = (1, 10, 100, 1000, 4096, 10**4, 10**5, 10**6, 10**7)


def reference(
    families: Families,
    layer: int | None,
    n: int = 4096,
    epsilon: float = 1.0,
    calibration: CalibrationName = "exact",
) -> Calibration[Noise]:
    layout = CounterLayout(SIZES, families, layer)
    return calibrate(layout, n, Guarantee(epsilon, BETA), calibration)


def row(families: Families, layer: int | None, n: int, epsilon: float) -> str:
    result = reference(families, layer, n, epsilon)
    paper = reference(families, layer, n, epsilon, "paper")
    a = result.account
    ratio = a.variance / gaussian_variance(
        epsilon, BETA, CounterLayout(SIZES, families, layer).cells
    )
    return (
        f"{families:6s} {'all' if layer is None else 'layer':6s}{epsilon:5.1f}{n:10d}"
        f"{result.noise.bits:8d} {result.noise.p:10.3g}{a.expected_ones:10.2f}{a.messages:9d}"
        f"{a.variance:10.2f}{ratio:7.3f}{a.epsilon_lower:9.5f}{a.epsilon_upper:9.5f}"
        f"{100 * (a.epsilon_upper - a.epsilon_lower) / epsilon:7.2f} %"
        f"{paper.account.expected_ones / a.expected_ones:9.1f}{paper.account.epsilon_upper:9.4f}"
    )


HEADER = (
    "family scope   eps         n    bits          p  ones/ctr messages  variance  /Gauss"
    "  eps low   eps up    gap  paper/x paper eps"
)


def seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def calibration_seconds(families: Families, layer: int | None, n: int, epsilon: float) -> float:
    return seconds(lambda: reference(families, layer, n, epsilon))


def forget() -> None:
    for cached in (loss_curve.sharpest, needed_bits, binomial_losses):
        cached.cache_clear()


def times(families: Families, layer: int | None, epsilon: float) -> str:
    forget()
    cold = calibration_seconds(families, layer, 4096, epsilon)
    near = max(calibration_seconds(families, layer, n, epsilon) for n in (4097, 4100))
    warm = max(calibration_seconds(families, layer, n, epsilon) for n in (50, 10**6))
    result = reference(families, layer, 4096, epsilon)
    layout = CounterLayout(SIZES, families, layer)
    noise = replace(result.noise, bits=result.noise.bits + 1)
    padding = Padding(result.padding.data_slots, result.padding.noise_slots + 5)
    event = BatchEvent(noise, padding, 4096, 0.0, layout.cells, layout.counters)
    once = seconds(lambda: account(event, BETA))
    scope = "all" if layer is None else "layer"
    return f"{families:6s} {scope:6s}{epsilon:5.1f}{cold:9.3f}{warm:9.3f}{near:9.3f}{once:9.3f}"


def main() -> None:
    seconds(lambda: reference("lean", 0, 999))
    print("1. reference", HEADER, sep="\n")
    for families, layer in SCOPES:
        print(row(families, layer, 4096, 1.0))
    print("2. over epsilon and n", HEADER, sep="\n")
    for families, layer in SCOPES:
        for epsilon in EPSILONS:
            print(row(families, layer, 4096, epsilon))
    for n in BATCHES:
        print(row("paper", None, n, 1.0))
    print("3. CPU seconds", "family scope   eps     cold     warm     near  account", sep="\n")
    for families, layer in SCOPES:
        for epsilon in EPSILONS:
            print(times(families, layer, epsilon))


if __name__ == "__main__":
    main()
