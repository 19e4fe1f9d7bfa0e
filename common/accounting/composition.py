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

If the next events depend on earlier results, a limit on their composition still holds, provided
that a user takes no part in a batch that would pass it: a privacy filter (Rogers, Roth, Ullman and
Vadhan 2016). For the losses here it may compose exactly, because the dominating pairs do not depend
on data, and n and noise are in the public descriptor before the user decides.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from riffle.common.accounting import loss_curve
from riffle.common.accounting.account import BatchEvent, check_batch, moves_of
from riffle.common.accounting.loss_curve import AnyMoves
from riffle.common.mechanism.parameters import Guarantee


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
