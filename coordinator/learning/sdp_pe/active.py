"""The active set phi of 000 kept implicitly, for policies too many to enumerate.

Stage b of Algorithm 1 (line 9) keeps pi when V_b(pi) > t_b, with V_b the value in that stage's
estimated model (P_b, r_b) and t_b = max over phi_{b-1} of V_b, minus the radius. So

    phi_B = { deterministic pi : V_b(pi) > t_b for b = 1..B },

and membership of a given policy is B evaluations, exact. In occupancy measures each inequality is
linear, but each in the polytope of its own P_b: one linear program over one occupancy measure holds
one stage's constraint exactly, and no more (see `lagrangian`). What is exact here and what is not:

- **t_b** is bracketed, least_b <= t_b <= sure_b. least_b comes from a policy that is surely in
  phi_{b-1}: V_b'(pi) >= sure_b' for all earlier b'. sure_b comes from `bound`. Membership uses
  least_b, so by induction { V_b >= sure_b } within phi within { V_b >= least_b }: no policy is
  eliminated that enumeration would keep. Where the two agree in every stage (`exact`), as they do
  whenever the newest model's best policy satisfies the earlier constraints, the set is phi itself.
- **actions** holds the decisions (h, x, a) that are left: one is struck out when, for one b, even
  the best policy that takes a at (h, x) stays below least_b; exact for each constraint by itself.
  They form a product set, the same in every model, within which all planning takes place.
- **best and best_visits** return members, found by `lagrangian`; how good, `bound` says.
- **bound** is the value of a linear program over one occupancy measure of the model asked about,
  a superset of phi: the newest constraint V_B(pi) >= least_B is carried over by

      V_B(pi) = sum_h d_h . (r_B + (P_B - P) V_{B,h+1}^pi) <= sum_h d_h . (r_B + c),
      c_h(x, a) = max of (P_B - P)_h(x, a) . v  over  lowest V_{B,h+1} <= v <= highest V_{B,h+1},

  exact when P = P_B (then c = 0), and looser the more the two models differ.

What SDP-PE asks of its active set phi (Algorithm 1 of 000), however the set is kept.

`enumeration` lists every policy; `implicit` keeps the inequalities that active policies satisfy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import numpy as np

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.planning import BoolArray, Plan, value
from riffle.coordinator.learning.sdp_pe.enumeration import LIMIT, ActivePolicies, Model, classes
from riffle.coordinator.learning.sdp_pe.lagrangian import Constraints, maximise

ROUNDING = 1e-12
"""Values are compared with this much room, relative, so that rounding eliminates nobody."""
DEVIATIONS = 4
"""Rounds of single deviations for each of many objectives; one objective alone gets ten times."""
TIE = 1e-9
"""Visits that a policy after visits gives up for a unit of value in the newest model."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's constraint: V in `model` is at least `least`; at `sure` it is so in phi too."""

    model: Model
    least: float
    sure: float


