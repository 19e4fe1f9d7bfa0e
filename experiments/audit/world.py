"""Two neighbouring populations of users, and a batch that either population can fill.

User 0 has episode e in the first population and e' in the second; all other users have e' in both.
Episode e stays in state 0 and e' in state X - 1, both with every reward bit 1. The two populations
then differ in `CounterLayout.cells` pairs of counters, the most that replacing one user can change.

The batch is small, because each trial costs one message per noise bit that is 1. About 1e5 trials
are feasible, and can only show an epsilon of order one at a beta of order 1e-2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from riffle.common.accounting import calibrate
from riffle.common.accounting.binomial import fewest_slots
from riffle.common.accounting.least_noise import needed_bits
from riffle.common.mechanism.counters import CounterLayout, Episode, Families, Ints, Sizes
from riffle.common.mechanism.parameters import Aggregation, Guarantee, Noise, Padding
from riffle.common.mechanism.policy import TOTAL_WEIGHT
from riffle.common.mechanism.randomness import Randomness
from riffle.common.mechanism.sums import word_bits
from riffle.common.protocol.descriptor import (
    BatchDescriptor,
    Context,
    GuaranteeDocument,
    NoiseDocument,
    parse,
    serialize,
)
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.signatures import batch_id
from riffle.common.protocol.verification import check_guarantee
from riffle.node_client.environments.tabular import Step
from riffle.node_client.sealing import SealKeys

RUN_ID = "00" * 16
NEVER = 1 << 40

P_LOG2 = 3
"""p = 1/8 needs about half as many messages as fair bits, and far fewer draws than a tiny p."""

SMALLEST = Sizes(X=2, A=1, H=1)
"""The default: eight counters in ``joint``, of which one moves up and one down."""

MOST_EPSILON = 20.0
"""The largest epsilon to audit: no feasible number of trials tells a larger one from infinity."""

OVERFLOW_SHARE, MARGIN = 0.01, 1e-6
"""The share of beta for padding, and a margin for rounding, both as in calibration."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The claimed epsilon at beta, and the batch that claims it.

    If ``seed`` is None, draws come from the CSPRNG. Raises ValueError for a value out of range.
    """

    epsilon: float = 1.0
    beta: float = 1e-2
    n: int = 2
    sizes: Sizes = SMALLEST
    families: Families = "joint"
    seed: int | None = None
    aggregation: Aggregation = "messages"

    def __post_init__(self) -> None:
        if self.sizes.X < 2 or self.n < 1:
            raise ValueError("an audit needs two states and at least one user")
        if not 0.0 < self.epsilon <= MOST_EPSILON:
            raise ValueError(f"epsilon must lie in (0, {MOST_EPSILON:g}], got {self.epsilon:g}")
        if not 0.0 < self.beta < 1.0:
            raise ValueError(f"beta must lie strictly between 0 and 1, got {self.beta:g}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"a seed must not be negative, got {self.seed}")

    @property
    def layout(self) -> CounterLayout:
        """All counters of all steps."""
        return CounterLayout(self.sizes, self.families)


@dataclass(slots=True)
class ConstantEnvironment:
    """An environment whose episodes stay in one state and earn the same reward at each step."""

    sizes: Sizes
    state: int
    reward: float = 1.0
    reward_range: tuple[float, float] = (0.0, 1.0)
    absorbing: int | None = None

    def reset(self, randomness: Randomness) -> int:
        """Returns the state."""
        del randomness
        return self.state

    def step(self, action: int, randomness: Randomness) -> Step:
        """Returns the state and the reward."""
        del action, randomness
        return self.state, self.reward, False


@dataclass(frozen=True, slots=True)
class World:
    """A batch ready to run: its descriptor, the keys of every role, and the users' noise."""

    setting: Setting
    context: Context
    batch: BatchDescriptor
    noise: Noise
    analyzer: KeyPair
    outer: KeyPair
    seal_keys: SealKeys
    on_trial: Callable[[], None] = lambda: None

    @property
    def noise_bits(self) -> int:
        """The number N of noise bits of all users together on a counter."""
        return self.noise.bits * self.setting.n

    def environment(self, user: int, first: bool) -> ConstantEnvironment:
        """Returns a user's environment in the first or, if not ``first``, the second population."""
        sizes = self.setting.sizes
        return ConstantEnvironment(sizes, 0 if user == 0 and first else sizes.X - 1)

    def cells(self) -> tuple[Ints, Ints]:
        """Returns two arrays (cells,): user 0's counters in the first and the second population."""
        H, last = self.setting.sizes.H, self.setting.sizes.X - 1
        rest, ones = np.zeros(H, dtype=np.int64), np.ones(H, dtype=np.int64)
        episodes = (Episode(np.full(H + 1, state), rest, ones) for state in (0, last))
        up, down = map(self.setting.layout.encode, episodes)
        return up, down


def build(setting: Setting, noise: Noise | None = None) -> World:
    """Returns the batch of a setting.

    If ``noise`` is None, `build` chooses the noise, and raises RemoteError ``weak-guarantee`` if
    the product's own check refuses the batch. Noise that the caller gives is not checked: it is a
    planted fault that the audit must find.
    """
    analyzer, outer = KeyPair.generate(), KeyPair.generate()
    added = noise
    if added is None:  # p = 1/8, and the fewest bits per user for (epsilon, beta)-DP
        target, beta = setting.epsilon * (1.0 - MARGIN), setting.beta * (1.0 - OVERFLOW_SHARE)
        bits = needed_bits(2.0**-P_LOG2, setting.layout.cells, target, beta)
        added = Noise(-(-bits // setting.n), 1, P_LOG2)
    descriptor = _descriptor(setting, added, analyzer)
    if noise is None:
        check_guarantee(descriptor, Guarantee(setting.epsilon, setting.beta))
    context = parse(serialize(descriptor))
    keys = SealKeys.of(context, outer.public)
    return World(setting, context, descriptor, added, analyzer, outer, keys)


def calibrated_noise(setting: Setting) -> Noise:
    """Returns the noise that Riffle would choose, which has the fewest expected 1-bits."""
    required = Guarantee(setting.epsilon, setting.beta)
    return calibrate(setting.layout, setting.n, required).noise


def _descriptor(setting: Setting, noise: Noise, analyzer: KeyPair) -> BatchDescriptor:
    sizes = setting.sizes
    summed = setting.aggregation == "sums"
    draws, spend = noise.bits * setting.layout.counters, OVERFLOW_SHARE * setting.beta
    padding = Padding(1, 0)
    if not summed:
        slots = fewest_slots(setting.n, draws, noise.p, setting.epsilon, spend)
        padding = Padding(setting.layout.data_slots, slots)
    return BatchDescriptor(
        run_id=RUN_ID,
        batch_id=batch_id(RUN_ID, 0),
        shuffler_id="audit",
        deployment=0,
        aggregation=setting.aggregation,
        word_bits=word_bits(setting.n, noise) if summed else None,
        environment="audit",
        n=setting.n,
        expires_at=NEVER,
        states=sizes.X,
        actions=sizes.A,
        horizon=sizes.H,
        reward_low=0.0,
        reward_high=1.0,
        families=setting.families,
        policies=(((0,) * sizes.X,) * sizes.H,),
        weights=(TOTAL_WEIGHT,),
        noise=NoiseDocument.of(noise),
        data_slots=padding.data_slots,
        noise_slots=padding.noise_slots,
        guarantee=GuaranteeDocument(
            epsilon=setting.epsilon, beta=setting.beta, dishonest_fraction=0.0
        ),
        analyzer_key=analyzer.public.hex(),
        test_seed=setting.seed,
    )
