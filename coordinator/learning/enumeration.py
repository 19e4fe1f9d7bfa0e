"""Exact enumeration of deterministic policies: the active set phi of 000 as an array of bits.

Two policies that differ only in states the start distribution excludes at step 0 have the same
value, so a class is a choice of action in every *free* cell (h, x): the start states at h = 0, all
X states later. RiverSwim with X=4, A=2, H=6 and a fixed start has 2^21 classes.

The horizon is cut at a step m. A class is a pair (prefix, suffix): actions before m, actions from m
on. With D (prefixes, X) the state distribution at m, R (prefixes,) the reward earned before m and V
(suffixes, X) the value from m on, the values of all classes are one matrix product,

    V^(prefix, suffix) = R[prefix] + D[prefix] . V[suffix],

and phi is a boolean matrix of that shape. With nothing eliminated, plain backward induction gives
the same maxima and is used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from common.counters import Sizes
from coordinator.learning.absorbing import BoolArray
from coordinator.learning.learner import FloatArray, LearnerError, PolicyArray
from coordinator.learning.planning import Plan, plan

LIMIT = 2**24


class EnumerationTooLarge(LearnerError):  # noqa: N818 -- says what is the matter
    """There are more deterministic policies than exact enumeration can hold."""


class Model(NamedTuple):
    """Transitions P (H, X, A, X), possibly sub-stochastic, and rewards r (H, X, A)."""

    P: FloatArray
    r: FloatArray


def classes(sizes: Sizes, d1: FloatArray) -> int:
    """Number of deterministic policies that differ from the start distribution d1."""
    return int(sizes.A ** _free(sizes, d1))


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
        later = [_actions(sizes, np.ones(sizes.X, dtype=np.bool_))] * (sizes.H - 1)
        steps = tuple(start + later)
        return cls(d1, steps, _balanced_cut([len(step) for step in steps]))

    @property
    def shape(self) -> tuple[int, int]:
        """(prefixes, suffixes)."""
        counts = [len(step) for step in self.step_actions]
        return _product(counts[: self.cut]), _product(counts[self.cut :])

    @property
    def size(self) -> int:
        """Number of active policies."""
        return _product(self.shape) if self.active is None else int(np.count_nonzero(self.active))

    def values(self, model: Model) -> FloatArray:
        """Values of all classes, active or not: (prefixes, suffixes)."""
        D, R = self._prefixes(model, self.cut)
        values: FloatArray = D @ self._suffixes(model).T
        values += R[:, None]
        return values

    def best(self, model: Model) -> Plan:
        """A policy of largest value in the active set, and that value."""
        if self.active is None:
            return plan(model.P, model.r, self.d1)
        values = self.values(model)
        np.copyto(values, -np.inf, where=~self.active)
        index = int(values.argmax())
        return Plan(self.policy(index), np.asarray(values.flat[index]))

    def bound(self, model: Model) -> float:
        """The largest value in the active set."""
        return float(self.best(model).value)

    def best_visits(self, P: FloatArray, h: int, then: Model) -> Plan:
        """For every (x, a) the active policy that visits (h, x, a) most under P: (X, A, H, X).

        What a policy does after step h does not matter for that; it goes on as `_continued` says.
        Where no active policy visits the tuple, it is any of them. `value` holds the visitation,
        shape (X, A).
        """
        if self.active is None:
            return self._best_visits_of_all(P, h, then)
        _, X, A, _ = P.shape
        reach, _ = self._prefixes(Model(P, np.zeros(P.shape[:3])), h)
        takes = (self.step_actions[h][..., None] == np.arange(A)).reshape(-1, X * A)
        alive = self._alive_until(h)
        able = alive.astype(np.float32) @ takes.astype(np.float32) > 0
        visits = np.where(able, np.repeat(reach, A, axis=1), 0.0)
        most, before = visits.max(axis=0), visits.argmax(axis=0)
        choice = [int((alive[b] & takes[:, i]).argmax()) for i, b in enumerate(before)]
        chosen = np.where(most > 0, before * alive.shape[1] + choice, alive.argmax())
        policies = np.stack(self._continued(chosen.tolist(), alive.size, then))
        return Plan(policies.reshape(X, A, *self._policy_shape), most.reshape(X, A))

    def eliminate(self, model: Model, radius: float) -> tuple[ActivePolicies, float]:
        """Drop every active policy whose value is `radius` or more below the best (Algorithm 1, 9).

        Returns the remaining set and the best value. At radius 0 the maximisers themselves would
        go; they are kept, so the set is never empty.
        """
        values = self.values(model)
        active = np.ones(self.shape, dtype=np.bool_) if self.active is None else self.active
        best = float(values.max(where=active, initial=-np.inf))
        keep = active & ((values > best - radius) | (values == best))
        return replace(self, active=None if keep.all() else keep), best

    @property
    def actions(self) -> BoolArray:
        """Which actions some active policy takes at (h, x): (H, X, A)."""
        counts = [len(step) for step in self.step_actions]
        alive = self.active if self.active is None else self.active.reshape(counts)
        A = 1 + max(int(step.max()) for step in self.step_actions)
        taken = np.zeros((*self._policy_shape, A), dtype=np.bool_)
        for h, step in enumerate(self.step_actions):
            others = tuple(i for i in range(len(counts)) if i != h)
            rows = step if alive is None else step[alive.any(axis=others)]
            taken[h] = (rows[..., None] == np.arange(A)).any(axis=0)
        return taken

    def contains(self, policy: PolicyArray) -> bool:
        """Whether a policy (H, X), or the class it belongs to, is active."""
        return self.active is None or bool(self.active.flat[self.index(policy)])

    def policy(self, index: int) -> PolicyArray:
        """The policy (H, X) of a flat class index; action 0 in cells that are not free."""
        counts = [len(step) for step in self.step_actions]
        digits = np.unravel_index(index, counts)
        return np.stack([step[i] for step, i in zip(self.step_actions, digits, strict=True)])

    def index(self, policy: PolicyArray) -> int:
        """Flat class index of a policy (H, X)."""
        counts = [len(step) for step in self.step_actions]
        A = int(max(step.max() for step in self.step_actions)) + 1
        digits = [_rank(step, row, A) for step, row in zip(self.step_actions, policy, strict=True)]
        return int(np.ravel_multi_index(digits, counts))

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

    def _alive_until(self, h: int) -> BoolArray:
        """Which classes of the steps 0..h have an active continuation: (classes before h, choices
        at h).
        """
        assert self.active is not None  # noqa: S101 -- narrowed by the only caller
        counts = [len(step) for step in self.step_actions]
        rest = _product(counts[h + 1 :])
        alive: BoolArray = np.any(self.active.reshape(-1, counts[h], rest), axis=-1)
        return alive

    def _continued(self, chosen: Sequence[int], among: int, then: Model) -> list[PolicyArray]:
        """Active policies that begin as the chosen ones of `among` classes do.

        Each goes on as its first active class does up to the cut, and by `then` as well as it can
        after it.
        """
        assert self.active is not None  # noqa: S101 -- narrowed by the only caller
        (D, _), V = self._prefixes(then, self.cut), self._suffixes(then)
        rest, S = self.active.size // among, self.shape[1]
        found = []
        for begin in chosen:
            block = self.active.reshape(-1)[begin * rest : (begin + 1) * rest]
            prefix = (begin * rest + int(block.argmax())) // S
            low = max(begin * rest, prefix * S)
            rows = slice(low - prefix * S, min((begin + 1) * rest, (prefix + 1) * S) - prefix * S)
            values = np.where(self.active[prefix, rows], V[rows] @ D[prefix], -np.inf)
            found.append(self.policy(low + int(values.argmax())))
        return found

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
