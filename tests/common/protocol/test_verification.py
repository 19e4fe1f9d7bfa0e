"""Each party recomputes the guarantee and trusts no descriptor's claim."""

import pytest

from riffle.common.accounting import account, calibrate
from riffle.common.mechanism.parameters import Guarantee
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.verification import batch_event, check_guarantee
from tests.common.descriptors import descriptor

N, BETA = 200, 1e-5


def calibrated(
    epsilon: float, fraction: float = 0.0, claim: float | None = None
) -> BatchDescriptor:
    """A batch whose noise gives ``epsilon`` and that claims ``claim``."""
    made = calibrate(descriptor(n=N).layout, N, Guarantee(epsilon, BETA, fraction))
    return descriptor(
        n=N,
        noise={
            "bits": made.noise.bits,
            "p_numerator": made.noise.p_numerator,
            "p_log2": made.noise.p_log2,
        },
        noise_slots=made.padding.noise_slots,
        guarantee={
            "epsilon": epsilon if claim is None else claim,
            "beta": BETA,
            "dishonest_fraction": fraction,
        },
    )


def test_calibrated_noise_is_accepted() -> None:
    batch = calibrated(1.0)
    result = check_guarantee(batch, Guarantee(1.0, BETA))
    assert result.epsilon_lower <= result.epsilon_upper <= 1.0
    assert result.epsilon_upper > 0.9


@pytest.mark.parametrize(
    "required",
    [
        Guarantee(0.9, BETA),  # stronger epsilon
        Guarantee(1.0, BETA / 100),  # stronger beta
        Guarantee(1.0, BETA, 0.2),  # more dishonest reports to be survived
    ],
)
def test_a_guarantee_below_the_owners_is_refused(required: Guarantee) -> None:
    with pytest.raises(RemoteError) as caught:
        check_guarantee(calibrated(1.0), required)
    assert caught.value.slug == "weak-guarantee"


def test_a_promise_that_the_noise_does_not_keep_is_refused() -> None:
    lying = calibrated(1.0, claim=0.5)
    with pytest.raises(RemoteError, match=r"promises epsilon 0\.5"):
        check_guarantee(lying, Guarantee(1.0, BETA))


def test_slots_too_few_for_the_noise_are_refused() -> None:
    batch = calibrated(1.0)
    short = batch.model_copy(update={"noise_slots": batch.noise_slots // 2})
    with pytest.raises(RemoteError) as caught:
        check_guarantee(short, Guarantee(1.0, BETA))
    assert caught.value.slug == "weak-guarantee"


def test_noise_for_dishonest_reports_is_needed_and_enough() -> None:
    batch = calibrated(1.0, fraction=0.2)
    assert account(batch_event(batch, 0.2), BETA).epsilon_upper <= 1.0
    assert account(batch_event(batch, 0.0), BETA).epsilon_upper < 0.95
