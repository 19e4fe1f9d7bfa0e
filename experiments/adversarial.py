"""Runs the two algorithms of paper 004 against oblivious adversaries.

The adversary fixes all losses l_1..l_K in [0, 1] before the first episode. UC-O-REPS has full
information: after an episode, it receives private sums of all losses. UOB-LBPS has bandit feedback:
it receives the noisy losses of the episode's own steps. Regret is exact (Eq. 2.2): it is computed
from policies, not from played episodes.

Privacy is `none`, `central` (JDP) or `local` (LDP). The calibration `paper` has the noise that
paper 004 states, Lap(3H/epsilon) for each family. This noise does not give the stated epsilon
(docs/corrections.md); `guarantee` returns the true epsilon. The calibration `exact` gives 2/3 of
(epsilon, beta) to the counts and 1/3 to the losses, each with the least noise for its sensitivity.

Noise is seeded: this is a simulation of the mechanisms. Draws are keyed by (seed, purpose).
"""

from __future__ import annotations

import math
import time
from dataclasses import fields
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from riffle.common.mechanism.randomness import generator_for
from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    best_policy,
    state_action,
    uniform_policy,
)
from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.privatizers import (
    NO_NOISE,
    AdditiveNoise,
    BinaryMechanism,
    LocalPrivatizer,
    NoiseLevels,
    Sensitivity,
    noise_of_draw,
    paper_guarantee,
    tree_levels,
)
from riffle.experiments.adversaries import Case, adversary_losses, world
from riffle.experiments.regret import Constant, SeedResult
from riffle.node_client.environments.registry import FOLDER

if TYPE_CHECKING:
    from riffle.coordinator.learning.adversarial.uc_o_reps import Constants

CHECKPOINTS = 50
COUNT_SHARE = 2 / 3  # of (epsilon, beta), under `exact`


def run(case: Case) -> SeedResult:
    """Runs one algorithm for K episodes. If it learned, its regret is below `uniform_regret`."""
    started = time.perf_counter()
    here = world(case)
    layers, P, losses = here.layers, here.P, adversary_losses(case, here)
    at_random = np.broadcast_to(uniform_policy(layers), losses.shape)
    policies, constants = at_random, _recorded(case, layers)
    if case.name != "uniform":
        policies, constants = learn(case, layers, P, losses)
    seconds = time.perf_counter() - started
    episodes, regret = regret_curve(layers, P, policies, losses)
    _, uniform = regret_curve(layers, P, at_random, losses)
    return SeedResult(
        seed=case.seed,
        regret=float(regret[-1]),
        seconds=seconds,
        constants=constants,
        episodes=tuple(episodes.tolist()),
        cumulative=tuple(regret.tolist()),
        uniform_regret=float(uniform[-1]),
    )


