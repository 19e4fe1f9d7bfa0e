"""The active set phi of paper 000: its interface, and its implicit representation.

`enumeration` lists every policy. If there are too many policies for a list, `ImplicitPolicies`
keeps the inequalities that active policies satisfy. docs/active-sets.md says what is then exact.

Stage b of Algorithm 1 (line 9) keeps pi if V_b(pi) > t_b. V_b is the value in that stage's
estimated model (P_b, r_b), and t_b is the maximum of V_b over phi_{b-1}, minus the radius. After
stage B, the active set is

    phi_B = { deterministic pi : V_b(pi) > t_b for b = 1..B }.

An implicit set finds its parts as follows:

- **t_b** is bracketed, least_b <= t_b <= sure_b. least_b comes from a policy that is surely in
  phi_{b-1}: V_b'(pi) >= sure_b' for all earlier b'. sure_b comes from `bound`. Membership uses
  least_b, so a policy that enumeration would keep is never eliminated.
- **actions** holds the decisions (h, x, a) that remain. A decision is removed if, for some b, even
  the best policy that takes a at (h, x) stays below least_b.
- **best and best_visits** return members that `lagrangian` finds.
- **bound** is the value of a linear program over one occupancy measure d of the given model, which
  has the transitions P. The program keeps only the newest constraint, V_B(pi) >= least_B. It
  replaces V_B(pi) by an upper bound that is linear in d. The lowest and the highest V_{B,h+1} are
  taken over all policies of remaining decisions:

      V_B(pi) = sum_h d_h . (r_B + (P_B - P) V_{B,h+1}^pi) <= sum_h d_h . (r_B + c),
      c_h(x, a) = max of (P_B - P)_h(x, a) . v  over  lowest V_{B,h+1} <= v <= highest V_{B,h+1}.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import numpy as np

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.learner import BoolArray, FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Model, Plan, value
from riffle.coordinator.learning.sdp_pe import enumeration
from riffle.coordinator.learning.sdp_pe.lagrangian import Constraints, maximise

ROUNDING = 1e-12
"""Relative tolerance for comparing values, so that rounding eliminates no policy."""
DEVIATIONS = 4
"""Rounds of single deviations (`lagrangian`) in `best_visits`. `best` has 10 * DEVIATIONS."""
TIE = 1e-9
"""Weight of the newest model's value when `best_visits` breaks ties between equal visits."""

Representation = Literal["auto", "enumerated", "implicit"]


class ActiveSet(Protocol):
    """A set of deterministic policies, never empty.

    The set is immutable: `eliminate` returns a new set. Every policy that a method returns is a
    member. In an enumerated set, `best` and `best_visits` are exact, and `bound` is `best`'s value.
    """

    @property
    def d1(self) -> FloatArray:
        """The start distribution (X,)."""

    @property
    def size(self) -> int | None:
        """The number of active policies, or None if it is not known."""

    @property
    def actions(self) -> BoolArray:
        """A mask (H, X, A) of actions. False means that no active policy takes a at (h, x)."""

    def best(self, model: Model) -> Plan:
        """Returns an active policy that has a large value under `model`, and this value."""

    def bound(self, model: Model) -> float:
        """Returns an upper bound of every member's value under a model."""

    def best_visits(self, P: FloatArray, h: int, then: Model) -> Plan:
        """Returns for every (x, a) an active policy that often visits (h, x, a) under P.

        The policies are (X, A, H, X). After step h, they take good actions under `then`. `value`
        (X, A) is the probability of the visit.
        """

    def eliminate(self, model: Model, radius: float) -> tuple[Self, float]:
        """Drops members with a value `radius` or more below the best (000, Algorithm 1, line 9).

        Returns the remaining set and the best value.
        """

    def contains(self, policy: PolicyArray) -> bool:
        """Returns whether a policy (H, X) is active."""


def all_policies(sizes: Sizes, d1: FloatArray, representation: Representation) -> ActiveSet:
    """Returns all deterministic policies in the given representation.

    `auto` means `enumerated` for up to `enumeration.LIMIT` policy classes, otherwise `implicit`.
    Raises EnumerationTooLarge if `enumerated` is requested and there are too many policies.
    """
    too_many = representation == "auto" and enumeration.classes(sizes, d1) > enumeration.LIMIT
    if representation == "implicit" or too_many:
        return ImplicitPolicies.all_policies(sizes, d1)
    return enumeration.EnumeratedPolicies.all_policies(sizes, d1)


@dataclass(frozen=True, slots=True)
class Inequality:
    """A stage's constraint: active policies have a value of at least `least` in `model`.

    A policy with a value of at least `sure` surely exceeds the stage's exact threshold.
    """

    model: Model
    least: float
    sure: float


