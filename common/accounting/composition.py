"""Composition over batches: the guarantee of a run, and of a user who reports in several batches.

* Parallel (`run_guarantee`): each user appears in one batch. Batches before it have the same
  distribution under both neighbours. Batches after it see only its output and other users' data, so
  they are post-processing. The run is therefore (max epsilon_b, max beta_b)-DP over its batches b,
  however the learner adapts.
* Sequential (`repeated_user_guarantee`): a user appears in several batches, whose losses add up.
  These losses are composed exactly. The deployment of a batch may depend on earlier results,
  because one distribution dominates the batch's loss in every case (Zhu, Dong and Wang 2022,
  Theorem 10). Only each batch's n and noise must be fixed beforehand. beta also pays for
  dropped noise: (1 + e^epsilon) times the batches' total `overflow`.
* One batch of each group (`one_of_each_guarantee`): a user appears in one batch of each group, but
  nobody knows in which. A group is, for example, the batches of an epoch.

A privacy filter keeps a limit even if later events depend on earlier results (Rogers, Roth, Ullman
and Vadhan 2016). With the filter, a user skips each batch that would exceed the limit. The filter
may compose exactly, because no dominating distribution depends on data.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from riffle.common.accounting import loss_curve
from riffle.common.accounting.account import BatchEvent, check_batch, moves_of
from riffle.common.accounting.loss_curve import AnyMoves, Moves
from riffle.common.mechanism.parameters import Guarantee

MOST_CHOICES = 64
"""The most choices of batches that `one_of_each_guarantee` composes exactly."""


def run_guarantee(guarantees: Sequence[Guarantee]) -> Guarantee:
    """Returns, by parallel composition, the guarantee of users who report to only one batch each.

    If there are no batches, epsilon and beta are 0.
    """
    if not guarantees:
        return Guarantee(0.0, 0.0)
    return Guarantee(
        max(g.epsilon for g in guarantees),
        max(g.beta for g in guarantees),
        min(g.dishonest_fraction for g in guarantees),
    )


def repeated_user_guarantee(events: Sequence[BatchEvent], beta: float) -> Guarantee:
    """Returns the guarantee at beta for a user who reports once in each batch."""
    if not events:
        return Guarantee(0.0, 0.0)
    for event in events:
        check_batch(event.cells, event.counters, beta)
    cells: Counter[AnyMoves] = Counter()  # events with equal noise are composed as one
    for event in events:
        cells[moves_of(event.noise, event.honest, 1)] += event.cells
    moves = sorted((replace(each, cells=count) for each, count in cells.items()), key=repr)
    overflow = math.fsum(event.overflow for event in events)
    return Guarantee(
        _composed(tuple(moves), beta, overflow),
        beta,
        min(event.dishonest_fraction for event in events),
    )


@lru_cache(maxsize=1 << 12)
def _composed(moves: tuple[AnyMoves, ...], beta: float, overflow: float) -> float:
    return loss_curve.epsilon(moves, beta, "upper", overflow)


def one_of_each_guarantee(groups: Sequence[Collection[BatchEvent]], beta: float) -> Guarantee:
    """Returns the guarantee at beta for a user who reports once in one batch of each group.

    The guarantee is the weakest over all choices of batches. If there are more than MOST_CHOICES
    choices, basic composition is used. Its epsilon is valid but larger: the sum over groups of the
    largest epsilon in the group, at beta / len(groups).
    """
    groups = [_not_dominated(group) for group in groups if group]
    choices: set[tuple[BatchEvent, ...]] = {()}
    for group in groups:
        choices = {tuple(sorted((*c, event), key=repr)) for c in choices for event in group}
        if len(choices) > MOST_CHOICES:
            share = beta / len(groups)
            alone = ([repeated_user_guarantee([e], share).epsilon for e in each] for each in groups)
            fraction = min(event.dishonest_fraction for each in groups for event in each)
            return Guarantee(math.fsum(map(max, alone)), beta, fraction)
    return run_guarantee([repeated_user_guarantee(choice, beta) for choice in choices])


def _not_dominated(group: Collection[BatchEvent]) -> list[BatchEvent]:
    """Returns the events of a group that no other event of the group dominates (`_dominates`)."""
    kept: list[BatchEvent] = []
    for event in group:
        if not any(_dominates(other, event) for other in kept):
            kept = [other for other in kept if not _dominates(event, other)] + [event]
    return kept


def _dominates(weak: BatchEvent, strong: BatchEvent) -> bool:
    """Returns whether ``weak`` certainly gives no more privacy than ``strong``.

    Adding noise is post-processing, so a batch with less noise gives no more privacy.
    """
    one, other = (moves_of(event.noise, event.honest, 1) for event in (weak, strong))
    if isinstance(one, Moves) and isinstance(other, Moves) and one.p == other.p:
        less_noise = one.N <= other.N
    else:
        less_noise = one == other
    return less_noise and weak.cells >= strong.cells and weak.overflow >= strong.overflow
