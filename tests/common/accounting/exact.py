"""Independent oracles: exact probabilities, no code shared with `common.accounting`.

Distributions are dictionaries from outcome to Fraction (or float), composed by enumeration.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy import stats

Outcome = tuple[int, ...]
Distribution = dict[Outcome, Fraction]
Array = npt.NDArray[np.float64]


def binomial(N: int, p: Fraction) -> list[Fraction]:
    """Pr[Z = z] for z = 0..N."""
    return [math.comb(N, z) * p**z * (1 - p) ** (N - z) for z in range(N + 1)]


def noisy_counts(counts: Sequence[int], N: int, p: Fraction) -> Distribution:
    """The exact distribution of counts plus independent Binomial(N, p) noise."""
    mass = binomial(N, p)
    result = {}
    for noise in product(range(N + 1), repeat=len(counts)):
        outcome = tuple(c + z for c, z in zip(counts, noise, strict=True))
        result[outcome] = math.prod((mass[z] for z in noise), start=Fraction(1))
    return result


def hockey_stick(
    P: Mapping[Outcome, Fraction], Q: Mapping[Outcome, Fraction], e_epsilon: Fraction
) -> Fraction:
    """sup over E of P(E) - e^epsilon Q(E), over all outcomes."""
    zero = Fraction(0)
    return sum((max(zero, m - e_epsilon * Q.get(y, zero)) for y, m in P.items()), zero)


def float_pair(N: int, p: float) -> tuple[Array, Array]:
    """P = Bin and Q = 1 + Bin over outcomes 0..N+1, by log gamma."""
    z = np.arange(N + 1)
    log_b = np.array(
        [
            math.lgamma(N + 1)
            - math.lgamma(v + 1)
            - math.lgamma(N - v + 1)
            + v * math.log(p)
            + (N - v) * math.log1p(-p)
            for v in z
        ]
    )
    b = np.exp(log_b)
    return np.append(b, 0.0), np.insert(b, 0, 0.0)


def product_delta(pairs: Sequence[tuple[Array, Array]], epsilon: float) -> float:
    """delta of a product of (P, Q) pairs, every joint outcome enumerated."""
    P, Q = np.ones(1), np.ones(1)
    for p, q in pairs:
        P, Q = np.outer(P, p).ravel(), np.outer(Q, q).ravel()
    return float(np.maximum(P - math.exp(epsilon) * Q, 0.0).sum())


def steps_delta(q: float, cells: int, epsilon: float) -> float:
    """delta of `Steps`: the sum is a (2 k - 2 cells), k ~ Binomial(2 cells, 1 / (1 + q))."""
    k = np.arange(2 * cells + 1)
    loss = -math.log(q) * (2 * k - 2 * cells)
    mass = stats.binom(2 * cells, 1 / (1 + q)).pmf(k)
    return float((mass * -np.expm1(np.minimum(epsilon - loss, 0.0))).sum())
