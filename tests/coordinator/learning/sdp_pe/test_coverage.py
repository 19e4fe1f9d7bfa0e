from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Model, occupancy
from riffle.coordinator.learning.sdp_pe.coverage import design
from riffle.coordinator.learning.sdp_pe.enumeration import EnumeratedPolicies
from riffle.node_client.environments.tabular import riverswim
from tests.coordinator.learning.worlds import random_model


def _atoms(active: EnumeratedPolicies, model: Model) -> PolicyArray:
    H, X = model.r.shape[:2]
    policies = [active.best_visits(model.P, h, model).policy.reshape(-1, H, X) for h in range(H)]
    return np.unique(np.concatenate(policies), axis=0)


def _every_visit(active: EnumeratedPolicies, model: Model) -> FloatArray:
    total = active.shape[0] * active.shape[1]
    policies = np.stack([active.policy(i) for i in range(total)])
    kept = np.stack([policy for policy in policies if active.contains(policy)])
    return occupancy(model.P, active.d1, kept)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("radius", [9.0, 0.2])
def test_the_certificate_holds_over_every_active_policy(seed: int, radius: float) -> None:
    sizes = Sizes(2, 2, 3)
    model, d1 = random_model(sizes, seed, mass=0.9)
    active, _ = EnumeratedPolicies.all_policies(sizes, d1).eliminate(model, radius)
    pi_ref = design(active, model.P, _atoms(active, model), floor=1e-9, tolerance=0.02)
    d = _every_visit(active, model)
    reached = d.max(axis=0) > 0
    g = (d[:, reached] / pi_ref.visits[reached]).sum(axis=1).max()
    assert np.array_equal(pi_ref.reached, reached)
    assert pi_ref.gap <= 0.02
    assert g / reached.sum() - 1 == pytest.approx(pi_ref.gap, abs=1e-9)
    assert pi_ref.probabilities.sum() == pytest.approx(1)
    assert all(active.contains(policy) for policy in pi_ref.policies)


def test_the_objective_is_within_its_bound_of_a_general_solver() -> None:
    sizes = Sizes(2, 2, 2)
    model, d1 = random_model(sizes, 3)
    active = EnumeratedPolicies.all_policies(sizes, d1)
    d = _every_visit(active, model).reshape(active.size, -1)

    def loss(z: FloatArray) -> float:
        w = np.exp(z - z.max())
        return -float(np.log(w / w.sum() @ d).sum())

    solved = minimize(loss, np.zeros(active.size), method="BFGS", options={"maxiter": 500})
    pi_ref = design(active, model.P, _atoms(active, model), floor=1e-9, tolerance=0.01)
    ours = float(np.log(pi_ref.visits).sum())
    assert ours >= -solved.fun - pi_ref.visits.size * 0.01
    assert ours <= -solved.fun + 1e-3


def test_unreachable_tuples_are_left_out() -> None:
    mdp = riverswim(4, 6)
    model = Model(mdp.P, mdp.r)
    active = EnumeratedPolicies.all_policies(mdp.sizes, mdp.d1)
    pi_ref = design(active, mdp.P, _atoms(active, model), floor=1e-9)
    possible = np.arange(4)[None, :] <= np.arange(6)[:, None]
    assert np.array_equal(pi_ref.reached.all(axis=-1), possible)
    assert (pi_ref.visits[~pi_ref.reached] == 0).all()
    assert pi_ref.gap <= 0.05


def test_a_floor_above_everything_still_gives_a_design() -> None:
    sizes = Sizes(4, 2, 2)
    model, d1 = random_model(sizes, 5)
    active = EnumeratedPolicies.all_policies(sizes, d1)
    assert design(active, model.P, _atoms(active, model), floor=2.0).reached.all()
