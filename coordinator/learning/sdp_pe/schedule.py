"""Cuts K episodes into stages and batches that use every episode.

Stage b of Algorithm 1 of 000 runs 3 L_b episodes: H crude batches that share L_b, and a fine batch
of 2 L_b. `crude_share` is the share of the crude batches, a third in 000. In 003 their share is one
half, so for 003 `crude_share` is multiplied by 3/2. Batch sizes are rounded:

- the crude batches of a stage have equal sizes, but the first ones may have one episode more;
- a batch with fewer than `smallest_n` episodes gets `smallest_n` (the stage then exceeds 3 L_b);
- the last stage (Algorithm 1, line 3) gets the remaining episodes, divided in the same way. If too
  few remain for a stage's smallest batches, the fine batch of the previous stage takes them.

Lines 2-3 of Algorithm 1 add up the lengths of stages 1..b in the paper. Here they add up the
lengths of the finished stages, 1..b - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from riffle.coordinator.learning.learner import LearnerError, Problem
from riffle.coordinator.learning.sdp_pe.constants import Constants


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage b: the sizes of its crude batches (one for each layer, or none) and its fine batch."""

    b: int
    L_b: int
    crude: tuple[int, ...]
    fine: int

    @property
    def episodes(self) -> int:
        """The number of episodes of the whole stage."""
        return sum(self.crude) + self.fine


@dataclass(frozen=True, slots=True)
class Schedule:
    """The stages in order, and the number of episodes of the last, exploiting deployment."""

    stages: tuple[Stage, ...]
    exploit: int


def schedule_for(problem: Problem, constants: Constants, fine: int) -> Schedule:
    """Returns a run's schedule. Stage 1 has length L_1: `first_stage`, if that is not 0.

    Otherwise `visits_per_noise` sets L_1. With one state, crude batches learn nothing, because they
    count only transitions. With levels `noise`, they then have the smallest size.
    """
    first_stage = constants.first_stage
    if first_stage <= 0:
        pairs = np.count_nonzero(problem.layout(None).possible.any(axis=-1))  # possible (h, x, a)
        n = max(problem.K // (3 * problem.sizes.H), 1)
        deviation = max(1.0, math.sqrt(problem.noise(n, 0)))
        first_stage = math.ceil(constants.visits_per_noise * deviation * pairs)
    if problem.sizes.X == 1 and constants.levels == "noise":
        constants = replace(constants, crude_share=0.0)
    return schedule(problem.K, problem.sizes.H, constants, first_stage, fine)


def schedule(K: int, H: int, constants: Constants, first_stage: int, fine: int = 2) -> Schedule:
    """Cuts K episodes of horizon H into stages. Stage b has (1 + `fine`) L_b episodes.

    L_b is `first_stage` in the first stage. Raises LearnerError if K is too small for one stage, or
    if the stages would never fill K.
    """
    if first_stage < 1 or not constants.growth >= 1:
        raise LearnerError(
            f"stages from L_1={first_stage} that grow by {constants.growth:g} never fill K: set "
            "first_stage or visits_per_noise above 0, and growth to at least 1"
        )
    least = (H + 1) * constants.smallest_n
    exploit = int(K * constants.exploit_share)
    if K - exploit < least:
        raise LearnerError(
            f"K={K} leaves {K - exploit} episodes to learn from, but one stage takes {least}: "
            f"{H} crude batches and a fine one of smallest_n={constants.smallest_n}. Raise K."
        )
    lengths_of = _filling_lengths if constants.schedule == "fill" else _literal_lengths
    lengths = lengths_of(K - exploit, first_stage, constants.growth, 1 + fine)
    return Schedule(tuple(_stages(K - exploit, H, lengths, constants, 1 + fine)), exploit)


def _literal_lengths(K: int, L_1: int, growth: float, batches: int) -> list[int]:
    """Returns the fewest lengths L_b (000, Algorithm 1) for which `batches` * sum L_b >= K."""
    lengths = [L_1]
    while batches * sum(lengths) < K:
        lengths.append(round(L_1 * growth ** len(lengths)))
    return lengths


def _filling_lengths(K: int, least: int, growth: float, batches: int) -> list[int]:
    """Cuts K episodes into as many stages as possible. Stage b has about `batches` * L_b episodes.

    Returns all L_b. L_1 is `least`. Lengths grow by a constant factor, which is at least `growth`.
    """
    B, total, target = 1, 1.0, K / (batches * least)
    while total + growth**B <= target:
        total += growth**B
        B += 1
    low, high = growth, max(growth, target ** (1 / max(B - 1, 1)))
    for _ in range(60):  # bisection
        factor = (low + high) / 2
        fits = sum(factor**b for b in range(B)) <= target
        low, high = (factor, high) if fits else (low, factor)
    lengths = [round(least * low**b) for b in range(B - 1)]
    return [*lengths, K // batches - sum(lengths)]


def _stages(K: int, H: int, lengths: list[int], constants: Constants, batches: int) -> list[Stage]:
    stages: list[Stage] = []
    remaining = K
    for b, L_b in enumerate(lengths, start=1):
        stage = _stage(b, batches * L_b, H, constants, batches)
        if b < len(lengths) and stage.episodes < remaining:
            stages.append(stage)
            remaining -= stage.episodes
            continue
        if stages and remaining < (H + 1) * constants.smallest_n:
            stages[-1] = replace(stages[-1], fine=stages[-1].fine + remaining)
        else:
            last = _stage(b, remaining, H, constants, batches)
            stages.append(replace(last, fine=remaining - sum(last.crude)))
        break
    return stages


def _stage(b: int, episodes: int, H: int, constants: Constants, batches: int) -> Stage:
    """Returns a stage of `batches` * L_b episodes. Layers share its crude episodes evenly."""
    n = int(episodes * constants.crude_share * 3 / batches + 1e-9)
    crude = [max(n // H + (h < n % H), constants.smallest_n) for h in range(H)]
    if b > 1 and not constants.crude_every_stage:
        n, crude = 0, []
    return Stage(b, episodes // batches, tuple(crude), max(episodes - n, constants.smallest_n))
