"""From deployments to descriptors, where sizes are large."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riffle.common.mechanism.counters import CounterLayout
from riffle.common.mechanism.parameters import Noise
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.common.protocol.descriptor import MAX_DESCRIPTOR_BYTES, parse
from riffle.common.protocol.errors import RemoteError
from riffle.coordinator.batches.issue import MAX_BATCH_BYTES, Issuer, calibrated
from riffle.coordinator.learners.registry import Registry, batches
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.learning.sdp_pe.active import ImplicitPolicies
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.specs import RunSpec
from riffle.experiments.simulator import private_counts
from riffle.node_client.environments.registry import exact_mdp, make
from tests.coordinator.calls import Api
from tests.coordinator.calls import problem as answered
from tests.coordinator.world import RUN, SMALL

EXTREME_BETAS = [5e-324, 1e-300, 1e-16, 0.5, 1.0 - 2.0**-53]
ISSUER = Issuer("shuffler-1", lambda: "00" * 32, lambda: 0.0)
LARGE = {"states": 50, "actions": 4, "horizon": 20}


def _spec(**changes: object) -> RunSpec:
    fields = {
        "name": "large",
        "environment": "RandomMDP-v0",
        "states": 10,
        "actions": 3,
        "horizon": 8,
        "episodes": 200_000,
        "epsilon": 1.0,
        "beta": 1e-5,
    }
    return RunSpec.model_validate({**fields, **changes})


@settings(max_examples=30)
@given(
    epsilon=st.sampled_from([5e-324, 1e-9, 0.05, 100.0]) | st.floats(0.01, 100.0),
    beta=st.sampled_from(EXTREME_BETAS) | st.floats(-40.0, -1e-9).map(math.exp),
    fraction=st.sampled_from([0.0, 5e-324, 0.5, 1.0 - 2.0**-53]),
    way=st.sampled_from([("shuffle", "messages"), ("shuffle", "sums"), ("local", "messages")])
    | st.just(("central", "messages")),
    calibration=st.sampled_from(["exact", "exact", "paper"]),
    horizon=st.sampled_from([1, 3, 20]),
    n=st.sampled_from([1, 2**32, 2**40]) | st.integers(1, 2**20),
    max_messages=st.sampled_from([1, 4_096, 2**16]),
)
def test_every_run_gets_what_it_asks_for_or_a_reason(
    *,
    epsilon: float,
    beta: float,
    fraction: float,
    way: tuple[str, str],
    calibration: str,
    horizon: int,
    n: int,
    max_messages: int,
) -> None:
    """A refusal is a problem with a slug, and raises no warning."""
    trust, aggregation = way
    try:
        spec = _spec(
            epsilon=epsilon,
            beta=beta,
            dishonest_fraction=fraction,
            trust=trust,
            aggregation=aggregation,
            calibration=calibration if trust == "shuffle" else "exact",
            horizon=horizon,
            max_messages=max_messages,
        )
        result = calibrated(spec, n, None)
    except RemoteError as error:
        assert error.slug == "batch-too-small"
        assert "bug" not in error.detail
    else:
        assert 0.0 <= result.account.epsilon_lower <= result.account.epsilon_upper
        assert result.account.epsilon_upper <= epsilon or calibration == "paper"
        assert math.isfinite(result.noise.variance(n))


def test_a_run_beyond_enumeration_is_issued_to_its_end() -> None:
    """3^71 policies: all deployments become descriptors that a shuffler accepts."""
    spec = _spec()
    mdp = exact_mdp(make("RandomMDP-v0", states=10, actions=3, horizon=8, seed=1))
    learner = Registry().build(spec.model_copy(update={"start": tuple(mdp.d1)}))
    assert isinstance(learner, SDPPE)
    assert isinstance(learner.phi, ImplicitPolicies)
    promised, deployed = batches(learner), set()
    index = 0
    while (deployment := learner.next_deployment()) is not None:
        issued = ISSUER.issue(RUN, spec, deployment, index=index, step=index)
        assert len(issued.data) <= MAX_DESCRIPTOR_BYTES
        assert parse(issued.data).descriptor.mixture.same_as(deployment.mixture)
        deployed.add((deployment.n, None if deployment.layer is None else 0))
        noise = issued.descriptor.batch_noise
        assert isinstance(noise, Noise)
        layout = issued.descriptor.layout
        generator = generator_for(1, "batch", index)
        learner.observe(private_counts(mdp, deployment, layout, noise, generator))
        index += 1
    assert promised <= deployed
    assert learner.summary().finished


@pytest.mark.parametrize("families", ["joint", "lean", "paper"])
def test_more_counters_than_two_bytes_hold_take_a_third(families: str) -> None:
    spec = _spec(families=families, **LARGE)
    layout = CounterLayout(spec.sizes, spec.families)
    assert layout.counters > 65_535
    assert layout.width == 3
    with pytest.raises(RemoteError, match="larger epsilon, or fewer states, actions or steps"):
        ISSUER.check(spec, 200_000, None)
    ISSUER.check(spec, 20_000, 0)  # one layer's counters are few


def test_fewer_episodes_are_the_advice_where_they_help() -> None:
    with pytest.raises(RemoteError, match=f"at most {MAX_BATCH_BYTES} bytes; use fewer episodes"):
        ISSUER.check(_spec(states=4, actions=2, horizon=6), 1 << 26, None)


def test_a_sum_is_as_large_as_one_vector_and_a_key_a_report() -> None:
    ISSUER.check(_spec(aggregation="sums", **LARGE), 1 << 24, None)
    with pytest.raises(RemoteError, match=f"at most {MAX_BATCH_BYTES} bytes; use fewer episodes"):
        ISSUER.check(_spec(aggregation="sums", **LARGE), 1 << 25, None)


def test_a_run_whose_later_batches_cannot_be_handed_over_is_refused_at_once(api: Api) -> None:
    body = _spec(**LARGE).model_dump(mode="json") | {"episodes": 1_000_000, "run_id": RUN}
    status, kind, detail = answered(api.call("POST", "", json=body))
    assert (status, kind) == (422, "invalid-spec")
    assert "use a larger epsilon" in detail
    assert api.get("")["runs"] == []


@pytest.mark.parametrize("n", [1, 19])
def test_a_batch_without_a_slot_for_an_owner_is_refused(n: int) -> None:
    """Finding A8: one slot would be more than the share."""
    issuer, spec = Issuer("shuffler-1", lambda: "00" * 32, lambda: 0.0, 0.05), _spec(horizon=1)
    issuer.check(spec, 20, None)
    with pytest.raises(RemoteError, match="n must be at least 20") as caught:
        issuer.check(spec, n, None)
    assert caught.value.slug == "batch-too-small"


@pytest.mark.parametrize(
    "changes", [{}, {"aggregation": "sums"}, {"trust": "local"}, {"trust": "central"}]
)
@pytest.mark.parametrize(("share", "gamma"), [(0.05, 0.1), (0.1, 0.1), (1.0, 0.1)])
def test_every_descriptor_has_the_coordinators_share_and_the_runs_promise(
    share: float, gamma: float, changes: dict[str, Any]
) -> None:
    """In later batches, too."""
    issuer = Issuer("shuffler-1", lambda: "00" * 32, lambda: 0.0, share)
    wanted = _spec(dishonest_fraction=gamma, horizon=1, **changes)
    zero = Mixture.single([[0] * wanted.states])
    for index in range(2):
        deployment = Deployment(0, "manual", zero, 400, None)
        made = issuer.issue(RUN, wanted, deployment, index=index, step=index).descriptor
        assert made.owner_share == share
        assert made.guarantee.dishonest_fraction == gamma
        assert (made.trust, made.aggregation) == (wanted.trust, wanted.aggregation)


def test_a_run_with_a_gamma_below_the_share_is_refused(api: Api) -> None:
    api.restart(max_owner_share=0.2)
    status, kind, detail = answered(api.call("POST", "", json=SMALL))
    assert (status, kind) == (422, "invalid-spec")
    assert "owner_share must not be above the guarantee's dishonest_fraction" in detail


@pytest.mark.parametrize(
    ("now", "seconds", "end"), [(60, 59, 119), (61, 59, 120), (119, 60, 179), (60, 500, 179)]
)
def test_a_batch_ends_within_the_next_epoch(now: int, seconds: int, end: int) -> None:
    issuer = Issuer("shuffler-1", lambda: "00" * 32, lambda: now, epoch_seconds=60)
    assert issuer.expires_at(seconds) == end
    assert Issuer("shuffler-1", lambda: "00" * 32, lambda: now).expires_at(500) == now + 500
