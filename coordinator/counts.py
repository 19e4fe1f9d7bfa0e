"""From a batch's histogram to the private counts a learner takes. Pure.

The analyzer's last step in `common.workflow`: drop what is no counter, undo the noise's mean, and
sum families that were not sent on their own (`coordinator.learning.counts`).
"""

from typing import Any

from riffle.common.counters import Ints
from riffle.common.descriptor import BatchDescriptor
from riffle.common.workflow import debias
from riffle.coordinator.learning.counts import batch_counts
from riffle.coordinator.learning.learner import BatchCounts


def private_counts(descriptor: BatchDescriptor, histogram: Ints) -> BatchCounts:
    """Unbiased counts with their variances, from a batch's histogram (C + 1,).

    Raises:
        ValueError: the histogram has another size than the batch's counters and one.
    """
    layout, noise, n = descriptor.layout, descriptor.to_noise(), descriptor.n
    if histogram.shape != (layout.counters + 1,):
        raise ValueError(f"{histogram.shape} entries for {layout.counters} counters and one")
    debiased = debias(noise, n, histogram)
    return batch_counts(layout, n, debiased, noise.variance(n), noise.term)


def plain(counts: BatchCounts) -> dict[str, Any]:
    """Counts as a document, arrays as nested lists; `coordinator.views.CountsView` names them."""
    return {
        "transitions": counts.transitions.tolist(),
        "visits": counts.visits.tolist(),
        "rewards": None if counts.rewards is None else counts.rewards.tolist(),
        "transition_variance": counts.transition_variance,
        "visit_variance": counts.visit_variance,
        "reward_variance": counts.reward_variance,
    }
