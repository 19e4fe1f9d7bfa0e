"""Reports: length, laws of the draws, keyed test draws, and no seeded draw on a deployed node."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from riffle.common.mechanism import randomness, shuffle_model
from riffle.common.mechanism.randomness import SeededRandomness, SystemRandomness
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.node_client import episode as module
from riffle.node_client.environments.registry import make
from riffle.node_client.episode import slot_randomness, slot_report
from riffle.node_client.trust import accept
from tests.node_client import world
from tests.node_client.running import Failing

PLAN = world.descriptor()
SEEDED = world.descriptor(test_seed=7)
ENVIRONMENT = make("RiverSwim-v0", states=4, horizon=2)
ALPHA = 1e-6


def reports(plan: BatchDescriptor, count: int, **options: bool) -> Any:
    return [slot_report(plan, ENVIRONMENT, slot, **options) for slot in range(count)]


def test_every_report_has_the_same_length() -> None:
    sizes = {messages.size for _, messages in reports(PLAN, 50)}
    assert sizes == {PLAN.padding.messages}
    assert {slot_report(PLAN, Failing(), slot)[1].size for slot in range(20)} == sizes


def test_a_failed_episode_has_noise_only() -> None:
    episode, messages = slot_report(PLAN, Failing(), 0)
    assert episode is None
    ones = [int((slot_report(PLAN, Failing(), 0)[1] < PLAN.layout.dummy).sum()) for _ in range(300)]
    total = PLAN.layout.counters * len(ones)
    assert binomtest(sum(ones), total, PLAN.noise.p_numerator / 2**PLAN.noise.p_log2).pvalue > ALPHA
    assert messages.max() <= PLAN.layout.dummy


def test_policies_are_drawn_by_weight() -> None:
    """State 0 of step 0: policy 0 acts 0, policy 1 acts 1; weights 1/4 and 3/4. Error 1e-6."""
    drawn = [episode.actions[0] for episode, _ in reports(PLAN, 3_000)]
    assert binomtest(int(np.sum(drawn)), len(drawn), 3 / 4).pvalue > ALPHA


def test_noise_is_the_same_on_every_counter() -> None:
    """Each counter of 2,000 users is Binomial(2000, 1/4); chi-square over counters, error 1e-6."""
    rows = np.concatenate([slot_report(PLAN, Failing(), 0)[1] for _ in range(2_000)])
    counts = np.bincount(rows, minlength=PLAN.layout.counters + 1)[:-1]
    z = (counts - 500) / np.sqrt(2_000 * 3 / 16)
    from scipy.stats import chi2

    tail = chi2.sf(float((z**2).sum()), z.size)
    assert ALPHA < tail < 1 - ALPHA


def test_seeded_reports_depend_on_the_slot_only() -> None:
    forward = [m.tolist() for _, m in reports(SEEDED, 6, test_entry=True)]
    backward = [
        slot_report(SEEDED, make("RiverSwim-v0", states=4, horizon=2), slot, test_entry=True)[1]
        for slot in reversed(range(6))
    ]
    assert forward == [m.tolist() for m in reversed(backward)]
    assert len({tuple(m) for m in forward}) == 6


def test_seeded_draws_differ_by_run_batch_slot_and_purpose() -> None:
    other_run = world.descriptor(test_seed=7, run_id="ff" * 16)
    next_batch = world.descriptor(test_seed=7, deployment=1)
    other_seed = world.descriptor(test_seed=8)
    base = SEEDED
    keys: list[Any] = [
        (base, 0, "noise"),
        (base, 0, "policy"),
        (base, 0, "environment"),
        (base, 1, "noise"),
        (other_run, 0, "noise"),
        (next_batch, 0, "noise"),
        (other_seed, 0, "noise"),
    ]
    draws = {slot_randomness(d, s, p, test_entry=True).read(16) for d, s, p in keys}
    assert len(draws) == len(keys)


def test_the_keyed_stream_is_the_published_one() -> None:
    """The simulator and other implementations rely on this key: seed; run, batch, slot, purpose."""
    d = SEEDED
    expected = SeededRandomness.keyed(7, d.run_id, d.batch_id, 3, "noise").read(32)
    assert slot_randomness(d, 3, "noise", test_entry=True).read(32) == expected


def test_a_seeded_batch_is_refused_without_the_test_entry() -> None:
    with pytest.raises(LocalError) as caught:
        slot_report(SEEDED, ENVIRONMENT, 0)
    assert caught.value.slug == "test-entry-refused"


def test_no_seeded_generator_reaches_a_deployed_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries every way in: a seeded descriptor, one forged past trust; every generator is a trap."""

    def trap(*_: Any, **__: Any) -> Any:
        raise AssertionError("a seeded generator was used")

    seen: list[object] = []
    real = shuffle_model.encode

    def watch(*arguments: Any) -> Any:
        seen.append(arguments[4])
        return real(*arguments[:5])

    monkeypatch.setattr(SeededRandomness, "__init__", trap)
    monkeypatch.setattr(randomness, "generator_for", trap)
    monkeypatch.setattr(np.random, "default_rng", trap)
    monkeypatch.setattr(module, "encode", watch)
    assert len(reports(PLAN, 5)) == 5
    assert all(type(source) is SystemRandomness for source in seen)
    with pytest.raises(RemoteError, match="seeds noise"):
        accept(world.signed(test_seed=7), SEEDED.batch_id, world.demands(), world.NOW)
    with pytest.raises(LocalError, match="seeded"):
        slot_report(SEEDED, ENVIRONMENT, 0)
    with pytest.raises(AssertionError, match="seeded generator"):  # the trap itself works
        slot_report(SEEDED, ENVIRONMENT, 0, test_entry=True)


def test_system_reports_differ_every_time() -> None:
    assert len({slot_report(PLAN, ENVIRONMENT, 0)[1].tobytes() for _ in range(10)}) == 10
