"""Exact enumeration of deterministic policies: the active set phi of 000 as an array of bits.

Two policies that differ only in states the start distribution excludes at step 0 have the same
value, so a class is a choice of action in every *free* cell (h, x): the start states at h = 0, all
X states later. RiverSwim with X=4, A=2, H=6 and a fixed start has 2^21 classes.

The horizon is cut at a step m. A class is a pair (prefix, suffix): actions before m, actions from m
on. With D (prefixes, X) the state distribution at m, R (prefixes,) the reward earned before m and V
(suffixes, X) the value from m on, the values of all classes are one matrix product,

    V^(prefix, suffix) = R[prefix] + D[prefix] . V[suffix],

and phi is a boolean matrix of that shape. What is eliminated takes whole prefixes and suffixes with
it, so everything is computed on the rows and columns that are left. With nothing eliminated, plain
backward induction gives the same maxima and is used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.learner import FloatArray, LearnerError, PolicyArray
from riffle.coordinator.learning.planning import BoolArray, Plan, plan

LIMIT = 2**24
TILE = 16  # rows and columns that BLAS kernels take at a time, or a multiple of it


class EnumerationTooLarge(LearnerError):  # noqa: N818 -- says what is the matter
    """There are more deterministic policies than exact enumeration can hold."""


class Model(NamedTuple):
    """Transitions P (H, X, A, X), possibly sub-stochastic, and rewards r (H, X, A)."""

    P: FloatArray
    r: FloatArray


def classes(sizes: Sizes, d1: FloatArray) -> int:
    """Number of deterministic policies that differ from the start distribution d1."""
    return int(sizes.A ** _free(sizes, d1))


class Block(NamedTuple):
    """Prefixes (p,) and suffixes (s,) that active policies have, ascending; pairs (p, s) says which
    of the pairs are active.
    """

    prefixes: PolicyArray
    suffixes: PolicyArray
    pairs: BoolArray

    @classmethod
    def of(cls, active: BoolArray) -> Block:
        """The rows and columns of `active` that are not empty."""
        prefixes, suffixes = np.flatnonzero(active.any(axis=1)), np.flatnonzero(active.any(axis=0))
        return cls(prefixes, suffixes, active[prefixes].take(suffixes, axis=1))


@dataclass(frozen=True, slots=True)
class ActivePolicies:
    """The active set phi; immutable, `eliminate` returns a smaller one.

    `step_actions[h]` (choices, X) lists the action vectors of step h, `cut` is m, and `active` is
    (prefixes, suffixes), or None while nothing has been eliminated.
    """

    d1: FloatArray
    step_actions: tuple[PolicyArray, ...]
    cut: int
    active: BoolArray | None = None
    _left: Block | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        left = None if self.active is None else Block.of(self.active)
        object.__setattr__(self, "_left", left)

    @classmethod
    def everything(cls, sizes: Sizes, d1: FloatArray, limit: int = LIMIT) -> ActivePolicies:
        """All deterministic policies; raises EnumerationTooLarge beyond `limit` classes."""
        if classes(sizes, d1) > limit:
            raise EnumerationTooLarge(
                f"X={sizes.X}, A={sizes.A}, H={sizes.H} has {sizes.A}^{_free(sizes, d1)} "
                f"deterministic policies; exact enumeration holds at most {limit}. "
                "Use fewer states, actions or steps, or set active_set to implicit."
            )
        start = [_actions(sizes, d1 > 0)]
        later = [_actions(sizes, np.ones(sizes.X, dtype=np.bool_)) for _ in range(sizes.H - 1)]
        steps = tuple(start + later)
        return cls(d1, steps, _balanced_cut([len(step) for step in steps]))

    @property
    def shape(self) -> tuple[int, int]:
        """(prefixes, suffixes)."""
        return _product(self._counts[: self.cut]), _product(self._counts[self.cut :])

    @property
    def size(self) -> int:
        """Number of active policies."""
        return _product(self.shape) if self.active is None else int(np.count_nonzero(self.active))

    def values(self, model: Model) -> FloatArray:
        """Values of all classes, active or not: (prefixes, suffixes)."""
        return self._values(model, *map(np.arange, self.shape))

    def best(self, model: Model) -> Plan:
        """A policy of largest value in the active set, and that value."""
        if self._left is None:
            return plan(model.P, model.r, self.d1)
        prefixes, suffixes, pairs = self._left
        values = self._values(model, prefixes, suffixes)
        np.copyto(values, -np.inf, where=~pairs)
        p, s = divmod(int(values.argmax()), len(suffixes))
        index = int(prefixes[p]) * self.shape[1] + int(suffixes[s])
        return Plan(self.policy(index), np.asarray(values[p, s]))

    def bound(self, model: Model) -> float:
        """The largest value in the active set."""
        return float(self.best(model).value)

    def best_visits(self, P: FloatArray, h: int, then: Model) -> Plan:
        """For every (x, a) the active policy that visits (h, x, a) most under P: (X, A, H, X).

        What a policy does after step h does not matter for that; it goes on as `_continued` says.
        Where no active policy visits the tuple, it is any of them. `value` holds the visitation,
        shape (X, A).
        """
        if self._left is None:
            return self._best_visits_of_all(P, h, then)
        _, X, A, _ = P.shape
        before, alive = self._alive(self._left, h)
        takes = (self.step_actions[h][..., None] == np.arange(A)).reshape(-1, X * A)
        able = alive @ takes.astype(np.float32) > 0
        visits = np.where(able, np.repeat(self._reach(P, h, before), A, axis=1), 0.0)
        most, first = visits.max(axis=0), visits.argmax(axis=0)
        choice = np.array([(alive[b] * takes[:, i]).argmax() for i, b in enumerate(first)])
        some = divmod(int(alive.argmax()), alive.shape[1])
        b, k = np.where(most > 0, np.stack((first, choice)), np.array(some)[:, None])
        chosen = before[b] * self._counts[h] + k
        policies = np.stack(self._continued(self._left, chosen.tolist(), h, then))
        return Plan(policies.reshape(X, A, *self._policy_shape), most.reshape(X, A))

    def eliminate(self, model: Model, radius: float) -> tuple[ActivePolicies, float]:
        """Drop every active policy whose value is `radius` or more below the best (Algorithm 1, 9).

        Returns the remaining set and the best value. At radius 0 the maximisers themselves would
        go; they are kept, so the set is never empty.
        """
        if self._left is None:
            keep, best = _near(self.values(model), radius)
            return replace(self, active=None if keep.all() else keep), best
        prefixes, suffixes, pairs = self._left
        values = self._values(model, prefixes, suffixes)
        kept, best = _near(np.where(pairs, values, -np.inf), radius)
        keep = np.zeros(self.shape, dtype=np.bool_)
        keep[np.ix_(prefixes, suffixes)] = kept
        return replace(self, active=keep), best

    @property
    def actions(self) -> BoolArray:
        """Which actions some active policy takes at (h, x): (H, X, A)."""
        A = 1 + max(int(step.max()) for step in self.step_actions)
        taken = np.zeros((*self._policy_shape, A), dtype=np.bool_)
        for h, step in enumerate(self.step_actions):
            taken[h] = (step[self._choices(h)][..., None] == np.arange(A)).any(axis=0)
        return taken

    def contains(self, policy: PolicyArray) -> bool:
        """Whether a policy (H, X), or the class it belongs to, is active."""
        return self.active is None or bool(self.active.flat[self.index(policy)])

    def policy(self, index: int) -> PolicyArray:
        """The policy (H, X) of a flat class index; action 0 in cells that are not free."""
        digits = np.unravel_index(index, self._counts)
        return np.stack([step[i] for step, i in zip(self.step_actions, digits, strict=True)])

    def index(self, policy: PolicyArray) -> int:
        """Flat class index of a policy (H, X)."""
        A = int(max(step.max() for step in self.step_actions)) + 1
        digits = [_rank(step, row, A) for step, row in zip(self.step_actions, policy, strict=True)]
        return int(np.ravel_multi_index(digits, self._counts))

    @property
    def _counts(self) -> list[int]:
        """Number of choices of every step."""
        return [len(step) for step in self.step_actions]

    @property
    def _policy_shape(self) -> tuple[int, int]:
        return len(self.step_actions), self.step_actions[0].shape[1]

    def _best_visits_of_all(self, P: FloatArray, h: int, then: Model) -> Plan:
        _, X, A, _ = P.shape
        wanted = np.zeros((X, A, *P.shape[:3]))
        x, a = np.meshgrid(np.arange(X), np.arange(A), indexing="ij")
        wanted[x, a, h, x, a] = 1.0
        found = plan(P, wanted, self.d1)
        found.policy[..., h + 1 :, :] = plan(then.P, then.r, self.d1).policy[h + 1 :]
        return found

    def _choices(self, h: int) -> PolicyArray:
        """What active policies choose at step h, as rows of `step_actions[h]`."""
        counts, left = self._counts, self._left
        if left is None:
            return np.arange(counts[h])
        part, end = (left.prefixes, self.cut) if h < self.cut else (left.suffixes, len(counts))
        return np.unique(part // _product(counts[h + 1 : end]) % counts[h])

    def _alive(self, left: Block, h: int) -> tuple[PolicyArray, NDArray[np.float32]]:
        """Classes of the steps before h, ascending, and what those active choose at h: (classes,),
        (classes, choices) of zeros and ones. Past the cut there may be classes that choose nothing.
        """
        counts, K = self._counts, self._counts[h]
        ends, end, pairs = left.suffixes, len(counts), left.pairs
        if h < self.cut:
            ends, end, pairs = left.prefixes, self.cut, np.ones((1, len(left.prefixes)), np.bool_)
        begins = ends // _product(counts[h + 1 : end])
        starts = np.flatnonzero(np.diff(begins, prepend=-1))
        if len(starts) < len(begins):
            begins, pairs = begins[starts], np.logical_or.reduceat(pairs, starts, axis=1)
        before, at = _distinct(begins // K)
        alive = np.zeros((len(pairs), len(before) * K), dtype=np.float32)
        whole = len(begins) == alive.shape[1]  # a slice is quicker than a list of all
        alive[:, slice(None) if whole else at * K + begins % K] = pairs
        if h >= self.cut:
            before = (left.prefixes[:, None] * _product(counts[self.cut : h]) + before).ravel()
        return before, alive.reshape(-1, K)

    def _reach(self, P: FloatArray, h: int, begun: PolicyArray) -> FloatArray:
        """State distribution (classes, X) at step h of ascending classes of the steps before it."""
        if h == 0:
            return self.d1[None]
        before, at = _distinct(begun // self._counts[h - 1])
        rows, _ = _chosen(Model(P, np.zeros(P.shape[:3])), h - 1, self.step_actions[h - 1])
        D = np.einsum("px,kxy->pky", self._reach(P, h - 1, before), rows)
        return np.asarray(D[at, begun % self._counts[h - 1]])

    def _continued(
        self, left: Block, chosen: Sequence[int], h: int, then: Model
    ) -> list[PolicyArray]:
        """Active policies that begin as the chosen classes of the steps 0..h do.

        Each goes on as its first active class does up to the cut, and by `then` as well as it can
        after it.
        """
        (D, _), V = self._prefixes(then, self.cut), self._suffixes(then)
        S, rest = self.shape[1], _product(self._counts[h + 1 :])
        found = []
        for begin in chosen:
            p = int(np.searchsorted(left.prefixes, begin * rest // S))
            prefix = int(left.prefixes[p])
            ends = (begin * rest - prefix * S, (begin + 1) * rest - prefix * S)
            low, high = np.searchsorted(left.suffixes, ends)
            suffixes = left.suffixes[low:high]
            values = np.where(left.pairs[p, low:high], V[suffixes] @ D[prefix], -np.inf)
            found.append(self.policy(prefix * S + int(suffixes[values.argmax()])))
        return found

    def _values(self, model: Model, prefixes: PolicyArray, suffixes: PolicyArray) -> FloatArray:
        """Values of every pair of these."""
        D, R = self._prefixes(model, self.cut)
        P, S = len(prefixes), len(suffixes)
        # BLAS rounds a block's edges in another way: filled up, a policy's value does not depend on
        # which others are left, and ties stay ties.
        D, V = D[_filled(prefixes)], self._suffixes(model)[_filled(suffixes)]
        values: FloatArray = (D @ V.T)[:P, :S]
        values += R[prefixes, None]
        return values

    def _prefixes(self, model: Model, until: int) -> tuple[FloatArray, FloatArray]:
        """D (prefixes, X) at step `until` and R (prefixes,) earned before it."""
        D, R = self.d1[None], np.zeros(1)
        for h in range(until):
            rows, rewards = _chosen(model, h, self.step_actions[h])
            R = (R[:, None] + D @ rewards.T).ravel()
            D = np.einsum("px,kxy->pky", D, rows).reshape(-1, D.shape[1])
        return D, R

    def _suffixes(self, model: Model) -> FloatArray:
        """Value (suffixes, X) from the cut on."""
        V = np.zeros((1, self._policy_shape[1]))
        for h in reversed(range(self.cut, len(self.step_actions))):
            rows, rewards = _chosen(model, h, self.step_actions[h])
            V = rewards[:, None] + np.einsum("kxy,sy->ksx", rows, V)
            V = V.reshape(-1, V.shape[-1])
        return V


def _near(values: FloatArray, radius: float) -> tuple[BoolArray, float]:
    """Which values are less than `radius` below the best, or the best; and that."""
    best = float(values.max())
    return (values > best - radius) | (values == best), best


def _free(sizes: Sizes, d1: FloatArray) -> int:
    """Number of free cells."""
    return int((d1 > 0).sum()) + sizes.X * (sizes.H - 1)


def _actions(sizes: Sizes, free: BoolArray) -> PolicyArray:
    """All action vectors (A^free, X) of one step, in lexicographic order; 0 where not free."""
    vectors = np.zeros((sizes.A ** int(free.sum()), sizes.X), dtype=np.int64)
    places = sizes.A ** np.arange(int(free.sum()))[::-1]
    vectors[:, free] = np.arange(len(vectors))[:, None] // places % sizes.A
    return vectors


def _chosen(model: Model, h: int, actions: PolicyArray) -> tuple[FloatArray, FloatArray]:
    """Rows (choices, X, X) and rewards (choices, X) of step h under each action vector."""
    x = np.arange(actions.shape[1])
    return model.P[h][x, actions], model.r[h][x, actions]


def _filled(array: PolicyArray) -> PolicyArray:
    """Repeated to a length of whole tiles."""
    return np.resize(array, -(-len(array) // TILE) * TILE)


def _distinct(ascending: PolicyArray) -> tuple[PolicyArray, PolicyArray]:
    """The distinct values of ascending ones, and which of them every one is."""
    first = np.diff(ascending, prepend=-1) > 0
    return ascending[first], np.cumsum(first) - 1


def _rank(step: PolicyArray, row: PolicyArray, A: int) -> int:
    free = step.max(axis=0) > 0
    rank = 0
    for action in row[free]:
        rank = rank * A + int(action)
    return rank


def _balanced_cut(counts: Sequence[int]) -> int:
    sums = [_product(counts[:m]) + _product(counts[m:]) for m in range(len(counts) + 1)]
    return int(np.argmin(sums))


def _product(factors: Sequence[int]) -> int:
    result = 1
    for factor in factors:
        result *= int(factor)
    return result
