"""The exploration mixture of Eq. 4 of paper 000, as an optimal design.

Let d_pi be the probabilities that a mixture pi of active policies visits (h, x, a) under the crude
model (000, Algorithm 2). Let Z be the tuples (h, x, a) that some active policy reaches. Eq. 4 is,
with the supremum over active policies mu,

    minimise over pi   sup_mu g_pi(mu),    g_pi(mu) = sum_{Z} d_mu(h, x, a) / d_pi(h, x, a).

By the equivalence theorem of Kiefer and Wolfowitz, the optimal value is |Z|. The optimal pi also
maximises the concave sum_{Z} log d_pi(h, x, a). `design` keeps a set of policies (atoms), and
alternates two steps. The first step updates the atoms' weights by w_i <- w_i g_pi(i) / |Z|. The
second step adds the best active policy for the reward 1 / d_pi. `design` stops when it has the
certificate

    sup_mu g_pi(mu) <= |Z| (1 + tolerance).

If the active set is kept as inequalities, the second step may miss the best policy. The certificate
then uses an upper bound of the supremum (`ActiveSet.bound`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riffle.coordinator.learning.learner import BoolArray, FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Model, occupancy
from riffle.coordinator.learning.sdp_pe.active import ActiveSet

TOLERANCE = 0.05
MOST_ITERATIONS = 100
INNER_ITERATIONS = 2000
NEGLIGIBLE = 1e-4
MOST_ATOMS = 512


@dataclass(frozen=True, slots=True)
class Design:
    """The mixture: policies (M, H, X) with probabilities (M,), and its certificate.

    `visits` (H, X, A) are the mixture's probabilities of visits under the model. `reached` (H, X,
    A) marks the tuples in Z (see the module). The mixture's value in Eq. 4 is at most (1 + `gap`)
    times the optimal value. `iterations` says how often `design` searched for a policy to add.
    """

    policies: PolicyArray
    probabilities: FloatArray
    visits: FloatArray
    reached: BoolArray
    gap: float
    iterations: int


def design(
    active: ActiveSet,
    P: FloatArray,
    atoms: PolicyArray,
    *,
    floor: float,
    tolerance: float = TOLERANCE,
) -> Design:
    """Solves Eq. 4 of paper 000 over `active` under P (H, X, A, X).

    The search starts from the policies `atoms` (M, H, X). For every (h, x, a), `atoms` must hold an
    active policy that visits (h, x, a) most. Eq. 4 then leaves out each (h, x, a) that every atom
    visits with a probability below `floor`. If that leaves none, all that some atom visits remain.
    """
    d = occupancy(P, active.d1, atoms)
    best = d.max(axis=0)
    reached = best >= floor if (best >= floor).any() else best > 0
    if len(atoms) > MOST_ATOMS:
        atoms, d = _cover(active, P, atoms, d, np.where(reached, best, 0.0))
    w = np.full(len(atoms), 1.0 / len(atoms))
    for iterations in range(1, MOST_ITERATIONS + 1):
        w = _weights(d[:, reached], w, tolerance / 2)
        atoms, d, w = atoms[w > NEGLIGIBLE], d[w > NEGLIGIBLE], w[w > NEGLIGIBLE]
        w = w / w.sum()
        visits = np.tensordot(w, d, 1)
        mu = active.best(_steepest(P, visits, reached))
        if _gap(mu.value, reached) <= tolerance or iterations == MOST_ITERATIONS:
            break
        atoms = np.concatenate([atoms, mu.policy[None]])
        d = np.concatenate([d, occupancy(P, active.d1, mu.policy)[None]])
        w = np.append(w * (1 - 1 / len(atoms)), 1 / len(atoms))
    return Design(atoms, w, visits, reached, largest_gap(active, P, visits, reached), iterations)


def largest_gap(active: ActiveSet, P: FloatArray, visits: FloatArray, reached: BoolArray) -> float:
    """Returns the `Design.gap` of a mixture with these `visits`. Only `reached` tuples count."""
    return _gap(active.bound(_steepest(P, visits, reached)), reached)


def _steepest(P: FloatArray, visits: FloatArray, reached: BoolArray) -> Model:
    """Returns the model in which policies mu have the values g_pi(mu) of the module's docstring."""
    return Model(P, np.divide(1.0, visits, out=np.zeros_like(visits), where=reached))


def _gap(g: FloatArray | float, reached: BoolArray) -> float:
    """Returns g / |Z| - 1 for Z marked by `reached`. The optimal g is |Z| (000, Eq. 4)."""
    return float(g) / int(reached.sum()) - 1.0


def _cover(
    active: ActiveSet, P: FloatArray, atoms: PolicyArray, d: FloatArray, best: FloatArray
) -> tuple[PolicyArray, FloatArray]:
    """Returns a few policies and their probabilities d of visits.

    At each (h, x, a), some returned policy has d >= `best` / 10. `active.best` finds the policies.
    If a new policy adds no such (h, x, a), `atoms` cover the rest.
    """
    policies, visits, uncovered = atoms[:0], d[:0], best > 0
    while uncovered.any():
        reward = np.divide(1.0, best, out=np.zeros_like(best), where=uncovered)
        mu = active.best(Model(P, reward)).policy
        d_mu = occupancy(P, active.d1, mu)
        covered = uncovered & (d_mu >= best / 10)
        if not covered.any():
            most = np.unique(d[:, uncovered].argmax(axis=0))
            return np.concatenate([policies, atoms[most]]), np.concatenate([visits, d[most]])
        policies = np.concatenate([policies, mu[None]])
        visits = np.concatenate([visits, d_mu[None]])
        uncovered &= ~covered
    return policies, visits


def _weights(d: FloatArray, w: FloatArray, tolerance: float) -> FloatArray:
    """Updates the weights `w` (M,) of M policies, whose visits are `d` (M, |Z|).

    Stops if g_pi / |Z| <= 1 + `tolerance` for all these policies (see the module).
    """
    for _ in range(INNER_ITERATIONS):
        g = d @ (1.0 / (w @ d)) / d.shape[1]
        w = w * g
        w /= w.sum()
        if g.max() <= 1 + tolerance:
            break
    return w
