"""Guesses users' data from what leaves their devices, without any key.

A fair coin gives each user one of two episodes that differ as much as possible. The observer sees
every report's size, its place in the order of reports, and how long the device took to make it. A
network would show less. The observer knows the data of the first third of the users and fits rules
to them. The second third chooses the rule that guesses best, and the last third tests it.

Reports have real seals. If ``padded`` is false, the same code runs without padding, to test whether
the observer can see anything at all.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from riffle.common.mechanism.counters import CounterLayout, Episode, Ints, Sizes
from riffle.common.mechanism.parameters import Noise, Padding
from riffle.common.mechanism.randomness import Randomness
from riffle.common.mechanism.shuffle_model import draw_noise
from riffle.common.protocol.wire import frame
from riffle.experiments.audit.attack import FloatArray
from riffle.experiments.audit.world import (
    ConstantEnvironment,
    Setting,
    World,
    build,
    calibrated_noise,
)
from riffle.node_client import episode as node_report
from riffle.node_client.sealing import seal_reports

LEVEL = 1e-6
"""The probability that an observer who learned nothing is declared to guess better than chance."""

POPULATION = Setting(1.0, 1e-5, n=4096, sizes=Sizes(X=4, A=2, H=6), families="lean")
"""In ``lean`` a reward of 0 has no message, so without padding a report's length shows rewards."""

Bits = NDArray[np.bool_]
Rule = Callable[[FloatArray], Bits]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The features (users, 4) of reports that the observer sees, and the users' data.

    A report's features: size, seconds to make it, seconds for the previous report, place in order.
    """

    features: FloatArray
    data: Bits


@dataclass(frozen=True, slots=True)
class Guess:
    """The number of right guesses among the test users."""

    right: int
    users: int
    padded: bool

    @property
    def accuracy(self) -> float:
        """The share of right guesses; chance is 1/2."""
        return self.right / self.users

    @property
    def p_value(self) -> float:
        """The probability that fair coins guess right for at least as many users."""
        return float(stats.binom.sf(self.right - 1, self.users, 0.5))

    @property
    def better_than_chance(self) -> bool:
        """Returns whether the guesses are better than chance at `LEVEL`."""
        return self.p_value < LEVEL

    def as_dict(self) -> dict[str, Any]:
        """Returns the outcome under the keys that the command prints."""
        return {
            "padding": "on" if self.padded else "off (broken on purpose)",
            "accuracy": self.accuracy,
            "users_guessed": self.users,
            "chance": 0.5,
            "p_value": self.p_value,
            "verdict": "better than chance" if self.better_than_chance else "chance",
        }


def observe(users: int, *, padded: bool) -> Guess:
    """Makes the reports of ``users`` users and guesses the data of a third of these users."""
    with nullcontext() if padded else patch.object(node_report, "encode", unpadded):
        traffic = _traffic(build(POPULATION, calibrated_noise(POPULATION)), users)
    third = users // 3
    train, pick, test = (slice(i * third, (i + 1) * third) for i in range(3))
    rules = _rules(traffic.features[train], traffic.data[train])
    best = max(rules, key=lambda rule: _right(rule, traffic, pick))
    return Guess(_right(best, traffic, test), third, padded)


def unpadded(
    layout: CounterLayout,
    noise: Noise,
    padding: Padding,
    episode: Episode | None,
    randomness: Randomness,
    word_bits: int | None = None,
) -> Ints:
    """Encodes as `common.mechanism.shuffle_model.encode` does, but leaves out the dummies."""
    del padding, word_bits
    data = np.empty(0, dtype=np.int64) if episode is None else layout.encode(episode)
    return np.concatenate([data, draw_noise(layout.counters, noise, randomness)])


def _traffic(world: World, users: int) -> Traffic:
    data = np.array([secrets.randbits(1) for _ in range(users)], dtype=np.bool_)
    sizes, seconds = np.empty(users), np.empty(users)
    for user in range(users):
        before = time.perf_counter()
        sizes[user] = len(_upload(world, user, bool(data[user])))
        seconds[user] = time.perf_counter() - before
    earlier = np.append(seconds[:1], seconds[:-1])
    return Traffic(np.column_stack([sizes, seconds, earlier, np.arange(users)]), data)


def _upload(world: World, user: int, rich: bool) -> bytes:
    """Returns one user's report as it leaves the device."""
    X = world.setting.sizes.X
    environment = ConstantEnvironment(world.setting.sizes, 0 if rich else X - 1, reward=float(rich))
    _, messages = node_report.slot_report(world.batch, environment, user)
    return frame(f"{user:032x}", seal_reports(world.seal_keys, messages[None]))


def _rules(features: FloatArray, data: Bits) -> list[Rule]:
    single = [_by_tenths(features, data, column) for column in range(features.shape[1])]
    return [*single, _fisher(features, data)]


def _by_tenths(features: FloatArray, data: Bits, column: int) -> Rule:
    """Returns a rule. In each decile of a feature, it guesses what most training users have."""
    edges = np.unique(np.quantile(features[:, column], np.linspace(0.1, 0.9, 9)))
    bins = np.searchsorted(edges, features[:, column])
    balance = np.bincount(bins, weights=np.where(data, 1.0, -1.0), minlength=len(edges) + 1)
    return lambda values: balance[np.searchsorted(edges, values[:, column])] > 0


def _fisher(features: FloatArray, data: Bits) -> Rule:
    if data.all() or not data.any():  # by chance all training users have the same data
        return lambda values: np.full(len(values), data.all())
    centre, scale = features.mean(axis=0), features.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    z = (features - centre) / scale
    difference = z[data].mean(axis=0) - z[~data].mean(axis=0)
    middle = (z[data].mean(axis=0) + z[~data].mean(axis=0)) / 2
    within = np.cov(z.T) + 1e-3 * np.eye(z.shape[1])
    weights = np.linalg.solve(within, difference)
    return lambda values: np.asarray(((values - centre) / scale - middle) @ weights > 0)


def _right(rule: Rule, traffic: Traffic, part: slice) -> int:
    return int((rule(traffic.features[part]) == traffic.data[part]).sum())
