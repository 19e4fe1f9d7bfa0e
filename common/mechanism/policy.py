"""Policies, and mixtures of policies.

A policy is an array (H, X) of actions. A mixture draws one policy for each episode. Weights of
policies are integers, so no two machines round them differently.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import Sizes

TOTAL_WEIGHT = 1 << 32

Policies = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Policies (M, H, X) with integer weights (M,) that sum to 2**32.

    Raises ValueError if the shapes do not fit, a weight is not positive, or the sum is wrong.
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
            raise ValueError(f"a mixture's weights sum to 2**32, not {total}")

    @classmethod
    def single(cls, policy: npt.ArrayLike) -> "Mixture":
        """Returns the mixture that always draws one policy (H, X)."""
        policies = np.asarray(policy, dtype=np.int64)[None]
        return cls(policies, np.array([TOTAL_WEIGHT], dtype=np.int64))

    @classmethod
    def from_probabilities(cls, policies: npt.ArrayLike, probabilities: npt.ArrayLike) -> "Mixture":
        """Rounds probabilities to weights by the largest-remainder method; merges equal policies.

        Raises ValueError if a probability is negative, or none is positive.
        """
        stacked = np.asarray(policies, dtype=np.int64)
        shares = np.asarray(probabilities, dtype=np.float64)
        if shares.size == 0 or shares.min() < 0 or shares.sum() <= 0:
            raise ValueError("probabilities must be non-negative and not all zero")
        unique, inverse = np.unique(stacked, axis=0, return_inverse=True)
        merged = np.bincount(inverse.ravel(), weights=shares, minlength=len(unique))
        weights = _largest_remainder(merged / merged.sum())
        keep = weights > 0
        return cls(unique[keep], weights[keep])

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """The weights as probabilities (M,), exact in double precision."""
        return np.asarray(self.weights / float(TOTAL_WEIGHT))

    def pick(self, word: int) -> Policies:
        """Returns the policy (H, X) that a uniform 32-bit word selects."""
        bounds = np.cumsum(self.weights)
        index = int(bounds.searchsorted(word, side="right"))
        return np.asarray(self.policies[index])

    def check(self, sizes: Sizes) -> None:
        """Raises ValueError unless every policy has shape (H, X) and actions in 0..A-1."""
        expected = (sizes.H, sizes.X)
        if self.policies.shape[1:] != expected:
            raise ValueError(f"policies have shape {self.policies.shape[1:]}, expected {expected}")
        if self.policies.min() < 0 or self.policies.max() >= sizes.A:
            raise ValueError(f"a policy has an action outside 0..{sizes.A - 1}")

    def same_as(self, other: "Mixture") -> bool:
        """Returns whether both mixtures have the same policies with the same weights."""
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
