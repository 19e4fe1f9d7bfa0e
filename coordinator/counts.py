"""From a batch's histogram to the private counts a learner takes. Pure.

The analyzer's second half of `common.mechanism`: drop the dummies, subtract the noise's mean
n * bits * p, and sum families that were not sent on their own (`coordinator.learning.counts`).
"""

from common.counters import Ints
from common.descriptor import BatchDescriptor
from common.mechanism import debias
from coordinator.learning.counts import batch_counts
from coordinator.learning.learner import BatchCounts


def private_counts(descriptor: BatchDescriptor, histogram: Ints) -> BatchCounts:
    """Unbiased counts with their variances, from messages an index (C + 1,), dummies last.

    Raises:
        ValueError: the histogram has another size than the batch's counters and the dummy.
    """
    layout, noise, n = descriptor.layout, descriptor.to_noise(), descriptor.n
    if histogram.shape != (layout.counters + 1,):
        raise ValueError(f"{histogram.shape} entries for {layout.counters} counters and a dummy")
    debiased = debias(histogram[: layout.counters], n, noise)
    return batch_counts(layout, n, debiased, noise.variance(n))
