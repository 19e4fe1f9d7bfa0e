"""The constants of SDP-PE, in two declared sets: `paper` (literal) and `practical`.

`paper` is paper 000 as written: C_1 = 6, iota = log(2 H A K / delta), the add-on of Eq. 7, the
radius of line 9 with C = 1, L_b = 2^b from b = 1, and only the counts of the fine batch. `paper`
learns nothing at K = 20,000, because the threshold C_1 E H^2 iota is above a million visits.

`practical` is one set for every environment, family, epsilon and K. Every field that differs from
`paper` is one departure from the paper. No departure looks at data except through private counts.
docs/ablation.md says what each departure is worth and how the numbers were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Constants:
    """Every number and choice that shapes a run of SDP-PE; the defaults are those of `paper`.

    schedule: `paper` is lines 1-4 of Algorithm 1; `fill` fits as many whole stages as it can. It
        raises the factor of growth until they use all episodes that `exploit_share` leaves.
    growth: the factor from one stage's length to the next; with `fill`, the least factor.
    first_stage: L_1, the length of the first stage; 0 derives it from `visits_per_noise`.
    visits_per_noise: if `first_stage` is 0, L_1 is large enough for v s visits to every (h, x, a).
        v is this number, and s is the standard deviation of a crude counter's noise, but at least
        1. So noise, not K, sets the size of the first batches, unless only one stage fits into K.
    crude_share: share of a stage's episodes that explore crudely. With levels `noise` and X = 1
        there are no transitions to learn, so crude batches have only the smallest size.
    crude_every_stage: if false, only the first stage explores crudely. Later stages compute W and
        the crude model P~cru from `memory`, to which a crude batch of one layer would add little.
    exploit_share: share of K for a last deployment of the best policy (0: none).
    smallest_n: no batch has fewer reports; smaller batches are rounded up to this size.
    auxiliary_share: share of the fine batch that runs pi_0, the policies of Algorithm 2; the rest
        runs pi^ref, the mixture of Eq. 4.
    best_share: share of the fine batch that runs the best policy in the previous stage's model. In
        the first stage it is 0. Counts of this policy matter most when policies are eliminated.
    likely_share: share of the fine batch that runs the best policies of 50 draws of the bootstrap.
        So a policy is explored more if it is more likely to be the best (Thompson 1933). Needs
        radius `bootstrap`.
    threshold_scale: see `levels`; C_1 of `paper`.
    levels: `paper`: W holds the tuples whose count is at most `threshold_scale` (C_1) E H^2 iota,
        and Eq. 7 has tolerance E/4. `noise`: W holds the tuples whose count is at most
        `threshold_scale` standard deviations of its noise, and Eq. 7 has tolerance 0. At scale 0
        and with `crude_add_on` above 0, W is empty and no row of the model loses a transition.
    add_on: add E/2 to every visit count after Eq. 7, so that no count is underestimated.
    crude_add_on: add this many times sqrt(1 + v) to every crude tuple count, where v is the
        variance of the count's noise, so that exploration goes to the unknown. Values are estimated
        without this addition.
    least_visits: reward sums are divided by at least this many standard deviations of a visit
        count's noise, so that noise on a rarely visited pair does not look like a reward.
    pool: estimate from a stage's crude and fine counts together, not from its fine counts alone.
    memory: use the counts of earlier stages too, instead of forgetting them.
    weights: the rule for the weights with which batches are added (see `evidence`).
    flow: make every batch's counts flow-consistent first (see `postprocess`).
    shrinkage: every (h, x, a) gets this many standard deviations of the noise on its visits as
        pseudo-visits, with the mean transitions and reward of (x, a) over all steps.
    coverage_tolerance: certified relative gap at which the search for the coverage design ends, if
        its iterations do not end first.
    active_set: representation of the active policies: `enumerated`, `implicit`, or `auto`, which
        enumerates them while there are at most 2^24 (see `active`). The choice changes no
        guarantee.
    radius_scale: factor of the radius; C of `paper`.
    radius: `paper` is line 9 of Algorithm 1 with C = `radius_scale`. `bootstrap` is `radius_scale`
        times the quantile 1 - delta / B, for B stages, of gaps in value. Each gap compares the
        model's best policy with the best policy of resampled counts (see `estimation`).
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
