"""From a catalogue's run to the simulators: the only module here that knows their signatures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from riffle.coordinator.learning.learner import FloatArray
from riffle.experiments import adversarial, per_episode
from riffle.experiments.figures.catalogue import ADVERSARIAL, Parameters, Run, Value
from riffle.experiments.regret import optimal_value, policy_value
from riffle.node_client.environments.registry import exact_mdp, make
from riffle.node_client.environments.tabular import TabularMDP


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed of a run gave.

    regret (c,) at the checkpoints episodes (c,); `value_share` is the last policy's value over V*;
    switches and value_share are None where they have no meaning (004 changes policy every episode
    and has no V*); ceiling is V* K or None.
    """

    episodes: FloatArray
    regret: FloatArray
    switches: int | None
    value_share: float | None
    ceiling: float | None
    seconds: float
    constants: dict[str, Value]


def compute(run: Run, seed: int) -> Outcome:
    """One seed of a run.

    Raises:
        RiffleError: the run is refused (unknown learner, batch too small); its text says why.
    """
    return _adversarial(run, seed) if run.learner in ADVERSARIAL else _stochastic(run, seed)


def _stochastic(run: Run, seed: int) -> Outcome:
    mdp = _mdp(run.environment, run.parameters)
    done = per_episode.run(
        run.learner,
        mdp,
        run.K,
        epsilon=1.0 if run.epsilon is None else run.epsilon,  # not read by learners without privacy
        beta=run.beta,
        seed=seed,
        calibration="paper" if run.calibration == "paper" else "tight",
        constants=run.constants,
        options=dict(run.options),
    )
    best = optimal_value(mdp)
    return Outcome(
        episodes=done.episodes.astype(np.float64),
        regret=done.cumulative,
        switches=done.switches,
        value_share=policy_value(mdp, done.policy) / best,
        ceiling=best * run.K,
        seconds=done.seconds,
        constants=done.constants,
    )


def _adversarial(run: Run, seed: int) -> Outcome:
    known: dict[str, Any] = {**dict(run.parameters), **dict(run.options)}
    done = adversarial.run(
        "uc-o-reps" if run.learner == "uc-o-reps" else "uob-lbps",
        run.K,
        epsilon=1.0 if run.epsilon is None else run.epsilon,
        beta=run.beta,
        privacy=known["privacy"],
        calibration="paper" if run.calibration == "paper" else "correct",
        seed=seed,
        adversary=known["adversary"],
        widths=tuple(map(int, known["widths"].split("-"))),
        actions=known["actions"],
    )
    return Outcome(done.episodes, done.regret, None, None, None, done.seconds, done.constants)


@lru_cache(maxsize=16)
def _mdp(environment: str, parameters: Parameters) -> TabularMDP:
    given: dict[str, Any] = dict(parameters)
    return exact_mdp(make(environment, **given))
