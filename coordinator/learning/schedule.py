"""How K episodes are cut into stages and batches, to the last episode.

Stage b of Algorithm 1 (000) runs 3 L_b episodes: H crude batches that share L_b, and one fine batch
of 2 L_b. L_b / H is rarely whole and in the first stages below one, so this is what is rounded:

- the L_b crude episodes are spread as evenly as possible, the first layers taking one more;
- a crude or fine batch below `smallest_n` is rounded up to it (the stage runs more than 3 L_b);
- line 3's last stage gets all that is left: a third of it crude, the rest fine; when that is too
  little for a stage's smallest batches, the fine batch of the stage before takes it instead.

The sum in lines 2-3 runs to b - 1: the stages already over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.learning.learner import LearnerError
from coordinator.learning.presets import Constants


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage b: crude batch sizes, one a layer, and the size of the fine batch."""

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


def schedule(K: int, H: int, constants: Constants, first_stage: int) -> Schedule:
    """Cut K episodes of horizon H into stages, the first of length `first_stage`.

    Raises LearnerError when K is too small for one stage.
    """
    least = (H + 1) * constants.smallest_n
    exploit = int(K * constants.exploit_share)
    if K - exploit < least:
        raise LearnerError(
            f"K={K} leaves {K - exploit} episodes to learn from, but one stage takes {least}: "
            f"{H} crude batches and a fine one of smallest_n={constants.smallest_n}. Raise K."
        )
    if constants.schedule == "fill":
        lengths = _filling(K - exploit, first_stage, constants.growth)
    else:
        lengths = _literal(K - exploit, first_stage, constants.growth)
    return Schedule(tuple(_stages(K - exploit, H, lengths, constants.smallest_n)), exploit)


def _literal(K: int, L: int, growth: float) -> list[int]:
    """L_b of Algorithm 1 until 3 sum L_b reaches K; the last one is cut by `_stages`."""
    lengths = [L]
    while 3 * sum(lengths) < K:
        lengths.append(round(L * growth ** len(lengths)))
    return lengths


def _filling(K: int, least: int, growth: float) -> list[int]:
    """As many lengths as fit with the first at least `least`, stretched to 3 sum L_b = K."""
    B, total = 1, 1.0
    while 3 * least * (total + growth**B) <= K:
        total += growth**B
        B += 1
    first = K / (3 * total)
    lengths = [round(first * growth**b) for b in range(B - 1)]
    return [*lengths, K // 3 - sum(lengths)]


def _stages(K: int, H: int, lengths: list[int], smallest_n: int) -> list[Stage]:
    stages: list[Stage] = []
    left = K
    for b, L in enumerate(lengths, start=1):
        stage = _stage(b, L, H, smallest_n)
        last = b == len(lengths) or stage.episodes >= left
        if not last:
            stages.append(stage)
            left -= stage.episodes
            continue
        if stages and left < (H + 1) * smallest_n:
            stages[-1] = replace(stages[-1], fine=stages[-1].fine + left)
        else:
            final = _stage(b, left // 3, H, smallest_n)
            stages.append(replace(final, fine=left - sum(final.crude)))
        break
    return stages


def _stage(b: int, L: int, H: int, smallest_n: int) -> Stage:
    crude = tuple(max(L // H + (h < L % H), smallest_n) for h in range(H))
    return Stage(b, L, crude, max(2 * L, smallest_n))
