"""Active sets as lists: the set phi of paper 000, as an array of bits, one for each policy class.

Two policies have the same value if they differ only at step 0, in states where no episode starts.
Such policies form a class.

The horizon is cut at a step m. A class is a pair (prefix, suffix) of the actions before m and the
actions from m on. Let D (prefixes, X) be the state distribution at m, and R (prefixes,) the
expected reward before m. Let V (suffixes, X) be the value from m on. One matrix product gives the
values of all classes,

    V^(prefix, suffix) = R[prefix] + D[prefix] . V[suffix],

and phi is a boolean matrix of that shape. Elimination empties whole rows and columns of phi, so
everything is computed on the rows and columns that are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.learner import BoolArray, FloatArray, LearnerError, PolicyArray
from riffle.coordinator.learning.planning import Model, Plan, plan

LIMIT = 2**24
TILE = 16  # a multiple of the rows and columns that BLAS kernels take at a time


class EnumerationTooLarge(LearnerError):  # noqa: N818 -- says what is the matter
    """Raised if there are too many deterministic policies to enumerate."""


def classes(sizes: Sizes, d1: FloatArray) -> int:
    """Returns the number of policy classes (see the module) if episodes start from d1."""
    return int(sizes.A ** _free_cells(sizes, d1))


class Block(NamedTuple):
    """Rows (prefixes of policies) and columns (suffixes) of the active set phi that are not empty.

    Indices in `prefixes` (p,) and `suffixes` (s,) ascend. `pairs` (p, s) marks active pairs.
    """

    prefixes: PolicyArray
    suffixes: PolicyArray
    pairs: BoolArray

    @classmethod
    def of(cls, active: BoolArray) -> Block:
        """Returns the rows and columns of `active` that have an active pair."""
        prefixes, suffixes = np.flatnonzero(active.any(axis=1)), np.flatnonzero(active.any(axis=0))
        return cls(prefixes, suffixes, active[prefixes].take(suffixes, axis=1))


@dataclass(frozen=True, slots=True)
class EnumeratedPolicies:
    """The active set phi, an immutable `ActiveSet`.

    `step_actions[h]` (choices, X) lists the action vectors of step h. A policy's prefix has its
    actions before step `cut`, and its suffix has the rest. `active` (prefixes, suffixes) is phi, or
    None while nothing has been eliminated.
    """

    d1: FloatArray
    step_actions: tuple[PolicyArray, ...]
    cut: int
    active: BoolArray | None = None
    _block: Block | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        block = None if self.active is None else Block.of(self.active)
        object.__setattr__(self, "_block", block)

    @classmethod
    def all_policies(cls, sizes: Sizes, d1: FloatArray, limit: int = LIMIT) -> EnumeratedPolicies:
        """Returns all deterministic policies. Raises EnumerationTooLarge if `classes` > `limit`."""
        if classes(sizes, d1) > limit:
            raise EnumerationTooLarge(
                f"X={sizes.X}, A={sizes.A}, H={sizes.H} has {sizes.A}^{_free_cells(sizes, d1)} "
                f"deterministic policies; exact enumeration holds at most {limit}. "
                "Use fewer states, actions or steps, or set active_set to implicit."
            )
        start = [_actions(sizes, d1 > 0)]
        later = [_actions(sizes, np.ones(sizes.X, dtype=np.bool_)) for _ in range(sizes.H - 1)]
        steps = tuple(start + later)
        return cls(d1, steps, _balanced_cut([len(step) for step in steps]))

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of prefixes (actions before step `cut`) and suffixes (the other actions)."""
        return math.prod(self._counts[: self.cut]), math.prod(self._counts[self.cut :])

    @property
    def size(self) -> int:
        """The number of active classes of policies (see the module)."""
        return math.prod(self.shape) if self.active is None else int(np.count_nonzero(self.active))

    def values(self, model: Model) -> FloatArray:
        """Returns the values of all policies, active or not, in shape (prefixes, suffixes)."""
        return self._values(model, *map(np.arange, self.shape))

    def best(self, model: Model) -> Plan:
        """Returns an active policy of largest value, and that value."""
        if self._block is None:
            return plan(model.P, model.r, self.d1)
        prefixes, suffixes, pairs = self._block
        values = self._values(model, prefixes, suffixes)
        np.copyto(values, -np.inf, where=~pairs)
        p, s = divmod(int(values.argmax()), len(suffixes))
        index = int(prefixes[p]) * self.shape[1] + int(suffixes[s])
        return Plan(self.policy(index), np.asarray(values[p, s]))

    def bound(self, model: Model) -> float:
        """Returns the largest value in the active set."""
        return float(self.best(model).value)

    def best_visits(self, P: FloatArray, h: int, then: Model) -> Plan:
        """Returns for every (x, a) the active policy that visits (h, x, a) most.

        The policies are (X, A, H, X). After step h, they aim at a large value under `then`. If no
        policy visits (h, x, a), the result is any active policy. `value` (X, A) is the probability
        of the visit.
        """
        if self._block is None:
            of_all = plan(P, visit_rewards(P, h), self.d1)
            of_all.policy[..., h + 1 :, :] = plan(then.P, then.r, self.d1).policy[h + 1 :]
            return of_all
        _, X, A, _ = P.shape
        before, choices = self._continuations(self._block, h)
        takes = (self.step_actions[h][..., None] == np.arange(A)).reshape(-1, X * A)
        able = choices @ takes.astype(np.float32) > 0
        visits = np.where(able, np.repeat(self._state_distribution(P, h, before), A, axis=1), 0.0)
        most, first = visits.max(axis=0), visits.argmax(axis=0)
        choice = np.array([(choices[b] * takes[:, i]).argmax() for i, b in enumerate(first)])
        some = divmod(int(choices.argmax()), choices.shape[1])
        b, k = np.where(most > 0, np.stack((first, choice)), np.array(some)[:, None])
        begins = before[b] * self._counts[h] + k
        policies = np.stack(self._complete(self._block, begins.tolist(), h, then))
        return Plan(policies.reshape(X, A, *self._policy_shape), most.reshape(X, A))

    def eliminate(self, model: Model, radius: float) -> tuple[EnumeratedPolicies, float]:
        """Drops policies with values `radius` or more below the largest (000, Algorithm 1, line 9).

        Returns the remaining set and the best value. The best policies stay even at radius 0.
        """
        if self._block is None:
            active, best = _close_to_best(self.values(model), radius)
            return replace(self, active=None if active.all() else active), best
        prefixes, suffixes, pairs = self._block
        values = self._values(model, prefixes, suffixes)
        close, best = _close_to_best(np.where(pairs, values, -np.inf), radius)
        active = np.zeros(self.shape, dtype=np.bool_)
        active[np.ix_(prefixes, suffixes)] = close
        return replace(self, active=active), best

    @property
    def actions(self) -> BoolArray:
        """The mask (H, X, A) of actions that some active policy takes."""
        A = self._actions_count
        taken = np.zeros((*self._policy_shape, A), dtype=np.bool_)
        for h, step in enumerate(self.step_actions):
            taken[h] = (step[self._choices(h)][..., None] == np.arange(A)).any(axis=0)
        return taken

    def contains(self, policy: PolicyArray) -> bool:
        """Returns whether a policy (H, X) is active, whatever it does where no episode starts."""
        return self.active is None or bool(self.active.flat[self.index(policy)])

    def policy(self, index: int) -> PolicyArray:
        """Returns class `index`'s policy (H, X). Where no episode starts, its first action is 0."""
        digits = np.unravel_index(index, self._counts)
        return np.stack([step[i] for step, i in zip(self.step_actions, digits, strict=True)])

    def index(self, policy: PolicyArray) -> int:
        """Returns the index of the class of a policy (H, X) in the flattened array `active`."""
        A, digits = self._actions_count, []
        for step, row in zip(self.step_actions, policy, strict=True):
            free = row[step.max(axis=0) > 0]
            digits.append(int(free @ A ** np.arange(len(free))[::-1]))
        return int(np.ravel_multi_index(digits, self._counts))

    @property
    def _actions_count(self) -> int:
        return 1 + max(int(step.max()) for step in self.step_actions)

    @property
    def _counts(self) -> list[int]:
        """The number of choices of every step."""
        return [len(step) for step in self.step_actions]

    @property
    def _policy_shape(self) -> tuple[int, int]:
        return len(self.step_actions), self.step_actions[0].shape[1]

    def _choices(self, h: int) -> PolicyArray:
        """Returns the choices of active policies at step h, as indices of `step_actions[h]`."""
        counts, block = self._counts, self._block
        if block is None:
            return np.arange(counts[h])
        part, end = (block.prefixes, self.cut) if h < self.cut else (block.suffixes, len(counts))
        return np.unique(part // math.prod(counts[h + 1 : end]) % counts[h])

    def _continuations(self, block: Block, h: int) -> tuple[PolicyArray, NDArray[np.float32]]:
        """Returns how active policies may act before step h, and what they may choose at step h.

        A way to act is one flat index of the choices at steps 0..h-1. Returns the ways (ways,) in
        ascending order, and a matrix (ways, choices). A 1 in the matrix says that some active
        policy acts in this way and then makes this choice.
        """
        counts, K = self._counts, self._counts[h]
        ends, end, pairs = block.suffixes, len(counts), block.pairs
        if h < self.cut:
            ends, end = block.prefixes, self.cut
            pairs = np.ones((1, len(block.prefixes)), np.bool_)
        begins = ends // math.prod(counts[h + 1 : end])
        starts = np.flatnonzero(np.diff(begins, prepend=-1))
        if len(starts) < len(begins):
            begins, pairs = begins[starts], np.logical_or.reduceat(pairs, starts, axis=1)
        before, at = _unique(begins // K)
        choices = np.zeros((len(pairs), len(before) * K), dtype=np.float32)
        whole = len(begins) == choices.shape[1]  # a slice is quicker than a list of all
        choices[:, slice(None) if whole else at * K + begins % K] = pairs
        if h >= self.cut:
            before = (block.prefixes[:, None] * math.prod(counts[self.cut : h]) + before).ravel()
        return before, choices.reshape(-1, K)

    def _state_distribution(self, P: FloatArray, h: int, begins: PolicyArray) -> FloatArray:
        """Returns state distributions (ways, X) at step h; `begins` are the ways to act before."""
        if h == 0:
            return self.d1[None]
        before, at = _unique(begins // self._counts[h - 1])
        rows, _ = _rows(Model(P, np.zeros(P.shape[:3])), h - 1, self.step_actions[h - 1])
        D = np.einsum("px,kxy->pky", self._state_distribution(P, h - 1, before), rows)
        return np.asarray(D[at, begins % self._counts[h - 1]])

    def _complete(
        self, block: Block, begins: Sequence[int], h: int, then: Model
    ) -> list[PolicyArray]:
        """For each index in `begins`, returns an active policy with these choices at steps 0..h.

        Before step `cut`, the policy follows the first active prefix with this beginning. From step
        `cut` on, it takes the active suffix that has the largest value under the model `then`.
        """
        (D, _), V = self._prefix_values(then), self._suffix_values(then)
        S, rest = self.shape[1], math.prod(self._counts[h + 1 :])
        policies = []
        for begin in begins:
            p = int(np.searchsorted(block.prefixes, begin * rest // S))
            prefix = int(block.prefixes[p])
            ends = (begin * rest - prefix * S, (begin + 1) * rest - prefix * S)
            low, high = np.searchsorted(block.suffixes, ends)
            suffixes = block.suffixes[low:high]
            values = np.where(block.pairs[p, low:high], V[suffixes] @ D[prefix], -np.inf)
            policies.append(self.policy(prefix * S + int(suffixes[values.argmax()])))
        return policies

    def _values(self, model: Model, prefixes: PolicyArray, suffixes: PolicyArray) -> FloatArray:
        """Returns the values (p, s) of the policies that join each prefix to each suffix."""
        D, R = self._prefix_values(model)
        P, S = len(prefixes), len(suffixes)
        # BLAS rounds differently at a block's edges. With whole tiles, a policy's value does not
        # depend on which other policies remain, so ties stay ties.
        D, V = D[_whole_tiles(prefixes)], self._suffix_values(model)[_whole_tiles(suffixes)]
        values: FloatArray = (D @ V.T)[:P, :S]
        values += R[prefixes, None]
        return values

    def _prefix_values(self, model: Model) -> tuple[FloatArray, FloatArray]:
        """Returns D (prefixes, X), state distributions at step `cut`, and R, the rewards before."""
        D, R = self.d1[None], np.zeros(1)
        for h in range(self.cut):
            rows, rewards = _rows(model, h, self.step_actions[h])
            R = (R[:, None] + D @ rewards.T).ravel()
            D = np.einsum("px,kxy->pky", D, rows).reshape(-1, D.shape[1])
        return D, R

    def _suffix_values(self, model: Model) -> FloatArray:
        """Returns V (suffixes, X), the expected reward from step `cut` on."""
        V = np.zeros((1, self._policy_shape[1]))
        for h in reversed(range(self.cut, len(self.step_actions))):
            rows, rewards = _rows(model, h, self.step_actions[h])
            V = rewards[:, None] + np.einsum("kxy,sy->ksx", rows, V)
            V = V.reshape(-1, V.shape[-1])
        return V


def visit_rewards(P: FloatArray, h: int) -> FloatArray:
    """Returns, for each (x, a), rewards that are 1 at (h, x, a) only: shape (X, A, H, X, A)."""
    H, X, A, _ = P.shape
    rewards = np.zeros((X, A, H, X, A))
    x, a = np.meshgrid(np.arange(X), np.arange(A), indexing="ij")
    rewards[x, a, h, x, a] = 1.0
    return rewards


def _close_to_best(values: FloatArray, radius: float) -> tuple[BoolArray, float]:
    """Marks the best value and all values above best - `radius`. Returns the mask and the best."""
    best = float(values.max())
    return (values > best - radius) | (values == best), best


def _free_cells(sizes: Sizes, d1: FloatArray) -> int:
    return int((d1 > 0).sum()) + sizes.X * (sizes.H - 1)


def _actions(sizes: Sizes, free: BoolArray) -> PolicyArray:
    """Returns a step's action vectors in lexicographic order, with 0 where `free` (X,) is false."""
    vectors = np.zeros((sizes.A ** int(free.sum()), sizes.X), dtype=np.int64)
    places = sizes.A ** np.arange(int(free.sum()))[::-1]
    vectors[:, free] = np.arange(len(vectors))[:, None] // places % sizes.A
    return vectors


def _rows(model: Model, h: int, actions: PolicyArray) -> tuple[FloatArray, FloatArray]:
    """Returns P (choices, X, X) and r (choices, X) of step h under each action vector."""
    x = np.arange(actions.shape[1])
    return model.P[h][x, actions], model.r[h][x, actions]


def _whole_tiles(array: PolicyArray) -> PolicyArray:
    return np.resize(array, -(-len(array) // TILE) * TILE)


def _unique(ascending: PolicyArray) -> tuple[PolicyArray, PolicyArray]:
    """Returns the distinct values of an ascending array, and each element's index among them."""
    first = np.diff(ascending, prepend=-1) > 0
    return ascending[first], np.cumsum(first) - 1


def _balanced_cut(counts: Sequence[int]) -> int:
    """Returns the cut m that has the smallest total number of prefixes and suffixes."""
    sums = [math.prod(counts[:m]) + math.prod(counts[m:]) for m in range(len(counts) + 1)]
    return int(np.argmin(sums))
