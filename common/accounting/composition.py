"""Composition over batches: the guarantee of a run, and of a user who reports in several batches.

* Parallel (`run_guarantee`): each user appears in one batch. Let batch b hold the report that
  differs. Batches before b have the same distribution under both neighbours. Given these, batch b
  is (epsilon_b, beta_b)-DP. Later batches see only b's output and other users' data, so they are
  post-processing. So the run is (max epsilon_b, max beta_b)-DP, however the learner adapts.
* Sequential (`repeated_user_guarantee`): a user appears in t batches. The losses of all t batches
  add up, so all their moves are composed exactly. There are as many ups as downs, so again one
  number covers both directions. Whatever a batch's deployment depends on, the same distribution
  dominates the batch's loss. So adaptive deployments are covered (Zhu, Dong and Wang 2022, Theorem
  10), provided that the events themselves (n and noise) were fixed beforehand. The overflow of all
  batches is charged: (1 + e^epsilon) times the sum of their eta.
* One batch of each group (`one_of_each_guarantee`): a user appears in one batch of each group, such
  as an epoch, but nobody knows in which. The guarantee holds for every choice.

If the next events depend on earlier results, a limit on their composition still holds, provided
that a user takes no part in a batch that would pass it: a privacy filter (Rogers, Roth, Ullman and
Vadhan 2016). For the losses here it may compose exactly, because the dominating pairs do not depend
on data, and n and noise are in the public descriptor before the user decides.
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
"""Most choices of batches that `one_of_each_guarantee` composes exactly."""


def run_guarantee(guarantees: Sequence[Guarantee]) -> Guarantee:
    """Returns the guarantee of several batches for users who appear in one of them (parallel).

    It holds for the smallest dishonest fraction of these batches. Without batches it is (0, 0).
    """
    if not guarantees:
        return Guarantee(0.0, 0.0)
    return Guarantee(
        max(g.epsilon for g in guarantees),
        max(g.beta for g in guarantees),
        min(g.dishonest_fraction for g in guarantees),
    )


def repeated_user_guarantee(events: Sequence[BatchEvent], beta: float) -> Guarantee:
    """Returns the guarantee at beta for a user who reports once in each batch (sequential)."""
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

    It is the weakest of all choices of batches, without those that are dominated by others. If more
    than MOST_CHOICES are left, each group's batches are composed singly at beta / len(groups), and
    the epsilons are added up (basic composition), which is valid and larger.
    """
    groups = [_not_dominated(group) for group in groups if group]
    choices: set[tuple[BatchEvent, ...]] = {()}
    for group in groups:
        choices = {tuple(sorted((*c, event), key=repr)) for c in choices for event in group}
        if len(choices) > MOST_CHOICES:
            share = beta / len(groups)
            worst = [max(_alone(event, share) for event in each) for each in groups]
            fraction = min(event.dishonest_fraction for each in groups for event in each)
            return Guarantee(math.fsum(worst), beta, fraction)
    weakest = [repeated_user_guarantee(choice, beta) for choice in choices]
    fraction = min(guarantee.dishonest_fraction for guarantee in weakest)
    return Guarantee(max(guarantee.epsilon for guarantee in weakest), beta, fraction)


def _alone(event: BatchEvent, beta: float) -> float:
    return repeated_user_guarantee([event], beta).epsilon


def _not_dominated(group: Collection[BatchEvent]) -> list[BatchEvent]:
    """Returns the events that no other event dominates: with the same kind of noise, but less."""
    kept: list[BatchEvent] = []
    for event in sorted(group, key=_strength):
        if not any(_dominates(other, event) for other in kept):
            kept.append(event)
    return kept


def _strength(event: BatchEvent) -> tuple[int, int, float, str]:
    """Sorts events so that none is dominated by a later one, except by an equal one."""
    moves = moves_of(event.noise, event.honest, 1)
    bits = moves.N if isinstance(moves, Moves) else 0
    return bits, -event.cells, -event.overflow, repr(event)


def _dominates(weak: BatchEvent, strong: BatchEvent) -> bool:
    """Returns whether a guarantee of ``weak`` holds for ``strong``: more noise post-processes."""
    one, other = (moves_of(event.noise, event.honest, 1) for event in (weak, strong))
    if isinstance(one, Moves) and isinstance(other, Moves) and one.p == other.p:
        less_noise = one.N <= other.N
    else:
        less_noise = one == other
    return less_noise and weak.cells >= strong.cells and weak.overflow >= strong.overflow
