"""How K episodes are cut into stages and batches, to the last episode.

Stage b of Algorithm 1 (000) runs 3 L_b episodes: H crude batches that share L_b, and one fine batch
of 2 L_b. The crude ones' share, a third there, is `crude_share` (003: one half, so
half as much again); without `crude_every_stage` only
the first stage has any. L_b / H is rarely whole and in the first stages below one, so this is what
is rounded:

- the crude episodes are spread as evenly as possible, the first layers taking one more;
- a crude or fine batch below `smallest_n` is rounded up to it (the stage runs more than 3 L_b);
- line 3's last stage gets all that is left, divided alike; when that is too little for a stage's
  smallest batches, the fine batch of the stage before takes it instead.

The sum in lines 2-3 runs to b - 1: the stages already over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from riffle.coordinator.learning.learner import LearnerError, Problem
from riffle.coordinator.learning.sdp_pe.presets import Constants


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage b: crude batch sizes, one a layer (or none), and the size of the fine batch."""

    b: int
    L_b: int
    crude: tuple[int, ...]
    fine: int

    @property
    def episodes(self) -> int:
        """Episodes of the whole stage."""
        return sum(self.crude) + self.fine


@dataclass(frozen=True, slots=True)
class Schedule:
    """Stages in order, and the episodes left to a last, exploiting deployment."""

    stages: tuple[Stage, ...]
    exploit: int

    @property
    def episodes(self) -> int:
        """All episodes, K."""
        return sum(stage.episodes for stage in self.stages) + self.exploit


def of_problem(problem: Problem, constants: Constants, fine: int) -> Schedule:
    """A run's stages; with one state no transitions are to learn: stages of 2 L_b, all fine."""
    first = _first_stage(problem, constants)
    if problem.sizes.X == 1 and constants.levels == "noise":
        constants, first = replace(constants, crude_share=0.0), math.ceil(first * 2 / 3)
    return schedule(problem.K, problem.sizes.H, constants, first, fine)


def _first_stage(problem: Problem, constants: Constants) -> int:
    """L_1: as configured, or enough for `visits_per_noise` (see `Constants`)."""
    if constants.first_stage > 0:
        return constants.first_stage
    X, A, H = problem.sizes.X, problem.sizes.A, problem.sizes.H
    deviation = max(1.0, math.sqrt(problem.noise(max(problem.K // (3 * H), 1), 0)))
    return math.ceil(constants.visits_per_noise * deviation * H * X * A)


def schedule(K: int, H: int, constants: Constants, first_stage: int, fine: int = 2) -> Schedule:
    """Cut K episodes of horizon H into stages, the first of length `first_stage`.

    A stage has 1 + `fine` times L_b episodes: 3 L_b in 000, 2 L_b in 003.

    Raises LearnerError when K is too small for one stage, or the stages would never fill it.
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
    if constants.schedule == "fill":
        lengths = _filling(K - exploit, first_stage, constants.growth, 1 + fine)
    else:
        lengths = _literal(K - exploit, first_stage, constants.growth, 1 + fine)
    return Schedule(tuple(_stages(K - exploit, H, lengths, constants, 1 + fine)), exploit)


def _literal(K: int, L: int, growth: float, batches: int) -> list[int]:
    """L_b of Algorithm 1 until `batches` sum L_b reaches K; the last one is cut by `_stages`."""
    lengths = [L]
    while batches * sum(lengths) < K:
        lengths.append(round(L * growth ** len(lengths)))
    return lengths


def _filling(K: int, least: int, growth: float, batches: int) -> list[int]:
    """As many lengths as fit, the first at least `least`, stretched to `batches` sum L_b = K."""
    B, total = 1, 1.0
    while batches * least * (total + growth**B) <= K:
        total += growth**B
        B += 1
    first = K / (batches * total)
    lengths = [round(first * growth**b) for b in range(B - 1)]
    return [*lengths, K // batches - sum(lengths)]


def _stages(K: int, H: int, lengths: list[int], constants: Constants, batches: int) -> list[Stage]:
    stages: list[Stage] = []
    left = K
    for b, L in enumerate(lengths, start=1):
        stage = _stage(b, batches * L, H, constants, batches)
        last = b == len(lengths) or stage.episodes >= left
        if not last:
            stages.append(stage)
            left -= stage.episodes
            continue
        if stages and left < (H + 1) * constants.smallest_n:
            stages[-1] = replace(stages[-1], fine=stages[-1].fine + left)
        else:
            final = _stage(b, left, H, constants, batches)
            stages.append(replace(final, fine=left - sum(final.crude)))
        break
    return stages


def _stage(b: int, episodes: int, H: int, constants: Constants, batches: int) -> Stage:
    """A stage of `batches` L_b episodes; the crude ones as evenly over layers as can be."""
    n = int(episodes * constants.crude_share * 3 / batches + 1e-9)
    crude = [max(n // H + (h < n % H), constants.smallest_n) for h in range(H)]
    if b > 1 and not constants.crude_every_stage:
        n, crude = 0, []
    return Stage(b, episodes // batches, tuple(crude), max(episodes - n, constants.smallest_n))
