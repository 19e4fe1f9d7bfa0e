"""A trial runs the product's code: the same counts with and without seals, every message once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.counters import Families, Sizes
from riffle.common.mechanism.parameters import Guarantee, Noise
from riffle.common.mechanism.shuffle_model import count
from riffle.common.protocol import hpke
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.verification import check_guarantee
from riffle.experiments.audit import pipeline, world
from riffle.experiments.audit.pipeline import identity_seals
from riffle.experiments.audit.world import SMALLEST, Setting

SEEDED = Setting(epsilon=2.0, families="lean", seed=11)


def test_sealed_and_identity_trials_are_equal_draw_by_draw() -> None:
    batch = world.build(SEEDED)
    with identity_seals():
        plain = pipeline.views(batch, 6, first=True)
    sealed = pipeline.views_of_the_analyzer(batch, 6, first=True)
    assert np.array_equal(plain.counts, sealed.counts)
    assert np.array_equal(plain.head, sealed.head)


def test_counts_are_those_of_the_reports() -> None:
    batch = world.build(SEEDED)
    with identity_seals():
        seen = pipeline.views(batch, 5, first=False, start=3)
    for i in range(5):
        sent = pipeline.reports(batch, 3 + i, first=False)
        assert np.array_equal(seen.counts[i], count(batch.batch.layout, sent.ravel()))


def test_identity_seals_have_a_seals_size_and_end_with_the_context() -> None:
    pair = hpke.KeyPair.generate()
    with identity_seals():
        fake = hpke.seal(pair.public, b"info", b"ab")
        assert hpke.open_sealed(pair.private, b"info", fake) == b"ab"
    real = hpke.seal(pair.public, b"info", b"ab")
    assert len(real) == len(fake)
    assert b"ab" not in real
    with pytest.raises(hpke.OpenError):
        hpke.open_sealed(pair.private, b"info", fake)


def test_the_neighbouring_episodes_move_every_cell() -> None:
    every: tuple[Families, ...] = ("paper", "lean", "joint")
    for families in every:
        setting = Setting(sizes=Sizes(X=3, A=1, H=2), families=families)
        up, down = world.build(setting).cells()
        assert len({*up.tolist(), *down.tolist()}) == 2 * setting.layout.cells


def test_only_user_0_differs() -> None:
    batch = world.build(replace(SEEDED, n=3))
    first, second = (pipeline.reports(batch, 0, first=first) for first in (True, False))
    assert not np.array_equal(first[0], second[0])
    assert np.array_equal(first[1:], second[1:])


def test_a_claim_beyond_the_accountants_guarantee_is_refused() -> None:
    weak = world.build(SEEDED, Noise(2, 1, 3))
    with pytest.raises(RemoteError, match="gives"):
        check_guarantee(weak.context.descriptor, Guarantee(2.0, 1e-2))


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 0.0},
        {"epsilon": 50.0},
        {"beta": 1.0},
        {"n": 0},
        {"sizes": replace(SMALLEST, X=1)},
    ],
)
def test_settings_that_cannot_be_audited_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must lie|needs two states"):
        replace(SEEDED, **changes)
