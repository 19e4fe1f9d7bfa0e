"""Makes a batch from a learner's deployment: its noise, its padding and its descriptor.

The noise of every batch is calibrated to the run's whole (epsilon, beta). A user is in only one
batch (`coordinator.batches.ledger`), so batches do not share the budget.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from riffle.common import accounting
from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import CounterLayout
from riffle.common.mechanism.parameters import BatchNoise, Padding
from riffle.common.mechanism.workflow import Symbols
from riffle.common.protocol.descriptor import (
    BatchDescriptor,
    Epoch,
    GuaranteeDocument,
    NoiseDocument,
    first_fault,
    serialize,
)
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.hpke import OVERHEAD
from riffle.common.protocol.signatures import batch_id
from riffle.coordinator.batches.ledger import Spend, planned
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec

MAX_BATCH_BYTES = 1 << 30
"""The most bytes of messages that a batch may have. The shuffler's own limit has this default."""


@dataclass(frozen=True, slots=True)
class Issue:
    """A deployment issued as a batch, with its descriptor (parsed and as bytes) and its spend.

    ``index`` is the batch's number in the run. ``step`` is the deployment's number in the run. If a
    deployment is issued again, the step stays the same.
    """

    index: int
    step: int
    deployment: Deployment
    descriptor: BatchDescriptor
    data: bytes
    spend: Spend


def noise_variance(spec: RunSpec, n: int, layer: int | None) -> float:
    """Returns the variance of the noise on one counter of a batch of n honest reports."""
    return calibrated(spec, n, layer).noise.variance(n)


def calibrated(spec: RunSpec, n: int, layer: int | None) -> accounting.Calibration[BatchNoise]:
    """Returns noise and padding of a batch of n reports.

    Raises RemoteError ``batch-too-small`` if a report would need more than the run's
    ``max_messages``. The error's detail names the smallest n that works.
    """
    layout = spec.layout(layer)
    try:
        if spec.trust != "shuffle":
            return _calibrated_to_one_message(spec, layout, n)
        kind, most = spec.calibration, spec.max_messages
        return accounting.calibrate(layout, n, spec.budget, kind, most, spec.aggregation)
    except accounting.CalibrationError as error:
        scope = "all layers" if layer is None else f"layer {layer}"
        raise RemoteError("batch-too-small", f"n={n}, {scope}: {error}") from error


def _calibrated_to_one_message(
    spec: RunSpec, layout: CounterLayout, n: int
) -> accounting.Calibration[BatchNoise]:
    """Calibrates a local or central batch. Each report is one message without noise slots."""
    cells, counters, padding = layout.cells, layout.counters, Padding(1, 0)
    noise: BatchNoise
    if spec.trust == "local":
        noise = accounting.calibrate_local(cells, spec.epsilon, spec.beta)
    else:
        noise = accounting.calibrate_central(cells, counters, spec.epsilon, spec.beta)
    event = accounting.BatchEvent(noise, padding, n, spec.dishonest_fraction, cells, counters)
    return accounting.Calibration(noise, padding, accounting.account(event, spec.beta))


