"""Runs the two algorithms of document 004 against oblivious adversaries: `run`.

The adversary fixes all losses l_1..l_K in [0, 1] before the first episode. After episode k the
learner receives private sums: of visits and transitions, and of all losses (UC-O-REPS, full
information) or the episode's noisy losses alone (UOB-LBPS, bandit feedback). Regret is exact
(Eq. 2.2): at every checkpoint k, sum_{i<=k} <q^{P,pi_i}, l_i> minus the least value of one fixed
policy on l_1 + ... + l_k, found by backward induction; no realised loss enters.

Privacy and its calibrations are those of `adversarial_privacy`. Draws are keyed by (seed, purpose):
"LayeredMDP-v0", "losses", "episodes", "counts-noise", "losses-noise".
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from riffle.common.mechanism.randomness import generator_for
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    best_policy,
    state_action,
    uniform_policy,
)
from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments.adversarial_privacy import (
    Calibration,
    Channel,
    Privacy,
    Protection,
    guarantee,
)
from riffle.node_client.environments.builtin import layered_mdp

if TYPE_CHECKING:
    from riffle.coordinator.learning.adversarial.uc_o_reps import Constants

Algorithm = Literal["uc-o-reps", "uob-lbps"]
Adversary = Literal["stochastic", "switching", "drifting"]
Constant = str | int | float | bool
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

WIDTHS = (1, 3, 3, 3, 1)
CHECKPOINTS = 50
PHASES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One run: algorithm, K episodes, guarantee, MDP and adversary; all recorded with the result.

    scale multiplies beta of Eq. 3.1 (1 is the document's); eta None is the theorem's.

    Raises:
        LocalError: ``invalid-spec``: a name is unknown or a number out of range.
    """

    name: Algorithm
    K: int
    epsilon: float
    beta: float
    privacy: Privacy
    calibration: Calibration
    seed: int
    adversary: Adversary = "switching"
    widths: tuple[int, ...] = WIDTHS
    actions: int = 2
    scale: float = 1.0
    eta: float | None = None

    def __post_init__(self) -> None:
        for value, allowed in (
            (self.name, Algorithm),
            (self.privacy, Privacy),
            (self.calibration, Calibration),
            (self.adversary, Adversary),
        ):
            if value not in get_args(allowed):
                known = ", ".join(get_args(allowed))
                raise LocalError("invalid-spec", f"{value!r} is unknown here; known: {known}")
        if self.K < 2 or self.epsilon <= 0 or not 0 < self.beta < 1:
            raise LocalError("invalid-spec", "need K >= 2, epsilon > 0 and 0 < beta < 1")


@dataclass(frozen=True, slots=True)
class AdversarialResult:
    """A finished run: checkpoints episodes (C,), regret (C,) there, seconds, every constant used.

    uniform_regret is the regret at K of choosing every action at random; a learner that is not
    below it learned nothing.
    """

    episodes: FloatArray
    regret: FloatArray
    uniform_regret: float
    seconds: float
    constants: dict[str, Constant]

    @property
    def total(self) -> float:
        """Regret after K episodes."""
        return float(self.regret[-1])


def run(case: Case) -> AdversarialResult:
    """Runs one algorithm for K episodes."""
    started = time.perf_counter()
    layers, P = world(case)
    losses = adversary_losses(case, layers)
    policies, constants = learn(case, layers, P, losses)
    seconds = time.perf_counter() - started
    episodes, regret = regret_curve(layers, P, policies, losses)
    at_random = np.broadcast_to(uniform_policy(layers), losses.shape)
    _, uniform = regret_curve(layers, P, at_random, losses)
    return AdversarialResult(episodes, regret, float(uniform[-1]), seconds, constants)


def world(case: Case) -> tuple[Layers, FloatArray]:
    """Returns the layers and the true P (H, W, A, W) of a case's seed."""
    layers = Layers(case.widths, case.actions)
    return layers, layered_mdp(case.widths, case.actions, case.seed).P * layers.cells


def adversary_losses(case: Case, layers: Layers) -> FloatArray:
    """Draws l_1..l_K (K, H, W, A) in [0, 1], Bernoulli with the adversary's means.

    stochastic: the means are fixed; switching: they are drawn anew in each of PHASES equal phases;
    drifting: they move from one draw to another in a straight line.
    """
    generator = generator_for(case.seed, "losses", case.adversary, case.K)
    shape = (case.K, *layers.pairs.shape)
    ones = generator.random(shape) < _means(case, shape, generator)
    return (ones & layers.pairs).astype(np.float64)


