"""Cases of adversarial runs. A case sets algorithm, guarantee, layered MDP and losses.

The MDP is LayeredMDP-v0, drawn from each run's seed, or any environment with a known MDP. A known
MDP is unrolled in time: the same state at two steps becomes two states.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

import numpy as np

from riffle.common.mechanism.randomness import generator_for
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.learning.adversarial.layered import Layers, unroll
from riffle.coordinator.learning.learner import BoolArray, FloatArray
from riffle.coordinator.learning.privatizers import NoiseLevels
from riffle.node_client.environments.registry import Parameter, exact_mdp, make
from riffle.node_client.environments.tabular import layered_mdp

Algorithm = Literal["uc-o-reps", "uob-lbps", "uniform"]
Adversary = Literal["stochastic", "switching", "drifting", "rewards"]
Privacy = Literal["none", "central", "local"]
Estimator = Literal["paper", "correct"]
ALGORITHMS: tuple[Algorithm, ...] = ("uc-o-reps", "uob-lbps")
UNIFORM: Algorithm = "uniform"
LAYERED = "LayeredMDP-v0"

WIDTHS = (1, 3, 3, 3, 1)
PHASES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One run: algorithm, K episodes, guarantee, MDP and adversary. The result records all fields.

    The algorithm `uniform` plays actions at random. `scale` multiplies the width of the confidence
    set (004, Eq. 3.1). If `eta` is None, eta comes from Theorem 3.3 or 4.2 of 004. `estimator` says
    whether UOB-LBPS uses Eq. 4.1 of 004 or its correction. `widths` and `actions` are for
    LayeredMDP-v0, and `parameters` are for any other environment. `own` is the environment if it is
    a Python object. Raises LocalError ``invalid-spec`` if a name is unknown or a number out of
    range.
    """

    name: Algorithm
    K: int
    epsilon: float
    beta: float
    privacy: Privacy
    calibration: NoiseLevels
    seed: int
    adversary: Adversary = "switching"
    widths: tuple[int, ...] = WIDTHS
    actions: int = 2
    scale: float = 1.0
    eta: float | None = None
    estimator: Estimator = "correct"
    environment: str = LAYERED
    parameters: tuple[tuple[str, Parameter], ...] = ()
    own: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, known = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in known:
                text = f"{value!r} is unknown here; known: {', '.join(known)}"
                raise LocalError("invalid-spec", text)
        if self.K < 2 or self.epsilon <= 0 or not 0 < self.beta < 1:
            raise LocalError("invalid-spec", "need K >= 2, epsilon > 0 and 0 < beta < 1")

    @property
    def full(self) -> bool:
        """Returns whether the learner sees the losses of all (x, a): full information."""
        return self.name == "uc-o-reps"


@dataclass(frozen=True, slots=True)
class LayeredWorld:
    """A layered MDP of width W: transitions P (H, W, A, W), mean rewards r (H, W, A).

    `decisions` (H, W, A) marks the pairs that can have a loss. If the first layer only draws the
    start state, its pairs have no loss.
    """

    layers: Layers
    P: FloatArray
    r: FloatArray
    decisions: BoolArray


def world(case: Case) -> LayeredWorld:
    """Returns a case's MDP. Raises LocalError ``invalid-spec`` if the environment has none."""
    if case.environment == LAYERED:
        mdp = layered_mdp(case.widths, case.actions, case.seed)
        layers = Layers(case.widths, case.actions)
        return LayeredWorld(layers, mdp.P * layers.cells, mdp.r, layers.pairs)
    reference = case.environment if case.own is None else case.own
    mdp = exact_mdp(make(reference, **dict(case.parameters)))
    layers, P, reached = unroll(mdp.P, mdp.d1)
    r, decisions = np.zeros(layers.pairs.shape), layers.pairs.copy()
    first = layers.H - len(reached)
    decisions[:first] = False
    for h, states in enumerate(reached):
        r[first + h, : len(states)] = mdp.r[h, states]
    return LayeredWorld(layers, P, r, decisions)


def adversary_losses(case: Case, world: LayeredWorld) -> FloatArray:
    """Draws losses l_1..l_K (K, H, W, A) of 0 or 1; W is the size of the largest layer.

    The adversary `stochastic` draws the losses' means once, and `switching` draws new means for
    each of `PHASES` equal phases. With `drifting`, the means move linearly from a first draw to a
    second. With `rewards`, the means are one minus the MDP's mean rewards.
    """
    generator = generator_for(case.seed, "losses", case.adversary, case.K)
    shape = (case.K, *world.decisions.shape)
    draws = generator.random(shape)
    means = 1 - world.r if case.adversary == "rewards" else _means(case, shape, generator)
    return ((draws < means) & world.decisions).astype(np.float64)


def _means(case: Case, shape: tuple[int, ...], generator: np.random.Generator) -> FloatArray:
    k = np.arange(case.K)
    if case.adversary == "drifting":
        first, last = generator.uniform(0, 1, (2, *shape[1:]))
        return np.asarray(first + (last - first) * (k / (case.K - 1))[:, None, None, None])
    phases = PHASES if case.adversary == "switching" else 1
    return generator.uniform(0, 1, (phases, *shape[1:]))[k * phases // case.K]