@dataclass(frozen=True, slots=True)
class Issuer:
    """Makes batches for the shuffler ``shuffler_id``, with messages sealed to the active key.

    ``active_key`` returns the analyzer's public key (hex); ``clock`` returns seconds since 1970.
    """

    shuffler_id: str
    active_key: Callable[[], str]
    clock: Callable[[], float]
    max_owner_share: float = 1.0
    epoch_seconds: int | None = None

    def expires_at(self, seconds: int) -> int:
        """Returns the expiry of a batch that is issued now and may be open for ``seconds``.

        With epochs, the batch expires before the next epoch ends, because the shuffler takes no
        batch of a later epoch.
        """
        now = int(self.clock())
        epoch = Epoch.of(now, self.epoch_seconds)
        last = math.inf if epoch is None else 2 * epoch.end - epoch.start - 1
        return int(min(now + seconds, last))

    def check(self, spec: RunSpec, n: int, layer: int | None) -> None:
        """Refuses a batch of n reports that the shuffler would not take.

        Raises RemoteError ``batch-too-small`` if a report would need more than ``max_messages``, or
        if an owner's share is less than one slot. Raises RemoteError ``invalid-spec``, with advice,
        if the batch is too large to hand over.
        """
        if n * self.max_owner_share < 1.0:
            least = math.ceil(1.0 / self.max_owner_share)
            raise RemoteError(
                "batch-too-small",
                f"an owner may hold {self.max_owner_share:g} of a batch, and of n={n} reports that "
                f"is none: n must be at least {least}",
            )
        calibration = calibrated(spec, n, layer)
        layout = spec.layout(layer)
        # For a batch of sums, the shuffler hands over the reports' keys and one vector.
        bits, message_bytes = calibration.word_bits, OVERHEAD + Symbols.of(spec.trust, layout).size
        message_bytes = sums.KEY_BYTES if bits else message_bytes
        L, largest = calibration.padding.messages, MAX_BATCH_BYTES
        if (size := n * L * message_bytes + layout.counters * (bits or 0) // 8) <= largest:
            return
        advice = f"use fewer episodes a batch, at most about {largest // (L * message_bytes)}"
        ones = calibration.account.expected_ones_per_report
        if not bits and n * ones * message_bytes > largest:
            advice = (
                f"the noise of its {layout.counters} counters alone takes more: "
                "use a larger epsilon, or fewer states, actions or steps"
            )
        detail = f"{n} reports of {L} messages take {size} bytes, a batch at most {largest} bytes"
        raise RemoteError("invalid-spec", f"{detail}; {advice}")

    def issue(
        self, run_id: str, spec: RunSpec, deployment: Deployment, *, index: int, step: int
    ) -> Issue:
        """Returns the batch of ``deployment``, which expires after at most `RunSpec.batch_seconds`.

        Raises RemoteError as `check` does, and ``invalid-spec`` if no descriptor can hold the
        batch.
        """
        self.check(spec, deployment.n, deployment.layer)
        calibration = calibrated(spec, deployment.n, deployment.layer)
        mixture = deployment.mixture
        try:
            descriptor = BatchDescriptor(
                run_id=run_id,
                batch_id=batch_id(run_id, index),
                shuffler_id=self.shuffler_id,
                deployment=index,
                trust=spec.trust,
                aggregation=spec.aggregation,
                word_bits=calibration.word_bits,
                environment=spec.environment,
                n=deployment.n,
                expires_at=self.expires_at(spec.batch_seconds),
                states=spec.states,
                actions=spec.actions,
                horizon=spec.horizon,
                reward_low=spec.reward_low,
                reward_high=spec.reward_high,
                families=spec.families,
                support=spec.support,
                homogeneous=spec.homogeneous,
                layer=deployment.layer,
                policies=tuple(tuple(map(tuple, policy)) for policy in mixture.policies.tolist()),
                weights=tuple(mixture.weights.tolist()),
                noise=NoiseDocument.of(calibration.noise),
                data_slots=calibration.padding.data_slots,
                noise_slots=calibration.padding.noise_slots,
                guarantee=GuaranteeDocument(
                    epsilon=spec.epsilon, beta=spec.beta, dishonest_fraction=spec.dishonest_fraction
                ),
                owner_share=self.max_owner_share,
                epoch_seconds=self.epoch_seconds,
                analyzer_key=self.active_key(),
                test_seed=spec.test_seed,
                episode_seconds=spec.episode_seconds,
            )
        except ValidationError as error:
            raise RemoteError(
                "invalid-spec", f"deployment {index}: {first_fault(error)}"
            ) from error
        data = serialize(descriptor)
        return Issue(index, step, deployment, descriptor, data, planned(descriptor))


def same_deployment(one: Deployment, other: Deployment) -> bool:
    """Returns whether two deployments ask for the same batch."""
    return (
        (one.stage, one.purpose, one.n, one.layer)
        == (other.stage, other.purpose, other.n, other.layer)
    ) and one.mixture.same_as(other.mixture)