def _means(case: Case, shape: tuple[int, ...], generator: np.random.Generator) -> FloatArray:
    k = np.arange(case.K)
    if case.adversary == "drifting":
        first, last = generator.uniform(0, 1, (2, *shape[1:]))
        return np.asarray(first + (last - first) * (k / (case.K - 1))[:, None, None, None])
    phases = PHASES if case.adversary == "switching" else 1
    return generator.uniform(0, 1, (phases, *shape[1:]))[k * phases // case.K]


def regret_curve(
    layers: Layers, P: FloatArray, policies: FloatArray, losses: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns checkpoints and the exact regret there; policies and losses are (K, H, W, A)."""
    K = len(policies)
    suffered = np.cumsum((state_action(P, policies) * losses).sum(axis=(1, 2, 3)))
    totals = np.cumsum(losses, axis=0)
    episodes = np.unique(np.linspace(1, K, min(K, CHECKPOINTS)).astype(np.int64))
    best = np.array([best_policy(layers, P, totals[k - 1])[1] for k in episodes])
    return episodes.astype(np.float64), suffered[episodes - 1] - best


def learn(
    case: Case, layers: Layers, P: FloatArray, losses: FloatArray
) -> tuple[FloatArray, dict[str, Constant]]:
    """Returns policies pi_1..pi_K (K, H, W, A) and every constant that shaped them."""
    # Here, not above: these modules import numba where it is installed, which takes long.
    from riffle.coordinator.learning.adversarial import uc_o_reps, uob_lbps  # noqa: PLC0415

    full = case.name == "uc-o-reps"
    constants_of = uc_o_reps.constants if full else uob_lbps.constants
    constants = constants_of(layers, case.K, eta=case.eta, scale=case.scale)
    protection = Protection(case.privacy, case.calibration, case.epsilon, case.beta, case.K, full)
    draws = [generator_for(case.seed, purpose) for purpose in ("counts-noise", "losses-noise")]
    channel = Channel(protection, layers, constants.delta, *draws)
    uc, uob = uc_o_reps.PrivateUCOREPS(constants), uob_lbps.PrivateUOBLBPS(constants)

    def update(visited: FloatArray, loss: FloatArray) -> FloatArray:
        transitions, visits, E = channel.counts(visited)
        if full:
            return uc.observe(transitions, visits, channel.loss_sums(loss), E).policy
        noisy = channel.visited_losses(loss * visited.sum(axis=-1))
        return uob.observe(transitions, visits, noisy, E, channel.E_loss).policy

    policies, generator = np.empty(losses.shape), generator_for(case.seed, "episodes")
    policies[0] = uc.policy if full else uob.policy
    for k, loss in enumerate(losses[:-1]):
        policies[k + 1] = update(play(generator, P, policies[k]), loss)
    return policies, _constants(case, constants, channel)


def play(generator: np.random.Generator, P: FloatArray, policy: FloatArray) -> FloatArray:
    """Returns the transitions of one episode of P as zeros and ones (H, W, A, W).

    Draws two uniforms a step, for the action and for the next state.
    """
    visited, x = np.zeros(P.shape), 0
    for h, (u, w) in enumerate(generator.random((len(policy), 2)).tolist()):
        a = _choice(policy[h, x], u)
        y = _choice(P[h, x, a], w)
        visited[h, x, a, y] = 1.0
        x = y
    return visited


def _choice(probabilities: FloatArray, uniform: float) -> int:
    """Returns the first index whose running sum exceeds a uniform draw, or the last one."""
    *head, _ = accumulate(probabilities.tolist())
    return next((i for i, total in enumerate(head) if total > uniform), len(head))


def _constants(case: Case, constants: Constants, channel: Channel) -> dict[str, Constant]:
    layers, full = constants.layers, case.name == "uc-o-reps"
    recorded = {key: value for key, value in asdict(case).items() if key not in ("widths", "eta")}
    return recorded | {
        "widths": "-".join(map(str, case.widths)),
        "eta": constants.eta,
        "delta": constants.delta,
        "E_counts": channel.E(case.K - 1),
        "E_losses": 0.0 if full else channel.E_loss,
        "count_noise": f"{channel.count_noise.kind} {channel.count_noise.scale:.6g}",
        "loss_noise": f"{channel.loss_noise.kind} {channel.loss_noise.scale:.6g}",
        "epsilon_given": math.inf
        if case.privacy == "none"
        else guarantee(full, layers, case.calibration, case.epsilon),
    }
