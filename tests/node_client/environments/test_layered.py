"""Layered MDPs: structure, seeds, refusals."""

from itertools import pairwise

import numpy as np
import pytest

from riffle.node_client.environments.tabular import TabularEnvironment, layered_mdp

WIDTHS = (1, 3, 2, 1)


def test_transitions_stay_within_the_next_layer() -> None:
    mdp = layered_mdp(WIDTHS, 2, seed=0)
    assert mdp.P.shape == (3, 3, 2, 3)
    for h, (width, after) in enumerate(pairwise(WIDTHS)):
        np.testing.assert_allclose(mdp.P[h, :width, :, :after].sum(axis=-1), 1.0)
    assert mdp.d1[0] == 1.0
    assert TabularEnvironment(mdp).sizes.H == 3


def test_the_seed_determines_the_mdp() -> None:
    np.testing.assert_array_equal(layered_mdp(WIDTHS, 2, 4).P, layered_mdp(WIDTHS, 2, 4).P)
    assert not np.array_equal(layered_mdp(WIDTHS, 2, 4).P, layered_mdp(WIDTHS, 2, 5).P)


@pytest.mark.parametrize("widths", [(1,), (2, 1), (1, 0, 1), (1, 2)])
def test_bad_layers_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layers"):
        layered_mdp(widths, 2, 0)