@dataclass(frozen=True, slots=True)
class ImplicitPolicies:
    """An active set as inequalities; `anchor` (H, X) is a member."""

    d1: FloatArray
    actions: BoolArray
    anchor: PolicyArray
    stages: tuple[Stage, ...] = ()

    @classmethod
    def everything(cls, sizes: Sizes, d1: FloatArray) -> ImplicitPolicies:
        """All deterministic policies."""
        actions = np.ones((sizes.H, sizes.X, sizes.A), dtype=np.bool_)
        return cls(d1, actions, np.zeros((sizes.H, sizes.X), dtype=np.int64))

    @property
    def size(self) -> None:
        """Nobody can count the policies that satisfy several models' inequalities."""
        return

    @property
    def exact(self) -> bool:
        """Whether the set is phi itself, not a superset (up to rounding)."""
        return all(stage.sure - stage.least <= 2 * _room(stage.sure) for stage in self.stages)

    def contains(self, policy: PolicyArray) -> bool:
        """Whether a policy (H, X) is active."""
        return all(self._value(s.model, policy) >= s.least for s in self.stages)

    def best(self, model: Model) -> Plan:
        """A member of large value under a model, and that value."""
        return self._best(model, [stage.least for stage in self.stages])

    def bound(self, model: Model) -> float:
        """Upper bound of every member's value under a model."""
        if not self.stages:
            return float(self._best(model, []).value)
        newest = self.stages[-1]
        carried = Model(model.P, newest.model.r + _carry(newest.model, model.P, self.actions))
        one = Constraints.of([carried], [newest.least], self.actions, self.d1)
        found = maximise(model.P, model.r[None], one, self.anchor, deviations=0)
        return float(found.dual[0])

    def best_visits(self, P: FloatArray, h: int, then: Model) -> Plan:
        """For every (x, a) a member that visits (h, x, a) often under P: (X, A, H, X).

        What a policy does after step h does not matter for that: it does what is best in the newest
        model, or under `then` when nothing has been eliminated. `value` (X, A) is the visitation.
        """
        H, X, A, _ = P.shape
        wanted = np.zeros((X, A, H, X, A))
        x, a = np.meshgrid(np.arange(X), np.arange(A), indexing="ij")
        wanted[x, a, h, x, a] = 1.0
        found = maximise(
            P,
            wanted.reshape(X * A, H, X, A),
            self._constraints([stage.least for stage in self.stages], then),
            self.anchor,
            deviations=DEVIATIONS,
            tie=TIE,
            starts=[_forced(s.model, self.actions, self.d1, h).policy for s in self.stages[-2:]],
        )
        return Plan(found.policy.reshape(X, A, H, X), found.value.reshape(X, A))

    def eliminate(self, model: Model, radius: float) -> tuple[ImplicitPolicies, float]:
        """Keep what may be within `radius` of the best (Algorithm 1, line 9), and its value.

        When no policy is known that is surely in phi, the stage eliminates nothing.
        """
        sure = self.bound(model) - radius
        found = self._best(model, [stage.sure for stage in self.stages])
        best = float(found.value)
        if best == -np.inf:
            return self._after(Stage(model, -np.inf, sure)), float(self.best(model).value)
        least = best - radius - _room(best)
        return replace(self, anchor=found.policy)._after(Stage(model, least, sure)), best

    def _after(self, stage: Stage) -> ImplicitPolicies:
        """The set with one more stage, and the decisions that are then left."""
        stages, left = (*self.stages, stage), self.actions
        for each in reversed(stages):
            forced = [_forced(each.model, left, self.d1, h).value for h in range(len(left))]
            left = left & (np.stack(forced).reshape(left.shape) >= each.least)
        return replace(self, stages=stages, actions=left)

    def _best(self, model: Model, least: list[float]) -> Plan:
        constraints = self._constraints(least, model)
        r = model.r[None]
        found = maximise(model.P, r, constraints, self.anchor, deviations=10 * DEVIATIONS)
        return Plan(found.policy[0], np.asarray(found.value[0]))

    def _constraints(self, least: list[float], then: Model) -> Constraints:
        """The stages' constraints; without any, one that holds for all and breaks ties."""
        models = [stage.model for stage in self.stages] or [then]
        return Constraints.of(models, least or [-np.inf], self.actions, self.d1)

    def _value(self, model: Model, policy: PolicyArray) -> float:
        return float(value(model.P, model.r, self.d1, policy))


def _room(scale: float) -> float:
    return ROUNDING * (1 + abs(scale))


def _forced(model: Model, actions: BoolArray, d1: FloatArray, h: int) -> Plan:
    """For every (x, a) the best policy, within `actions`, that takes a at (h, x).

    Policies (X A, H, X) and values (X A,) in the order of (x, a).
    """
    _, X, A = model.r.shape
    V, Q = _optimal(model, actions)
    x, a = np.repeat(np.arange(X), A), np.tile(np.arange(A), X)
    policy = np.repeat(_within(Q, actions).argmax(axis=-1)[None], X * A, axis=0)
    policy[np.arange(X * A), h, x] = a
    forced = np.repeat(V[h][None], X * A, axis=0)
    forced[np.arange(X * A), x] = Q[h].ravel()
    for i in reversed(range(h)):
        rows = model.r[i] + (forced @ model.P[i].reshape(X * A, X).T).reshape(-1, X, A)
        policy[:, i] = _within(rows, actions[i]).argmax(axis=-1)
        forced = _within(rows, actions[i]).max(axis=-1)
    return Plan(policy, forced @ d1)


def _optimal(model: Model, actions: BoolArray, sign: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """Highest (or, with sign -1, lowest) V (H + 1, X) within `actions`, and its Q (H, X, A)."""
    H, X, _ = model.r.shape
    V, Q = np.zeros((H + 1, X)), np.empty(model.r.shape)
    for h in reversed(range(H)):
        Q[h] = model.r[h] + model.P[h] @ V[h + 1]
        V[h] = sign * _within(sign * Q[h], actions[h]).max(axis=-1)
    return V, Q


def _within(Q: FloatArray, actions: BoolArray) -> FloatArray:
    """Q where an action is allowed, minus infinity elsewhere."""
    return np.where(actions, Q, -np.inf)


def _carry(model: Model, P: FloatArray, actions: BoolArray) -> FloatArray:
    """c (H, X, A) of the module's docstring, for a constraint in `model` planned under P."""
    high, low = _optimal(model, actions)[0][1:], _optimal(model, actions, -1.0)[0][1:]
    change = model.P - P
    up, down = np.maximum(change, 0.0), np.maximum(-change, 0.0)
    c: FloatArray = np.einsum("hxay,hy->hxa", up, high) - np.einsum("hxay,hy->hxa", down, low)
    return c


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
