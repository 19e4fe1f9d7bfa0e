"""What the coordinator answers: response models. Values count rewards scaled to [0, 1].

An epsilon without bound (a seeded test batch) is the string "Infinity", which JSON has no number
for.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from riffle.common.mechanism.noise import Trust
from riffle.common.protocol.descriptor import NoiseKind
from riffle.common.protocol.messages import Conservation
from riffle.coordinator.batches.keys import KeyState
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.states import DeploymentState, RunState

Nested = list[Any]


class View(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class RunView(View):
    """A run and how far it is."""

    id: str
    name: str
    state: RunState
    message: str = Field(description="why it failed")
    trouble: str | None = Field(description="what keeps it from going on now, if anything")
    spec: RunSpec
    created_at: float
    ended_at: float | None
    deployments: int
    episodes: int = Field(description="episodes counted")
    stage: int
    active: int | None = Field(description="policies still active; null when nobody can count them")


class RunsView(View):
    """All runs, oldest first."""

    runs: list[RunView]


class MixtureView(View):
    """Policies (M, H, X) with integer weights over 2**32."""

    policies: Nested
    weights: list[int]
    probabilities: list[float]


class NoiseView(View):
    """Noise of a batch, by kind (`common.protocol.descriptor.NoiseDocument`).

    ``bernoulli``: bits of one user and counter, each 1 with probability p_numerator / 2**p_log2;
    ``flips``: the probability that a user flips a bit; ``laplace``: q; ``binomial``: fair bits.
    """

    kind: NoiseKind
    bits: int
    p_numerator: int
    p_log2: int
    variance: float = Field(description="of one counter of the batch")
    expected_ones: float = Field(description="on one counter of the batch")


class DeploymentView(View):
    """What was deployed. Nothing here changes, so the index serves as its ETag."""

    index: int
    step: int = Field(description="the learner's deployment; issues of the same one share it")
    stage: int
    purpose: str
    n: int
    layer: int | None
    mixture: MixtureView
    batch_id: str
    trust: Trust
    expires_at: int
    messages: int = Field(description="L, messages of one report")
    report_bytes: int = Field(description="bytes of one report, as uploaded")
    noise: NoiseView


class ProgressView(DeploymentView):
    """A deployment and where it stands."""

    state: DeploymentState
    acknowledged: bool
    episodes_executed: int
    issued_at: float
    settled_at: float | None
    timings: dict[str, float] = Field(
        description="seconds waiting, fetching, opening, planning, storing, acknowledging"
    )


class DeploymentsView(View):
    """All deployments of a run in order."""

    deployments: list[ProgressView]


class CountsView(View):
    """Unbiased private counts, before post-processing, with the variance of each entry's noise.

    Shapes (layers, X, A, X), (layers, X, A), (layers, X, A); rewards are null out of scope.
    """

    transitions: Nested
    visits: Nested
    rewards: Nested | None
    transition_variance: float
    visit_variance: float
    reward_variance: float


class ValueView(View):
    """Value of the deployed mixture: |value - V| <= radius with probability ``confidence``."""

    value: float
    radius: float
    noise_deviation: float
    confidence: float


class SpendView(View):
    """What a batch spent. ``used`` is false when more reports were dishonest than promised."""

    deployment: int
    batch_id: str
    trust: Trust = Field(description="against whom: shuffle, local or central, see privacy.md")
    n: int
    epsilon_lower: float
    epsilon_upper: float
    beta: float
    dishonest_fraction: float = Field(description="the promise, gamma")
    dishonest_reports: int = Field(description="the guarantee holds up to so many")
    used: bool
    messages: int
    opened: int
    failed: int
    noise: NoiseView
    episodes_executed: int
    recorded_at: float


class DeploymentDetail(ProgressView):
    """A deployment with its private counts, once counted."""

    counts: CountsView | None
    value_estimate: ValueView | None
    spend: SpendView | None


class LedgerView(View):
    """All spends of a run and what they come to."""

    unit: Literal["one user: one episode, one report over all runs"] = (
        "one user: one episode, one report over all runs"
    )
    neighbours: Literal["replace one user"] = "replace one user"
    composition: Literal["parallel: every user is in one batch"] = (
        "parallel: every user is in one batch"
    )
    epsilon: float
    beta: float
    budget_epsilon: float
    budget_beta: float
    within_budget: bool
    entries: list[SpendView]


class StageView(View):
    """A finished stage; see `coordinator.learning.learner.StageResult`."""

    deployment: int
    stage: int
    L_b: int
    episodes: int
    active_before: int | None
    active_after: int | None
    eliminated: int | None
    decisions_eliminated: int
    radius: float
    best_value: float
    E: float
    infrequent: float
    coverage_gap: float
    coverage_iterations: int
    policy: Nested


STAGE_COLUMNS = tuple(name for name in StageView.model_fields if name != "policy")
"""Columns of the stages as CSV, for a run that has none."""


class StagesView(View):
    """All finished stages in order."""

    stages: list[StageView]


class BatchConservation(View):
    """A deployment's messages from the nodes' reports to the counts.

    Once settled, opened + failed = n L = what the shuffler says it handed over.
    """

    deployment: int
    batch_id: str
    state: DeploymentState
    n: int
    expected: int = Field(description="n L")
    opened: int | None = Field(description="messages that opened; null until settled")
    failed: int | None = Field(description="messages that did not; null until settled")
    shuffler: Conservation | None = Field(description="its record, as far as it is told here")
    trouble: str | None = Field(description="why there is no record of the shuffler's")
    balanced: bool | None = Field(description="null: not known, for want of the record")


class ConservationView(View):
    """All batches of a run; sums are messages, of the batches of which they are known."""

    batches: list[BatchConservation]
    accepted: int
    held: int
    forwarded: int
    dropped: int
    opened: int
    failed: int
    balanced: bool | None = Field(
        description="false: a batch does not balance; null: none is known not to, some not at all"
    )


class KeyView(View):
    """A key of the analyzer's, without its private half."""

    id: str
    public: str
    state: KeyState
    since: int = Field(description="in this state since, seconds since 1970")


