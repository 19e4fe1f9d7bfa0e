"""The constants of SDP-PE, in two declared sets: `paper` (literal) and `practical`.

`paper` is paper 000 as written. It has C_1 = 6, iota = log(2 H A K / delta), C = 1 in the radius
(Algorithm 1, line 9), and L_b = 2^b from b = 1. It uses the add-on of Eq. 7, and only the counts of
the fine batch.

`practical` is one set for every environment, family, epsilon and K. Every field that differs from
`paper` is one departure from the paper. docs/ablation.md says what each departure is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of an SDP-PE run, in the letters of 000. The defaults are the set `paper`.

    schedule: `paper` is lines 1-4 of Algorithm 1. `fill` takes the largest number of whole stages
        that fits. Then `fill` raises the growth until the stages use all episodes that
        `exploit_share` leaves.
    growth: the factor from one stage's length to the next; with `fill`, the least factor.
    first_stage: L_1, the length of the first stage; 0 derives it from `visits_per_noise`.
    visits_per_noise: if `first_stage` is 0, L_1 is the number of possible (h, x, a), times this
        number, times s. Here s is the standard deviation of the noise on a crude counter, or 1 if
        that is larger.
    crude_share: share of a stage's episodes that explore crudely. With levels `noise` and X = 1,
        crude batches have the smallest size, because there are no transitions to learn.
    crude_every_stage: if false, only the first stage explores crudely. Later stages compute W
        (see `levels`) and the crude model P~cru from `memory`.
    exploit_share: share of K for a last deployment of the best policy (0: none).
    smallest_n: no batch has fewer reports; smaller batches are rounded up to this size.
    auxiliary_share: share of a stage's fine batch that runs pi_0, the policies of Algorithm 2. The
        rest of the fine batch runs pi^ref, the mixture of Eq. 4.
    best_share: share of the fine batch that runs the best policy in the previous stage's model. In
        the first stage, the share is 0.
    likely_share: share of the fine batch that runs the best policy of each of 50 bootstrap draws.
        So a policy is explored more if it is more likely to be the best (Thompson 1933). Needs
        radius `bootstrap`.
    threshold_scale: see `levels`; C_1 of `paper`.
    levels: `paper`: W holds the tuples with a count of at most `threshold_scale` (C_1) times E H^2
        iota. Eq. 7 has tolerance E/4. `noise`: W holds the tuples with a count of at most
        `threshold_scale` standard deviations of its noise. Eq. 7 has tolerance 0. If
        `threshold_scale` is 0 and `crude_add_on` (see there) is above 0, W is empty.
    add_on: add E/2 to every visit count after Eq. 7, so that no count is underestimated.
    crude_add_on: add this number times sqrt(1 + v) to every crude tuple count, so that exploration
        goes to the unknown. v is the variance of the count's noise. Values are estimated without
        this addition.
    least_visits: reward sums are divided by at least this many standard deviations of the noise on
        a visit count. So noise on a rarely visited pair does not look like a reward.
    pool: estimate from a stage's crude and fine counts together, not from its fine counts alone.
    memory: use the counts of earlier stages too, instead of forgetting them.
    weights: the rule for the weights with which batches are added (see `evidence`).
    flow: make every batch's counts flow-consistent first (see `postprocess`).
    shrinkage: every (h, x, a) gets this many standard deviations of the noise on its visits as
        pseudo-visits. They have the mean transitions and reward of (x, a) over all steps.
    coverage_tolerance: certified relative gap at which the search for the coverage design ends,
        unless it runs out of iterations before.
    active_set: representation of the active policies: `enumerated`, `implicit`, or `auto`, which
        enumerates them if there are at most 2^24 (see `active`).
    radius_scale: factor of the radius; C of `paper`.
    radius: `paper` is line 9 of Algorithm 1 with C = `radius_scale`. `bootstrap` draws models
        from the counts. A draw's gap is the larger of two losses of value: of the estimate's best
        policy in the draw, and of the draw's best policy in the estimate. The radius is
        `radius_scale` times the (1 - delta / B)-quantile of these gaps, for B stages.
    """

    name: str = "paper"
    schedule: Literal["paper", "fill"] = "paper"
    first_stage: int = 2
    visits_per_noise: float = 0.0
    growth: float = 2.0
    exploit_share: float = 0.0
    auxiliary_share: float = 0.5
    smallest_n: int = 1
    levels: Literal["paper", "noise"] = "paper"
    threshold_scale: float = 6.0
    least_visits: float = 0.0
    add_on: bool = True
    crude_add_on: float = 0.0
    pool: bool = False
    memory: bool = False
    radius: Literal["paper", "bootstrap"] = "paper"
    radius_scale: float = 1.0
    weights: Literal["batch", "visits"] = "batch"
    flow: bool = False
    shrinkage: float = 0.0
    crude_share: float = 1 / 3
    crude_every_stage: bool = True
    best_share: float = 0.0
    likely_share: float = 0.0
    coverage_tolerance: float = 0.05
    active_set: Literal["auto", "enumerated", "implicit"] = "auto"


PAPER = Constants()

PRACTICAL = Constants(
    name="practical",
    schedule="fill",
    first_stage=0,
    visits_per_noise=2.5,
    growth=1.5,
    exploit_share=0.38,
    auxiliary_share=0.2,
    smallest_n=16,
    levels="noise",
    threshold_scale=0.0,
    least_visits=1.0,
    add_on=False,
    crude_add_on=0.2,
    pool=True,
    memory=True,
    radius="bootstrap",
    radius_scale=1.25,
    weights="visits",
    flow=True,
    shrinkage=2.0,
    crude_share=0.1,
    crude_every_stage=False,
    best_share=0.48,
    likely_share=0.48,
)

CONSTANTS = {each.name: each for each in (PAPER, PRACTICAL)}