def regret_curve(
    layers: Layers, P: FloatArray, policies: FloatArray, losses: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns C checkpoints and the exact regret at each. Policies and losses are (K, H, W, A).

    At checkpoint k, the best fixed policy is the one with the least loss on l_1 + ... + l_k.
    """
    K = len(policies)
    suffered = np.cumsum((state_action(P, policies) * losses).sum(axis=(1, 2, 3)))
    totals = np.cumsum(losses, axis=0)
    episodes = np.unique(np.linspace(1, K, min(K, CHECKPOINTS)).astype(np.int64))
    best = np.array([best_policy(layers, P, totals[k - 1])[1] for k in episodes])
    return episodes.astype(np.float64), suffered[episodes - 1] - best


def learn(
    case: Case, layers: Layers, P: FloatArray, losses: FloatArray
) -> tuple[FloatArray, dict[str, Constant]]:
    """Returns policies pi_1..pi_K (K, H, W, A) and every constant used."""
    # Imported here because these modules import numba if it is installed, which is slow.
    from riffle.coordinator.learning.adversarial import uc_o_reps, uob_lbps  # noqa: PLC0415

    constants = uc_o_reps.constants(layers, case.K, case.eta, full=case.full, scale=case.scale)
    channel = Channel(case, layers, constants.delta)
    estimate = uob_lbps.LossEstimate(case.estimator, channel.E_loss, channel.loss_noise.variance)
    learner = (
        uc_o_reps.PrivateUCOREPS(constants)
        if case.full
        else uob_lbps.PrivateUOBLBPS(constants, estimate)
    )
    policies, generator = np.empty(losses.shape), generator_for(case.seed, "episodes")
    policies[0] = learner.policy
    for k, loss in enumerate(losses[:-1]):
        visited = play(generator, P, policies[k])
        transitions, visits, E = channel.counts(visited)
        seen = loss if case.full else loss * visited.sum(axis=-1)
        policies[k + 1] = learner.observe(transitions, visits, channel.losses(seen), E).policy
    return policies, _constants(case, constants, channel)


def play(generator: np.random.Generator, P: FloatArray, policy: FloatArray) -> FloatArray:
    """Plays one episode under P. Returns an array like P: 1 at transitions made, 0 elsewhere."""
    visited, x = np.zeros(P.shape), 0
    for h, (u, w) in enumerate(generator.random((len(policy), 2)).tolist()):
        a = _choice(policy[h, x], u)
        y = _choice(P[h, x, a], w)
        visited[h, x, a, y] = 1.0
        x = y
    return visited


def _choice(probabilities: FloatArray, uniform: float) -> int:
    """Draws an index: the first at which the summed probabilities exceed ``uniform``."""
    *head, _ = accumulate(probabilities.tolist())
    return next((i for i, total in enumerate(head) if total > uniform), len(head))


def _recorded(case: Case, layers: Layers) -> dict[str, Constant]:
    """Returns the fields that a case's algorithm and environment use, except a file's folder."""
    unused = {"eta", "parameters", "own"} | ({"estimator"} if case.name != "uob-lbps" else set())
    names = [field.name for field in fields(case) if field.name not in unused]
    recorded = {name: getattr(case, name) for name in names}
    for name, value in case.parameters:
        if name != FOLDER:
            recorded[f"environment.{name}"] = str(value)
    return recorded | {"widths": "-".join(map(str, layers.widths)), "actions": layers.A}


def _constants(case: Case, constants: Constants, channel: Channel) -> dict[str, Constant]:
    return _recorded(case, constants.layers) | {
        "eta": constants.eta,
        "delta": constants.delta,
        "E_counts": channel.E(case.K - 1),
        "E_losses": 0.0 if case.full else channel.E_loss,
        "count_noise": f"{channel.count_noise.kind} {channel.count_noise.scale:.6g}",
        "loss_noise": f"{channel.loss_noise.kind} {channel.loss_noise.scale:.6g}",
        "epsilon_given": math.inf
        if case.privacy == "none"
        else guarantee(case.full, constants.layers, case.calibration, case.epsilon),
    }


def _noise(
    case: Case, sensitivity: Sensitivity, H: int, share: float, summed: bool
) -> AdditiveNoise:
    """Returns the noise for one release, or for each block of central running sums (`summed`)."""
    if case.privacy == "none":
        return NO_NOISE
    epsilon, beta = case.epsilon, case.beta
    if case.calibration == "exact":
        epsilon, beta = share * epsilon, share * beta
    depth = tree_levels(case.K - 1) if case.privacy == "central" and summed else 1
    return noise_of_draw(
        case.calibration, sensitivity=sensitivity, H=H, depth=depth, epsilon=epsilon, beta=beta
    )


def _sums(
    case: Case, size: int, noise: AdditiveNoise, draws: np.random.Generator, variant: bool
) -> BinaryMechanism | LocalPrivatizer:
    """Returns an object that keeps private running sums of K - 1 arrays of this size."""
    if case.privacy == "central":
        return BinaryMechanism(case.K - 1, (size,), noise, draws, variant=variant)
    return LocalPrivatizer((size,), noise, draws)


class Channel:
    """The Privatizer of a case. Noise is added to cells that exist, not to padding.

    One Privatizer sums the counts N(x,a) and N(x,a,x') of K - 1 episodes. With full information, a
    second one sums the losses. With bandit feedback, each episode's losses get their own noise.
    """

    def __init__(self, case: Case, layers: Layers, delta: float) -> None:
        self._layers, self._delta, self._K = layers, delta, case.K
        pairs, H = layers.pair_count, layers.H
        sensitivity = _loss_sensitivity(case.full, layers)
        self.count_noise = _noise(case, Sensitivity.of_cells(2 * H), H, COUNT_SHARE, True)
        self.loss_noise = _noise(case, sensitivity, H, 1 - COUNT_SHARE, case.full)
        size, draws = pairs + layers.cell_count, generator_for(case.seed, "counts-noise")
        self._counts = _sums(case, size, self.count_noise, draws, variant=False)
        draws = generator_for(case.seed, "losses-noise")
        self._privatize_losses = (
            _sums(case, pairs, self.loss_noise, draws, variant=True).add
            if case.full
            else LocalPrivatizer((pairs,), self.loss_noise, draws).privatize
        )
        self._t = 0
        self.E_loss = _deviation(self.loss_noise, 1, 2 * pairs * self._K / delta)

    def counts(self, visited: FloatArray) -> tuple[FloatArray, FloatArray, float]:
        """Adds an episode's visits. Returns noisy N(x,a,x'), noisy N(x,a), and a bound on noise.

        Their shapes are (H, W, A, W) and (H, W, A), for layers of at most W states.
        """
        layers, pairs = self._layers, self._layers.pair_count
        self._t += 1
        sigma = np.concatenate((visited.sum(axis=-1)[layers.pairs], visited[layers.cells]))
        released = self._counts.add(sigma)
        transitions, visits = np.zeros(layers.cells.shape), np.zeros(layers.pairs.shape)
        visits[layers.pairs], transitions[layers.cells] = released[:pairs], released[pairs:]
        return transitions, visits, self.E(self._t)

    def E(self, t: int) -> float:
        """Returns the bound E of Assumption 2.3 of paper 004 after t episodes.

        With probability 1 - 2 delta, the noise on all counts stays within E / 4 at every t.
        """
        counters = self._layers.pair_count + self._layers.cell_count
        ratio = counters * self._K / self._delta
        return 4 * _deviation(self.count_noise, self._counts.terms(t), ratio)

    def losses(self, loss: FloatArray) -> FloatArray:
        """Adds an episode; returns noisy sums L(x,a) or, with bandit feedback, the noisy losses."""
        array = np.zeros(self._layers.pairs.shape)
        array[self._layers.pairs] = self._privatize_losses(loss[self._layers.pairs])
        return array


def guarantee(full: bool, layers: Layers, calibration: NoiseLevels, epsilon: float) -> float:
    """Returns the epsilon that a calibration really gives if one user is replaced."""
    if calibration == "exact":
        return epsilon
    total = Sensitivity.of_cells(2 * layers.H) + _loss_sensitivity(full, layers)
    return paper_guarantee(total, layers.H, epsilon)


def _loss_sensitivity(full: bool, layers: Layers) -> Sensitivity:
    if full:
        return Sensitivity.of_losses(layers.pair_count)
    return Sensitivity.of_cells(layers.H)


@lru_cache(maxsize=1 << 16)
def _deviation(noise: AdditiveNoise, terms: int, ratio: float) -> float:
    return noise.deviation(terms, math.log(ratio))
