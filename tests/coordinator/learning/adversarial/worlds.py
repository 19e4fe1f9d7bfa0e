"""Small random layered worlds, shared by these tests."""

from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box, box
from riffle.coordinator.learning.adversarial.layered import Layers
from riffle.coordinator.learning.learner import FloatArray

SHAPES = [(1, 3, 3, 3, 1), (1, 2, 1), (1, 4, 2, 1), (1, 1), (1, 2, 3, 1)]


def transitions(layers: Layers, generator: np.random.Generator) -> FloatArray:
    """A random P (H, W, A, W)."""
    P = generator.dirichlet(np.ones(layers.W), size=layers.pairs.shape) * layers.cells
    total = P.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(P, total, out=np.zeros_like(P), where=total > 0))


def random_box(layers: Layers, width: float, generator: np.random.Generator) -> Box:
    """A set of half-widths up to `width` around a random P."""
    P = transitions(layers, generator)
    return box(layers, P, width * generator.uniform(0.05, 1, P.shape))


def random_policy(layers: Layers, generator: np.random.Generator) -> FloatArray:
    """A random pi (H, W, A)."""
    policy = generator.dirichlet(np.ones(layers.A), size=layers.states.shape)
    return np.asarray(policy * layers.pairs)


def holds(box: Box, P: FloatArray, layers: Layers, slack: float = 1e-12) -> bool:
    """Tells whether P (H, W, A, W) is in the set."""
    inside = (box.lower - slack <= P) & (box.upper + slack >= P)
    return bool(inside[layers.cells].all())
