"""The privacy ledger: the spend of each batch, and the limit of a run's spend. Pure functions.

A user is in only one batch of all runs, because the shuffler refuses a second report. So a run's
epsilon is the largest of its batches' epsilons (`common.accounting.run_guarantee`). With epochs, a
user may be in one batch of each epoch (`composed`).

The guarantee of a batch is recomputed from its descriptor. A report has L messages. If f messages
do not open, at least ceil(f / L) reports are dishonest, and nobody can rely on their noise. The
descriptor's promise allows floor(gamma n) dishonest reports. If more reports are dishonest, the
ledger records the weaker guarantee that the remaining reports give, and the counts are not used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from riffle.common.accounting import BatchEvent, account, one_of_each_guarantee, run_guarantee
from riffle.common.mechanism.parameters import Guarantee, honest_reports
from riffle.common.protocol.descriptor import BatchDescriptor, Epoch
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.verification import batch_event


@dataclass(frozen=True, slots=True)
class Spend:
    """Bounds of a batch's epsilon at beta. At most ``dishonest`` reports break the protocol."""

    epsilon_lower: float
    epsilon_upper: float
    beta: float
    dishonest: int
    within_promise: bool


def planned(descriptor: BatchDescriptor) -> Spend:
    """Returns the spend of a batch if as many reports are dishonest as its promise allows."""
    return _spend(descriptor, _allowed(descriptor), within_promise=True)


def spent(descriptor: BatchDescriptor, failed: int) -> Spend:
    """Returns the spend of a batch if ``failed`` of its messages did not open."""
    dishonest, allowed = dishonest_at_least(descriptor, failed), _allowed(descriptor)
    return _spend(descriptor, max(dishonest, allowed), within_promise=dishonest <= allowed)


def dishonest_at_least(descriptor: BatchDescriptor, failed: int) -> int:
    """Returns ceil(``failed`` / L), the fewest reports that can hold the failed messages."""
    return -(-failed // descriptor.padding.messages)


def refuse_beyond(budget: Guarantee, spend: Spend, *, seeded: bool) -> None:
    """Refuses a deployment that would spend more of each user's privacy than the run's budget.

    A seeded batch is not refused, because its users are synthetic. Raises LocalError
    ``budget-exceeded``.
    """
    if seeded:
        return
    if not (spend.epsilon_upper <= budget.epsilon and spend.beta <= budget.beta):
        raise LocalError(
            "budget-exceeded",
            f"the batch would spend epsilon {spend.epsilon_upper:.6g} at beta {spend.beta:g}; the "
            f"run's budget is {budget.epsilon:g} at {budget.beta:g}; nothing was issued",
        )


def recorded(n: int, spend: Spend) -> Guarantee:
    """Returns the guarantee that the ledger records for a batch of n reports."""
    fraction = min(spend.dishonest / n, math.nextafter(1.0, 0.0))
    return Guarantee(spend.epsilon_upper, spend.beta, fraction)


def composed(entries: Sequence[tuple[BatchDescriptor, Spend]]) -> Guarantee:
    """Returns the guarantee for a person who reported in one batch of each epoch.

    The guarantee holds for every choice of these batches.
    """
    together = run_guarantee([recorded(descriptor.n, spend) for descriptor, spend in entries])
    if len({descriptor.epoch for descriptor, _ in entries}) < 2 or math.isinf(together.epsilon):
        return together
    epochs: dict[Epoch | None, list[BatchEvent]] = {}
    for descriptor, spend in entries:
        epochs.setdefault(descriptor.epoch, []).append(_event(descriptor, spend.dishonest))
    return one_of_each_guarantee(list(epochs.values()), together.beta)


def _allowed(descriptor: BatchDescriptor) -> int:
    n = descriptor.n
    return n - honest_reports(n, descriptor.guarantee.dishonest_fraction)


def _event(descriptor: BatchDescriptor, dishonest: int) -> BatchEvent:
    # Without the shuffle, a user's privacy does not depend on other users' noise.
    liars = dishonest if descriptor.trust == "shuffle" else 0
    n, fraction = descriptor.n, liars / descriptor.n
    # If the quotient was rounded down, one dishonest report would count as honest: raise the
    # fraction.
    while n - honest_reports(n, fraction) < liars:
        fraction = math.nextafter(fraction, 1.0)
    return batch_event(descriptor, fraction)


def _spend(descriptor: BatchDescriptor, dishonest: int, *, within_promise: bool) -> Spend:
    n, beta = descriptor.n, descriptor.guarantee.beta
    if descriptor.test_seed is not None or (dishonest >= n and descriptor.trust == "shuffle"):
        return Spend(math.inf, math.inf, beta, dishonest, within_promise)
    spent = account(_event(descriptor, dishonest), beta)
    return Spend(spent.epsilon_lower, spent.epsilon_upper, spent.beta, dishonest, within_promise)
