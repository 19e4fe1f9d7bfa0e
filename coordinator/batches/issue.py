"""From a learner's deployment to a batch: noise, padding, descriptor. Pure.

Noise is calibrated to the run's (epsilon, beta): under trust ``shuffle`` with N = honest_reports(n,
gamma) * bits Bernoulli bits a counter (`common.accounting.calibrate`), under ``local`` and
``central`` without regard to n (`common.accounting.calibrate`). A user is in one batch of one run,
so every batch may spend the whole budget and a run's spend is the largest of its batches, not their
sum.
"""

from dataclasses import dataclass

from pydantic import ValidationError

from riffle.common.accounting import (
    BatchEvent,
    Calibration,
    CalibrationError,
    account,
    calibrate,
    calibrate_central,
    calibrate_local,
)
from riffle.common.mechanism.counters import CounterLayout
from riffle.common.mechanism.noise import BatchNoise, Padding
from riffle.common.mechanism.workflow import Symbols
from riffle.common.protocol.descriptor import (
    BatchDescriptor,
    GuaranteeDocument,
    NoiseDocument,
    batch_id,
    first_fault,
    serialize,
)
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.hpke import OVERHEAD
from riffle.coordinator.batches.ledger import Spend, planned
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec

MAX_BATCH_BYTES = 1 << 30
"""Largest batch, as bytes of its n L messages: it is fetched whole. Shufflers have this default."""


@dataclass(frozen=True, slots=True)
class Party:
    """Who takes part on this side: the shuffler's id and the analyzer's public key (hex)."""

    shuffler_id: str
    analyzer_key: str


@dataclass(frozen=True, slots=True)
class Issue:
    """A deployment as issued: index, the learner's step, descriptor with its bytes, what it spends.

    The spend is recomputed from the descriptor, not taken from the calibration. Issues of one step
    (a batch that was abandoned, and the next try) share step and deployment.
    """

    index: int
    step: int
    deployment: Deployment
    descriptor: BatchDescriptor
    data: bytes
    spend: Spend


@dataclass(frozen=True, slots=True)
class PlannedNoise:
    """The `NoiseModel` that learners get: variance of one counter's noise, all reports honest."""

    spec: RunSpec

    def __call__(self, n: int, layer: int | None) -> float:
        """Variance of the noise on one counter of a batch of n reports."""
        return calibrated(self.spec, n, layer).noise.variance(n)


def calibrated(spec: RunSpec, n: int, layer: int | None) -> Calibration[BatchNoise]:
    """Noise and padding of a batch of n reports.

    Raises:
        RemoteError: ``batch-too-small`` when a report would need more than ``max_messages``; the
            detail names the smallest n that works.
    """
    layout = CounterLayout(spec.sizes, spec.families, layer)
    try:
        if spec.trust != "shuffle":
            return _of_one_message(spec, layout, n)
        return calibrate(
            n=n,
            dishonest_fraction=spec.dishonest_fraction,
            cells=layout.cells,
            counters=layout.counters,
            data_slots=layout.data_slots,
            epsilon=spec.epsilon,
            beta=spec.beta,
            calibration=spec.calibration,
            max_messages=spec.max_messages,
            sizes=spec.sizes,
        )
    except CalibrationError as error:
        scope = "all layers" if layer is None else f"layer {layer}"
        raise RemoteError("batch-too-small", f"n={n}, {scope}: {error}") from error


def _of_one_message(spec: RunSpec, layout: CounterLayout, n: int) -> Calibration[BatchNoise]:
    """Calibration of a local or central batch: its noise needs no messages."""
    cells, counters, padding = layout.cells, layout.counters, Padding(1, 0)
    noise: BatchNoise
    if spec.trust == "local":
        noise = calibrate_local(cells=cells, epsilon=spec.epsilon, beta=spec.beta)
    else:
        noise = calibrate_central(
            cells=cells, counters=counters, epsilon=spec.epsilon, beta=spec.beta
        )
    event = BatchEvent(noise, padding, n, spec.dishonest_fraction, cells, counters)
    return Calibration(noise, padding, account(event, spec.beta))


def issue(
    spec: RunSpec,
    run_id: str,
    party: Party,
    deployment: Deployment,
    *,
    index: int,
    step: int,
    expires_at: int,
) -> Issue:
    """The batch that carries out ``deployment``.

    Raises:
        RemoteError: ``batch-too-small``; ``invalid-spec`` when no descriptor can say it or the
            batch would be too large to hand over.
    """
    calibration = calibrated(spec, deployment.n, deployment.layer)
    mixture = deployment.mixture
    try:
        descriptor = BatchDescriptor(
            run_id=run_id,
            batch_id=batch_id(run_id, index),
            shuffler_id=party.shuffler_id,
            deployment=index,
            trust=spec.trust,
            environment=spec.environment,
            n=deployment.n,
            expires_at=expires_at,
            states=spec.states,
            actions=spec.actions,
            horizon=spec.horizon,
            reward_low=spec.reward_low,
            reward_high=spec.reward_high,
            families=spec.families,
            layer=deployment.layer,
            policies=tuple(tuple(map(tuple, policy)) for policy in mixture.policies.tolist()),
            weights=tuple(mixture.weights.tolist()),
            noise=NoiseDocument.of(calibration.noise),
            data_slots=calibration.padding.data_slots,
            noise_slots=calibration.padding.noise_slots,
            guarantee=GuaranteeDocument(
                epsilon=spec.epsilon, beta=spec.beta, dishonest_fraction=spec.dishonest_fraction
            ),
            analyzer_key=party.analyzer_key,
            test_seed=spec.test_seed,
        )
    except ValidationError as error:
        raise RemoteError("invalid-spec", f"deployment {index}: {first_fault(error)}") from error
    check_bytes(spec, deployment.n, deployment.layer)
    data = serialize(descriptor)
    return Issue(index, step, deployment, descriptor, data, planned(descriptor))


def check_bytes(spec: RunSpec, n: int, layer: int | None) -> None:
    """Refuse a batch of n reports that is too large to hand over.

    Raises:
        RemoteError: ``invalid-spec``, saying what to change; ``batch-too-small`` as `calibrated`.
    """
    made = calibrated(spec, n, layer)
    layout = CounterLayout(spec.sizes, spec.families, layer)
    L, each = made.padding.messages, OVERHEAD + Symbols.of(spec.trust, layout).size
    if (size := n * L * each) <= MAX_BATCH_BYTES:
        return
    advice = f"use fewer episodes a batch, at most about {MAX_BATCH_BYTES // (L * each)}"
    if n * made.account.expected_ones_per_report * each > MAX_BATCH_BYTES:
        advice = (
            f"the noise of its {layout.counters} counters alone takes more: "
            "use a larger epsilon, or fewer states, actions or steps"
        )
    raise RemoteError(
        "invalid-spec",
        f"{n} reports of {L} messages take {size} bytes, a batch at most {MAX_BATCH_BYTES} bytes; "
        + advice,
    )


def same_deployment(one: Deployment, other: Deployment) -> bool:
    """Whether two deployments ask for the same batch."""
    return (
        (one.stage, one.purpose, one.n, one.layer)
        == (other.stage, other.purpose, other.n, other.layer)
    ) and one.mixture.same_as(other.mixture)