@dataclass(frozen=True, slots=True)
class ImplicitPolicies:
    """An active set as inequalities; `anchor` (H, X) is a member."""

    d1: FloatArray
    actions: BoolArray
    anchor: PolicyArray
    inequalities: tuple[Inequality, ...] = ()

    @classmethod
    def all_policies(cls, sizes: Sizes, d1: FloatArray) -> ImplicitPolicies:
        """Returns all deterministic policies."""
        actions = np.ones((sizes.H, sizes.X, sizes.A), dtype=np.bool_)
        return cls(d1, actions, np.zeros((sizes.H, sizes.X), dtype=np.int64))

    @property
    def size(self) -> None:
        """Returns None: policies that satisfy inequalities cannot be counted."""
        return

    def contains(self, policy: PolicyArray) -> bool:
        """Returns whether a policy (H, X) is active."""
        return all(float(value(*i.model, self.d1, policy)) >= i.least for i in self.inequalities)

    def best(self, model: Model) -> Plan:
        """Returns an active policy that has a large value under `model`, and this value."""
        return self._best(model, [i.least for i in self.inequalities])

    def bound(self, model: Model) -> float:
        """Returns an upper bound on the values of all active policies under a model."""
        if not self.inequalities:
            return float(self._best(model, []).value)
        newest = self.inequalities[-1]
        carried = Model(model.P, newest.model.r + _carry(newest.model, model.P, self.actions))
        constraint = Constraints.of([carried], [newest.least], self.actions, self.d1)
        solution = maximise(model.P, model.r[None], constraint, self.anchor, deviations=0)
        return float(solution.dual[0])

    def best_visits(self, P: FloatArray, h: int, then: Model) -> Plan:
        """Returns for every (x, a) an active policy that visits (h, x, a) often under P.

        The policies are (X, A, H, X). After step h, their actions are good under the newest model
        or, before any elimination, under `then`. `value` (X, A) is the probability of the visit.
        """
        H, X, A, _ = P.shape
        solution = maximise(
            P,
            enumeration.visit_rewards(P, h).reshape(X * A, H, X, A),
            self._constraints([i.least for i in self.inequalities], then),
            self.anchor,
            deviations=DEVIATIONS,
            tie=TIE,
            starts=[
                _best_taking(s.model, self.actions, self.d1, h).policy
                for s in self.inequalities[-2:]
            ],
        )
        return Plan(solution.policy.reshape(X, A, H, X), solution.value.reshape(X, A))

    def eliminate(self, model: Model, radius: float) -> tuple[ImplicitPolicies, float]:
        """Drops policies surely `radius` or more below the best value (000, Algorithm 1, line 9).

        Returns the remaining set and the best value. If no policy is known to be active, drops
        nothing.
        """
        sure = self.bound(model) - radius
        member = self._best(model, [i.sure for i in self.inequalities])
        best = float(member.value)
        if best == -np.inf:
            return self._add(Inequality(model, -np.inf, sure)), float(self.best(model).value)
        least = best - radius - ROUNDING * (1 + abs(best))
        return replace(self, anchor=member.policy)._add(Inequality(model, least, sure)), best

    def _add(self, inequality: Inequality) -> ImplicitPolicies:
        """Returns the set with one more inequality. Removes actions that no member then takes."""
        inequalities, actions = (*self.inequalities, inequality), self.actions
        for s in reversed(inequalities):
            values = [_best_taking(s.model, actions, self.d1, h).value for h in range(len(actions))]
            actions = actions & (np.stack(values).reshape(actions.shape) >= s.least)
        return replace(self, inequalities=inequalities, actions=actions)

    def _best(self, model: Model, least: list[float]) -> Plan:
        constraints, r = self._constraints(least, model), model.r[None]
        solution = maximise(model.P, r, constraints, self.anchor, deviations=10 * DEVIATIONS)
        return Plan(solution.policy[0], np.asarray(solution.value[0]))

    def _constraints(self, least: list[float], then: Model) -> Constraints:
        """Returns the constraints of all stages. Without stages, returns one that always holds."""
        models = [i.model for i in self.inequalities] or [then]
        return Constraints.of(models, least or [-np.inf], self.actions, self.d1)


def _best_taking(model: Model, actions: BoolArray, d1: FloatArray, h: int) -> Plan:
    """Returns for every (x, a) the best policy, within `actions`, that takes a at (h, x).

    The plan has policies (X A, H, X) and values (X A,), both in the order of (x, a).
    """
    _, X, A = model.r.shape
    V, Q = _optimal(model, actions)
    x, a = np.repeat(np.arange(X), A), np.tile(np.arange(A), X)
    policy = np.repeat(np.where(actions, Q, -np.inf).argmax(axis=-1)[None], X * A, axis=0)
    policy[np.arange(X * A), h, x] = a
    V_h = np.repeat(V[h][None], X * A, axis=0)
    V_h[np.arange(X * A), x] = Q[h].ravel()
    for i in reversed(range(h)):
        Q_i = model.r[i] + (V_h @ model.P[i].reshape(X * A, X).T).reshape(-1, X, A)
        Q_i = np.where(actions[i], Q_i, -np.inf)
        policy[:, i], V_h = Q_i.argmax(axis=-1), Q_i.max(axis=-1)
    return Plan(policy, V_h @ d1)


def _optimal(model: Model, actions: BoolArray, sign: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """Returns V (H + 1, X) and Q of the best (`sign` 1) or worst (-1) policy within `actions`."""
    H, X, _ = model.r.shape
    V, Q = np.zeros((H + 1, X)), np.empty(model.r.shape)
    for h in reversed(range(H)):
        Q[h] = model.r[h] + model.P[h] @ V[h + 1]
        V[h] = sign * np.where(actions[h], sign * Q[h], -np.inf).max(axis=-1)
    return V, Q


def _carry(model: Model, P: FloatArray, actions: BoolArray) -> FloatArray:
    """Returns (H, X, A): the largest (`model.P` - `P`)_h(x, a) . V_{h+1} over possible V_{h+1}."""
    high, low = _optimal(model, actions)[0][1:], _optimal(model, actions, -1.0)[0][1:]
    up, down = np.maximum(model.P - P, 0.0), np.maximum(P - model.P, 0.0)
    return np.asarray(np.einsum("hxay,hy->hxa", up, high) - np.einsum("hxay,hy->hxa", down, low))
