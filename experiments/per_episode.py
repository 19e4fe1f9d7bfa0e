"""Simulates UCBVI and its private variants. `run` returns the regret over time.

These learners plan before every episode and update after it, so a compiled loop runs one user at a
time. `coordinator.learning.ucbvi_parameters` describes the algorithm. Regret is exact
pseudo-regret. All noise is seeded, so it protects nobody.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError

from riffle.common.accounting import CalibrationName
from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.randomness import generator_for
from riffle.common.process.plugins import unknown_name
from riffle.common.protocol.descriptor import first_fault
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.privatizers import NO_NOISE, AdditiveNoise, NoiseLevels
from riffle.coordinator.learning.sdp_pe.constants import CONSTANTS
from riffle.coordinator.learning.ucbvi_parameters import (
    Bonus,
    Trust,
    layout_of,
    log_terms,
    noise_of,
)
from riffle.coordinator.specs import Option
from riffle.experiments.regret import Constant, SeedResult, optimal_value, policy_value
from riffle.node_client.environments.tabular import TabularMDP

PER_EPISODE: dict[str, Trust | None] = {
    "ucbvi": None,
    "ucbvi-jdp": "central",
    "ucbvi-ldp": "local",
}
KINDS = {"none": 0, "laplace": 1, "gaussian": 2}
DELTA = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters of a run whose learner is in `PER_EPISODE`."""

    name: str
    mdp: TabularMDP
    K: int
    epsilon: float
    beta: float
    seed: int
    calibration: NoiseLevels
    bonus: Bonus

    @property
    def trust(self) -> Trust | None:
        """The trust model: central, local, or None for learners without privacy."""
        return PER_EPISODE[self.name]

    @property
    def noise(self) -> AdditiveNoise:
        """The distribution of a single draw of the Privatizer's noise."""
        if self.trust is None:
            return NO_NOISE
        return noise_of(
            self.trust, self.calibration, self.mdp.sizes, self.K, self.epsilon, self.beta
        )

    @property
    def constants(self) -> dict[str, Constant]:
        """Every constant that shaped the run, by name."""
        known: dict[str, Constant] = {**asdict(self.bonus), "delta": DELTA, "seed": self.seed}
        if self.trust is None:
            return known
        noise = self.noise
        return known | {
            "epsilon": self.epsilon,
            "beta": self.beta,
            "calibration": self.calibration,
            "families": layout_of(self.mdp.sizes, self.calibration).families,
            "noise": noise.kind,
            "noise_parameter": noise.scale,
        }


def run(
    name: str,
    mdp: TabularMDP,
    K: int,
    epsilon: float = 1.0,
    beta: float = 1e-5,
    seed: int = 0,
    calibration: CalibrationName = "exact",
    constants: str = "practical",
    options: Mapping[str, Option] | None = None,
    checkpoints: Sequence[int] | None = None,
) -> SeedResult:
    """Runs a learner (a key of `PER_EPISODE`) for K episodes.

    `calibration` is `paper` (the papers' noise) or `exact` (the least noise with a proof).
    `constants` names a set of numbers (`practical`, `paper`). `options` replace fields of `Bonus`
    in this set.

    Raises LocalError ``invalid-spec`` for an unknown learner, set or option, K below one, or a
    checkpoint outside 1..K; ``unavailable`` if numba is not installed.
    """
    points = checkpoints_of(K, checkpoints)
    bonus, levels = checked(name, calibration, constants, options or {})
    setting = Setting(name, mdp, K, epsilon, beta, seed, levels, bonus)
    policy = np.zeros((mdp.sizes.H, mdp.sizes.X), dtype=np.int64)
    started = time.perf_counter()
    cumulative, switches = _run_compiled(setting, points, policy)
    return SeedResult(
        seed=seed,
        regret=float(cumulative[-1]),
        optimal_value=optimal_value(mdp),
        policy_value=policy_value(mdp, policy),
        policy_switches=switches,
        seconds=time.perf_counter() - started,
        policy=policy.tolist(),
        constants=setting.constants,
        episodes=tuple(map(float, points)),
        cumulative=tuple(cumulative.tolist()),
    )


