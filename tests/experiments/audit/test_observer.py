"""Sizes, times and order of uploads reveal nothing, and would reveal much without padding.

Level 1e-6 of an exact binomial test. Without padding the mean lengths of the two kinds of reports
differ by 6, with standard deviation 4.4: three of four guesses are right, and fewer than the test
needs of 250 (162) in one run of some ten thousand; the test tries twice.
"""

import numpy as np
import pytest
from scipy import stats

from riffle.experiments.audit import observer
from riffle.experiments.audit.observer import Guess, observe
from riffle.experiments.audit.world import build, calibrated_noise


def test_with_padding_the_observer_guesses_at_chance() -> None:
    guess = observe(450, padded=True)
    assert not guess.better_than_chance, guess.as_dict()
    assert guess.users == 150


def test_without_padding_the_observer_beats_chance() -> None:
    guess = observe(750, padded=False)
    if not guess.better_than_chance:
        guess = observe(750, padded=False)
    assert guess.better_than_chance, guess.as_dict()


def test_every_padded_upload_has_one_size() -> None:
    batch = build(observer.POPULATION, calibrated_noise(observer.POPULATION))
    sizes = {len(observer._upload(batch, user, user % 2 == 0)) for user in range(6)}
    assert sizes == {batch.context.descriptor.report_bytes + 16}


def test_the_rules_use_an_informative_feature() -> None:
    """One feature is the data with noise of one standard deviation: accuracy 0.69 at best."""
    generator = np.random.default_rng(4)
    data = generator.random(3_000) < 0.5
    features = np.column_stack([np.full(3_000, 9.0), data + generator.normal(0, 1, 3_000)])
    traffic = observer.Traffic(features, data)
    best = stats.norm.cdf(0.5)
    for rule in observer._rules(features[:1_500], data[:1_500])[1:]:
        share = observer._right(rule, traffic, slice(1_500, 3_000)) / 1_500
        assert share == pytest.approx(best, abs=0.06)


def test_p_values_are_binomial() -> None:
    assert Guess(60, 100, padded=True).p_value == pytest.approx(
        stats.binomtest(60, 100, 0.5, "greater").pvalue
    )
    assert not Guess(50, 100, padded=True).better_than_chance
    assert Guess(90, 100, padded=True).better_than_chance


@pytest.mark.parametrize("rich", [True, False])
def test_an_observer_trained_on_one_kind_always_guesses_it(rich: bool) -> None:
    features = np.random.default_rng(1).random((10, 4))
    for rule in observer._rules(features, np.full(10, rich)):
        assert (rule(features) == rich).all()
