"""What SDP-PE asks of its active set phi (Algorithm 1 of 000), however the set is kept.

`enumeration` lists every policy; `implicit` keeps the inequalities that active policies satisfy.
"""

from __future__ import annotations

from typing import Literal, Protocol, Self

from riffle.common.counters import Sizes
from riffle.coordinator.learning.absorbing import BoolArray
from riffle.coordinator.learning.enumeration import LIMIT, ActivePolicies, Model, classes
from riffle.coordinator.learning.implicit import ImplicitPolicies
from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Plan

Kept = Literal["auto", "enumerated", "implicit"]


class ActiveSet(Protocol):
    """A set of deterministic policies, never empty; immutable, `eliminate` returns a smaller one.

    Every policy that a method returns is a member. `best` and `best_visits` are exact when the set
    is enumerated; `bound` is then the value of `best`.
    """

    @property
    def d1(self) -> FloatArray:
        """Start distribution (X,)."""
        ...

    @property
    def size(self) -> int | None:
        """Number of active policies, or None where it is not known."""
        ...

    @property
    def actions(self) -> BoolArray:
        """Which actions an active policy may take at (h, x): (H, X, A); False is proved."""
        ...

    def best(self, model: Model) -> Plan:
        """A member of large value under a model, and that value."""
        ...

    def bound(self, model: Model) -> float:
        """Upper bound of every member's value under a model."""
        ...

    def best_visits(self, P: FloatArray, h: int, then: Model) -> Plan:
        """For every (x, a) a member that visits (h, x, a) often under P: (X, A, H, X).

        After step h it does what is best under `then`. `value` (X, A) holds the visitation.
        """
        ...

    def eliminate(self, model: Model, radius: float) -> tuple[Self, float]:
        """Drop every member whose value is `radius` or more below the best (Algorithm 1, line 9).

        Returns the remaining set and the best value.
        """
        ...

    def contains(self, policy: PolicyArray) -> bool:
        """Whether a policy (H, X) is active."""
        ...


def everything(sizes: Sizes, d1: FloatArray, kept: Kept) -> ActiveSet:
    """All deterministic policies; `auto` enumerates them while that is feasible.

    Raises EnumerationTooLarge when `enumerated` is asked for beyond what it can hold.
    """
    if kept == "implicit" or (kept == "auto" and classes(sizes, d1) > LIMIT):
        return ImplicitPolicies.everything(sizes, d1)
    return ActivePolicies.everything(sizes, d1)
