"""Policies and mixtures, with weights that every role computes the same.

A deterministic policy is an array (H, X) of actions. A mixture draws one policy an episode, with
integer weights over 2**32, so that a draw is one comparison with a 32-bit word and nothing is
rounded differently on two machines.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import Sizes

WEIGHT_LOG2 = 32
TOTAL_WEIGHT = 1 << WEIGHT_LOG2

Policies = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Policies (M, H, X) with integer weights (M,) that sum to 2**32.

    Raises:
        ValueError: shapes differ, a weight is not positive, or the weights' sum is wrong.
    """

    policies: Policies
    weights: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.policies.ndim != 3 or self.weights.shape != self.policies.shape[:1]:
            raise ValueError("a mixture has policies (M, H, X) and weights (M,)")
        if self.weights.size == 0 or int(self.weights.min()) <= 0:
            raise ValueError("every weight of a mixture must be positive")
        total = int(self.weights.sum())
        if total != TOTAL_WEIGHT:
            raise ValueError(f"a mixture's weights sum to 2**{WEIGHT_LOG2}, not {total}")

    @classmethod
    def single(cls, policy: npt.ArrayLike) -> "Mixture":
        """The mixture that always draws one policy (H, X)."""
        policies = np.asarray(policy, dtype=np.int64)[None]
        return cls(policies, np.array([TOTAL_WEIGHT], dtype=np.int64))

    @classmethod
    def from_probabilities(cls, policies: npt.ArrayLike, probabilities: npt.ArrayLike) -> "Mixture":
        """Round probabilities to weights by largest remainder; equal policies are merged.

        Raises:
            ValueError: a probability is negative, or none is positive.
        """
        stacked = np.asarray(policies, dtype=np.int64)
        chances = np.asarray(probabilities, dtype=np.float64)
        if chances.size == 0 or chances.min() < 0 or chances.sum() <= 0:
            raise ValueError("probabilities must be non-negative and not all zero")
        unique, inverse = np.unique(stacked, axis=0, return_inverse=True)
        merged = np.bincount(inverse.ravel(), weights=chances, minlength=len(unique))
        weights = _largest_remainder(merged / merged.sum())
        keep = weights > 0
        return cls(unique[keep], weights[keep])

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """Weights as probabilities (M,), exact in double precision."""
        return np.asarray(self.weights / float(TOTAL_WEIGHT))

    def pick(self, word: int) -> Policies:
        """The policy (H, X) that a uniform 32-bit word selects."""
        bounds = np.cumsum(self.weights)
        chosen = int(bounds.searchsorted(word, side="right"))
        return np.asarray(self.policies[chosen])

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError unless every policy has shape (H, X) and actions in 0..A-1."""
        expected = (sizes.H, sizes.X)
        if self.policies.shape[1:] != expected:
            raise ValueError(f"policies have shape {self.policies.shape[1:]}, expected {expected}")
        if self.policies.min() < 0 or self.policies.max() >= sizes.A:
            raise ValueError(f"a policy has an action outside 0..{sizes.A - 1}")

    def same_as(self, other: "Mixture") -> bool:
        """Whether both deploy the same policies with the same weights."""
        return np.array_equal(self.policies, other.policies) and np.array_equal(
            self.weights, other.weights
        )


def _largest_remainder(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    exact = probabilities * TOTAL_WEIGHT
    weights = np.floor(exact).astype(np.int64)
    missing = TOTAL_WEIGHT - int(weights.sum())
    order = np.argsort(weights - exact, kind="stable")
    weights[order[np.arange(missing) % weights.size]] += 1
    return weights
