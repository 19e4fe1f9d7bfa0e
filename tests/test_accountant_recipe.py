"""The recipe of docs/protocol.md, 12.2 to 12.4, against the rows of docs/vectors/accountant.json.

It is written from the page, for one reason: a node of another language needs no more than this.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import signal, special, stats

from tests.vectors import read

Part = tuple[int, np.ndarray[Any, Any], float]
"""Index of the first grid loss, masses, mass at infinite loss."""

LARGEST_EXCESS, LARGEST_LACK = 3e-5, 5e-6
LARGEST_LACK_OF_STEPS = 5e-4
"""The bounds that the page states; the last one is of flips and Laplace noise."""


def binomial_losses(N: int, p: float) -> tuple[Part, Part]:
    width = 20 + math.sqrt(400 + 120 * N * p * (1 - p))
    y = np.arange(max(0, math.floor(N * p - width)), min(N, math.ceil(N * p + width)) + 1.0)
    with np.errstate(divide="ignore"):
        r = np.log((N - y + 1) * p / (y * (1 - p)))
        after = np.log((N - y) * p / ((y + 1) * (1 - p)))
    steps = np.concatenate(([0.0], np.cumsum(r[1:])))
    b = np.exp(steps - steps.max())
    b /= b.sum()
    return (0, np.stack((b, -after)), 0.0), (0, np.stack((b, r)), 0.0)


def on_grid(part: Part, d: float) -> Part:
    b, loss = part[1]
    finite = np.isfinite(loss)
    m, loss = b[finite], loss[finite]
    k = np.floor(loss / d).astype(int)
    share = np.expm1(-(loss - k * d)) / np.expm1(-d)
    first = int(k.min())
    masses = np.zeros(k.max() - first + 2)
    np.add.at(masses, k - first, m * (1 - share))
    np.add.at(masses, k - first + 1, m * share)
    return first, masses, float(b[~finite].sum())


def cut(part: Part, tail: float) -> Part:
    first, m, inf = part
    low = int(np.searchsorted(np.cumsum(m), tail))
    high = int(np.searchsorted(np.cumsum(m[::-1]), tail))
    below, above = m[:low].sum(), m[len(m) - high :].sum()
    m = m[low : len(m) - high].copy()
    m[0] += below
    return first + low, m, inf + float(above)


def times(a: Part, b: Part, tail: float) -> Part:
    product = np.maximum(signal.convolve(a[1], b[1]), 0.0)
    return cut((a[0] + b[0], product, a[2] + b[2] - a[2] * b[2]), tail)


def power(part: Part, exponent: int, tail: float) -> Part:
    result = None
    while exponent:
        if exponent % 2:
            result = part if result is None else times(result, part, tail)
        part, exponent = times(part, part, tail), exponent // 2
    assert result is not None
    return result


def composed(N: int, p: float, cells: int, beta: float, d: float) -> tuple[Any, Any, float]:
    up, down = (power(on_grid(move, d), cells, 1e-9 * beta) for move in binomial_losses(N, p))
    first, m, inf = times(up, down, 1e-9 * beta)
    return (first + np.arange(len(m))) * d, m, inf


def smallest(total: Callable[[float], float], beta: float, losses: Any) -> float:
    if total(0.0) <= beta:
        return 0.0
    above = np.append(losses[losses > 0], losses.max())
    points = [0.0, *above[:: max(1, len(above) // 500)].tolist(), float(above[-1])]
    after = next((i for i, x in enumerate(points) if total(x) <= beta), None)
    if after is None:
        return math.inf
    low, high = points[after - 1], points[after]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if total(middle) <= beta else (middle, high)
    return float(high)


def epsilon(row: dict[str, Any], d: float) -> float:
    noise, cells, beta, n = row["noise"], row["cells"], row["beta"], row["n"]
    kind = noise.get("kind", "bernoulli")
    p, eta = noise["p_numerator"] / 2 ** noise["p_log2"], 0.0
    if kind in ("flips", "laplace"):
        q = p / (1 - p) if kind == "flips" else p
        k = np.arange(2 * cells + 1)
        losses, m = (2 * k - 2 * cells) * -math.log(q), stats.binom.pmf(k, 2 * cells, 1 / (1 + q))
        inf = 0.0
    elif kind == "binomial":
        losses, m, inf = composed(noise["bits"], p, cells, beta, d)
    else:
        honest = n - math.floor(round(row["gamma"] * n, 9))
        losses, m, inf = composed(honest * noise["bits"], p, cells, beta, d)
        trials, room = noise["bits"] * row["counters"], row["noise_slots"]
        factor = n
        if row["word_bits"]:
            trials, room = n * noise["bits"], 2 ** row["word_bits"] - 1 - n
            factor = row["counters"]
        tail = special.betainc(room + 1.0, trials - room, p) if room < trials else 0.0
        eta = min(1.0, factor * float(tail))

    def total(e: float) -> float:
        after = losses > e
        delta = inf + float(np.sum(m[after] * -np.expm1(e - losses[after])))
        return delta + (1 + math.exp(min(e, 700.0))) * eta

    return smallest(total, beta, losses)


ROWS = read("accountant.json")["vectors"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']} {row['gamma']} {row['beta']}")
def test_the_recipe_agrees_with_the_accountant(row: dict[str, Any]) -> None:
    about = row["upper"] or 1.0
    found = epsilon(row, about / 1000 * math.sqrt(10 / (2 * row["cells"])))
    if row["upper"] is None:
        assert found == math.inf
        return
    has_steps = row["noise"].get("kind") in ("flips", "laplace")
    lack = LARGEST_LACK_OF_STEPS if has_steps else LARGEST_LACK
    assert -lack <= found / row["upper"] - 1 <= LARGEST_EXCESS