class KeysView(View):
    """All keys there ever were, oldest first."""

    keys: list[KeyView]


class ResultView(View):
    """The answer of a run so far, what it cost and where the time went."""

    state: RunState
    message: str
    policy: Nested | None = Field(description="(H, X) actions")
    value_estimate: float | None
    active: int | None
    epsilon: float = Field(description="upper bound of what any user spent")
    beta: float
    within_budget: bool
    episodes: int = Field(description="episodes counted")
    episodes_executed: int = Field(description="upper bound: also of batches that were given up")
    episodes_planned: int = Field(description="K")
    reports: int = Field(description="reports in all batches that were opened")
    messages_forwarded: int
    messages_counted: int = Field(description="data, noise and dummies")
    failed: int = Field(description="messages that did not open or named no counter")
    policy_switches: int = Field(description="changes of the deployed mixture")
    timings: dict[str, float] = Field(description="seconds by kind, all batches")
    constants: dict[str, str | int | float | bool]


class EventView(View):
    """Something that happened in a run; `data` is what the stream of events tells of it."""

    id: int
    kind: str
    at: float
    data: dict[str, Any]


class HistoryView(View):
    """What happened in a run so far, after some number."""

    events: list[EventView]


class BandView(View):
    """Mean and both ends of its interval."""

    mean: list[float]
    low: list[float]
    high: list[float]


class BandsView(View):
    """Pointwise Student t intervals of the mean over runs alike but for their ids and seeds."""

    runs: int
    confidence: float
    episodes: list[float]
    regret: BandView
    value: BandView


class TruthView(View):
    """True values supplied by the operator of a simulated environment; see
    `coordinator.learning.true_values`.

    One entry a deployment that executed episodes; ``episodes`` and ``regret`` are cumulative.
    """

    optimal_value: float | None = Field(description="V*; null when nothing was supplied")
    deployments: list[int]
    episodes: list[float]
    value: list[float] = Field(description="V of the deployed mixture")
    regret: list[float] = Field(description="exact pseudo-regret")
    bands: BandsView | None = Field(description="null unless another run came as far")


class ReadyView(View):
    """What the service depends on, each ``ok`` or what is wrong."""

    store: str
    analyzer: str = Field(description="its key opens every batch that is not settled")
    shuffler: str
    clock: str = Field(description="within 30 s of the shuffler's")
    disk: str = Field(description="free space for the data")