def checked(
    name: str,
    calibration: CalibrationName,
    constants: str,
    options: Mapping[str, Option],
) -> tuple[Bonus, NoiseLevels]:
    """Returns a learner's bonus and noise. Raises LocalError ``invalid-spec`` as `run` does."""
    if constants not in CONSTANTS:
        known = ", ".join(CONSTANTS)
        raise LocalError("invalid-spec", f"there are no constants {constants!r}; known: {known}")
    if name not in PER_EPISODE:
        raise LocalError("invalid-spec", unknown_name("learner", name, PER_EPISODE))
    if calibration == "conference":
        raise LocalError("invalid-spec", f"calibration 'conference' (003) is not for {name}")
    settable = ("bonus_scale", "noise_scale", "least_visits")
    unknown = sorted(set(options) - set(settable))
    if unknown:
        raise LocalError("invalid-spec", unknown_name("option", unknown[0], settable))
    try:
        bonus = TypeAdapter(Bonus).validate_python({"name": constants, **options})
    except ValidationError as error:
        raise LocalError("invalid-spec", f"option {first_fault(error)}") from error
    return bonus, calibration


def _run_compiled(setting: Setting, points: Ints, policy: PolicyArray) -> tuple[FloatArray, int]:
    """Writes the last policy to ``policy``; returns regret at ``points`` and the switch count."""
    try:
        # Imported here because numba is an optional dependency.
        from riffle.coordinator.learning import ucbvi  # noqa: PLC0415
    except ImportError as error:
        raise LocalError(
            "unavailable",
            "learners that plan before every episode need numba: install riffle-rl[experiments]",
        ) from error
    mdp, noise = setting.mdp, setting.noise
    world = ucbvi.World(
        P=np.ascontiguousarray(mdp.P),
        r=np.ascontiguousarray(mdp.r),
        d1=mdp.d1,
        optimum=optimal_value(mdp),
        start=np.cumsum(mdp.d1),
        following=np.cumsum(mdp.P, axis=-1),
    )
    bonus = setting.bonus
    kind = 0 if bonus.name == "practical" else 1 if setting.trust is None else 2
    iota = log_terms(mdp.sizes, setting.K, DELTA)[kind]
    least = bonus.least_visits if bonus.name == "practical" else 0.0
    exploration = ucbvi.Exploration(kind, bonus.bonus_scale, bonus.noise_scale, least, iota)
    work = ucbvi.Work.of(mdp.sizes.X, mdp.r.size)
    counters = layout_of(mdp.sizes, setting.calibration).counters
    log_term = math.log(2.0 * counters * setting.K / DELTA)  # in the bound E of 000, Assumption 4
    privacy = ucbvi.Privacy(
        local=setting.trust == "local",
        separate_visits=setting.calibration == "paper",
        kind=KINDS[noise.kind],
        scale=noise.scale,
        variance=noise.variance,
        log_term=log_term if bonus.name == "paper" else 0.0,
    )
    episodes, draws = (generator_for(setting.seed, name) for name in ("episodes", "noise"))
    return ucbvi.run(episodes, draws, world, privacy, exploration, points, policy, work)


def checkpoints_of(K: int, given: Sequence[int] | None = None) -> Ints:
    """Returns the checkpoints in order: those given (default: K/100, 2K/100, ...), and K.

    Raises LocalError ``invalid-spec`` if K is below one, or a given episode is outside 1..K.
    """
    if K < 1:
        raise LocalError("invalid-spec", f"K is {K}; it must be at least 1")
    wanted = np.linspace(K / 100, K, 100).astype(np.int64) if given is None else np.array(given)
    points = np.unique(np.append(wanted[wanted > 0], K)).astype(np.int64)
    if given is not None and (min(given, default=1) < 1 or points[-1] > K):
        raise LocalError("invalid-spec", f"checkpoints must lie in 1..{K}, got {list(given)}")
    return points
