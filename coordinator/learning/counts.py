"""From debiased counters to the counts a learner takes, for every choice of families.

What was not sent is a sum of what was: with `lean`, N(x,a) = sum_x' N(x,a,x'); with `joint`,
N(x,a,x') = sum_r N(x,a,x',r) and R(x,a) = sum_x' N(x,a,x',1). Variances add over the terms.
"""

from __future__ import annotations

from dataclasses import replace

from riffle.common.counters import CounterLayout
from riffle.coordinator.learning.learner import BatchCounts, FloatArray


def batch_counts(
    layout: CounterLayout, n: int, debiased: FloatArray, variance: float, term: float = 1.0
) -> BatchCounts:
    """Counts of a batch of n reports from its debiased counters (C,), each of noise `variance`.

    `term` is the size of the noise's terms.

    Raises ValueError when there are not exactly `layout.counters` of them.
    """
    if debiased.shape != (layout.counters,):
        raise ValueError(f"expected {layout.counters} counters, got shape {debiased.shape}")
    blocks = layout.split(debiased)
    if "joint" in blocks:
        return replace(_from_joint(layout, n, blocks["joint"], variance), term=term)
    transitions = blocks["transitions"]
    lean = "visits" not in blocks
    return BatchCounts(
        layout=layout,
        n=n,
        transitions=transitions,
        visits=transitions.sum(axis=-1) if lean else blocks["visits"],
        rewards=blocks.get("rewards"),
        transition_variance=variance,
        visit_variance=variance * (layout.sizes.X if lean else 1),
        reward_variance=variance,
        term=term,
    )


def _from_joint(layout: CounterLayout, n: int, joint: FloatArray, variance: float) -> BatchCounts:
    transitions = joint.sum(axis=-1)
    return BatchCounts(
        layout=layout,
        n=n,
        transitions=transitions,
        visits=transitions.sum(axis=-1),
        rewards=joint[..., 1].sum(axis=-1),
        transition_variance=2 * variance,
        visit_variance=2 * layout.sizes.X * variance,
        reward_variance=layout.sizes.X * variance,
    )
