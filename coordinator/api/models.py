"""The response models of the coordinator's API. Values of policies assume rewards in [0, 1].

An infinite epsilon is the string "Infinity", because JSON has no such number.
"""

from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.common.protocol.descriptor import NoiseKind
from riffle.common.protocol.wire import Conservation
from riffle.coordinator.batches.counts import ValueEstimate
from riffle.coordinator.batches.keys import KeyRecord
from riffle.coordinator.learning.true_values import Bands
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.states import DeploymentState, RunState
from riffle.coordinator.store.records import EventRecord


def _without_numpy(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


_FROM_ARRAY = BeforeValidator(_without_numpy)
Nested = Annotated[list[Any], _FROM_ARRAY]
Floats = Annotated[list[float], _FROM_ARRAY]
Largest = Annotated[float, BeforeValidator(np.max)]


class Answer(BaseModel):
    """Base of all models. Reads fields from a record's attributes; turns arrays into lists."""

    model_config = ConfigDict(frozen=True, from_attributes=True, ser_json_inf_nan="strings")


class Run(Answer):
    """A run and its progress."""

    id: str
    name: str
    state: RunState
    message: str = Field(description="why it failed")
    trouble: str | None = Field(description="why it cannot go on now; null if it can")
    spec: RunSpec
    created_at: float
    ended_at: float | None
    deployments: int
    episodes: int = Field(description="episodes counted")
    suspicious_batches: int = Field(description="batches marked suspicious")
    stage: int
    active: int | None = Field(description="policies still active; null when nobody can count them")
    value_estimate: float | None = Field(None, description="value of the policy learned so far")
    radius: float | None = Field(
        None,
        description="how much better the best policy may be at most; in manual mode, how wrong the "
        "estimate may be at most",
    )


class Runs(Answer):
    """All runs, oldest first."""

    runs: list[Run]


class Mixture(Answer):
    """Policies (M, H, X) with integer weights that sum to 2**32."""

    policies: Nested
    weights: Annotated[list[int], _FROM_ARRAY]
    probabilities: Floats


class Noise(Answer):
    """The noise of a batch, by kind (`common.protocol.descriptor.NoiseDocument`).

    Let p = p_numerator / 2**p_log2. ``bernoulli``: each user adds ``bits`` bits to each counter;
    each bit is 1 with probability p. ``flips``: each user flips each bit with probability p.
    ``laplace``: noise is symmetric, with Pr[z + 1] / Pr[z] = p for z >= 0. ``binomial``: noise is
    the sum of ``bits`` fair bits.
    """

    kind: NoiseKind
    bits: int
    p_numerator: int
    p_log2: int
    variance: float = Field(description="variance of one counter's noise")
    expected_ones: float = Field(description="expected noise bits of 1 on one counter")


class Deployment(Answer):
    """A deployment as issued. None of these fields changes, so the index serves as ETag."""

    index: int
    step: int = Field(description="number of the learner's deployment, the same for all its issues")
    stage: int
    purpose: str
    n: int
    layer: int | None
    mixture: Mixture
    batch_id: str
    trust: Trust
    aggregation: Aggregation
    expires_at: int
    messages: int = Field(description="L, messages of one report")
    report_bytes: int = Field(description="bytes of one report, as uploaded")
    noise: Noise


class DeploymentProgress(Deployment):
    """A deployment and its progress."""

    state: DeploymentState
    acknowledged: bool
    episodes_executed: int
    issued_at: float
    settled_at: float | None
    timings: dict[str, float] = Field(
        description="seconds waiting, fetching, opening, planning, storing, acknowledging"
    )


class Deployments(Answer):
    """All deployments of a run, in order."""

    deployments: list[DeploymentProgress]


class Counts(Answer):
    """Unbiased private counts before post-processing, and each family's largest noise variance.

    Shapes: transitions (layers, X, A, X), visits and rewards (layers, X, A). Rewards are null if
    the batch does not count them.
    """

    transitions: Nested
    visits: Nested
    rewards: Nested | None
    transition_variance: Largest
    visit_variance: Largest
    reward_variance: Largest


class Spend(Answer):
    """The spend of a batch.

    ``used`` is false if more reports were dishonest than promised, or if the counts of a batch of
    sums show lies. The fields from ``suspicious`` on are the result of the test for dishonest
    reports (`coordinator.batches.counts`); they are null if the counts were not tested.
    """

    deployment: int
    batch_id: str
    trust: Trust = Field(description="trust model, see privacy.md")
    aggregation: Aggregation = Field(description="messages or sums, see privacy.md")
    n: int
    epsilon_lower: float
    epsilon_upper: float
    beta: float
    dishonest_fraction: float = Field(description="gamma, as promised")
    dishonest_reports: int = Field(description="most dishonest reports that the guarantee allows")
    used: bool
    messages: int
    opened: int
    failed: int
    noise: Noise
    episodes_executed: int
    recorded_at: float
    suspicious: bool | None = Field(
        None, description="counts are very unlikely from honest reports"
    )
    test: str | None = Field(None, description="name of the test that the counts fail worst")
    deviation: float | None = Field(
        None, description="standard deviations by which the counts fail that test"
    )
    chance: float | None = Field(
        None, description="bound on the probability of such a deviation if all reports are honest"
    )


class DeploymentDetail(DeploymentProgress):
    """A deployment with its private counts, if it is counted."""

    counts: Counts | None
    value_estimate: ValueEstimate | None
    spend: Spend | None


class Ledger(Answer):
    """All spends of a run and their composition."""

    unit: str = "one user: one episode, one report over all runs"
    neighbours: str = "replace one user"
    composition: str = "parallel: every user is in one batch"
    epsilon: float
    beta: float
    budget_epsilon: float
    budget_beta: float
    within_budget: bool
    entries: list[Spend]


class Stage(Answer):
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


STAGE_COLUMNS = tuple(name for name in Stage.model_fields if name != "policy")
"""The header of the stages' CSV file for a run that has no stages."""


class Stages(Answer):
    """All finished stages, in order."""

    stages: list[Stage]


class BatchConservation(Answer):
    """A batch's messages, from the nodes' reports to the counts.

    Once the batch is counted or rejected, opened + failed = n L, the number of messages that the
    shuffler handed over.
    """

    deployment: int
    batch_id: str
    state: DeploymentState
    n: int
    expected: int = Field(description="n L")
    opened: int | None = Field(description="messages that opened; null until settled")
    failed: int | None = Field(description="messages that did not open; null until settled")
    shuffler: Conservation | None = Field(description="the shuffler's record for coordinators")
    trouble: str | None = Field(description="why the shuffler's record is missing")
    balanced: bool | None = Field(description="null without the shuffler's record")


class RunConservation(Answer):
    """All batches of a run, and sums of their messages. Unknown numbers count as 0 in the sums."""

    batches: list[BatchConservation]
    accepted: int
    held: int
    forwarded: int
    dropped: int
    opened: int
    failed: int
    balanced: bool | None = Field(
        description="false: a batch does not balance; null: some are unknown, the others balance"
    )


class Keys(Answer):
    """All keys that ever existed, oldest first."""

    keys: list[KeyRecord]


class Result(Answer):
    """The answer of a run so far, the privacy that it cost, and the time that it took."""

    state: RunState
    message: str
    policy: Nested | None = Field(description="(H, X) actions")
    value_estimate: float | None
    active: int | None
    epsilon: float = Field(description="upper bound on what any user spent")
    beta: float
    within_budget: bool
    episodes: int = Field(description="episodes counted")
    episodes_executed: int = Field(description="upper bound, batches given up included")
    episodes_planned: int = Field(description="K")
    reports: int = Field(description="reports in all batches that were opened")
    messages_forwarded: int
    messages_counted: int = Field(description="data, noise and dummies")
    failed: int = Field(description="messages that did not open or named no counter")
    suspicious_batches: int = Field(description="batches marked suspicious")
    policy_switches: int = Field(description="changes of the deployed mixture")
    timings: dict[str, float] = Field(description="seconds by kind, all batches")
    constants: dict[str, str | int | float | bool]


class History(Answer):
    """The events of a run so far, from number ``after`` + 1 on."""

    events: list[EventRecord]


class TrueValueCurve(Answer):
    """True values that an operator supplied (`coordinator.learning.true_values`), and regret.

    Each list has one entry for each deployment that has a true value and executed episodes.
    ``episodes`` and ``regret`` are cumulative.
    """

    optimal_value: float | None = Field(description="V*; null when nothing was supplied")
    deployments: list[int]
    episodes: Floats
    value: Floats = Field(description="V of the deployed mixture")
    regret: Floats = Field(description="exact pseudo-regret")
    bands: Bands | None = Field(description="null unless another run has as many episodes")


class Readiness(Answer):
    """The state of each dependency of the service: ``ok`` or a description of the fault."""

    store: str
    analyzer: str = Field(description="has the keys of all unsettled batches")
    shuffler: str
    clock: str = Field(description="within 30 s of the shuffler's")
    disk: str = Field(description="free space for the data folder")

    @property
    def ready(self) -> bool:
        """Returns whether all dependencies are ``ok``."""
        return all(status == "ok" for status in self.model_dump().values())
