"""Runs the audit of one encoding: ``riffle audit``.

The claim is violated if a lower bound on epsilon or beta exceeds the claimed number. It is also
violated if an observer of uploads guesses users' data better than chance (`observer`). The bounds
hold for the product only if trials with real seals have the same law as trials without
encryption. If the laws differ, the claim counts as violated, too. The level of the tests of
observer and seals is 1e-6, so these tests add almost nothing to the family-wise error.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from riffle.experiments.audit import broken, observer
from riffle.experiments.audit.attack import TUNING_SHARE, Attack, agreement, audit
from riffle.experiments.audit.world import Setting, World, build

Encoding = Literal["riffle", "paper-numbers", "one-envelope"]

ERROR = 0.01
"""Family-wise error of an audit: its bounds hold with 99 % confidence."""

AGREEMENT_LEVEL = 1e-6

TRIALS: dict[Encoding, int] = {"riffle": 30_000, "paper-numbers": 100_000, "one-envelope": 5_000}
"""Fresh trials per population, which take about a minute. Half as many tuning trials come first."""

LEAST_TRIALS, MOST_TRIALS = 100, 10**9

ENVELOPES = 16
"""Users of a one-envelope batch: each vector has 1/16 of the noise that the claim assumes."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The size of an audit: fresh and sealed trials per population, and users observed.

    Sealed trials and users are for the encoding ``riffle`` only. Raises ValueError for a value out
    of range.
    """

    trials: int
    sealed: int
    users: int

    def __post_init__(self) -> None:
        if self.trials < LEAST_TRIALS:
            raise ValueError(f"an audit needs at least {LEAST_TRIALS} trials, got {self.trials}")
        if max(self.trials, self.sealed, self.users) > MOST_TRIALS:
            raise ValueError(f"an audit takes at most {MOST_TRIALS} trials or users")
        if self.sealed < 0 or self.users < 0:
            raise ValueError("sealed trials and observed users must not be negative")

    def batches(self, encoding: Encoding) -> int | None:
        """Returns how many batches an attack makes of both populations: to tune, to test, to seal.

        Returns None for ``paper-numbers``: that attack draws all views at once, without batches.
        """
        if encoding == "paper-numbers":
            return None
        sealed = self.sealed if encoding == "riffle" else 0
        return 2 * (max(1, self.trials // TUNING_SHARE) + self.trials + sealed)


def run(
    encoding: Encoding,
    setting: Setting,
    effort: Effort,
    on_trial: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Attacks an encoding; returns the document that the command prints.

    The field ``violated`` is the verdict. ``on_trial`` is called after every batch. Raises
    ValueError if the encoding does not support the setting's aggregation.
    """
    started = time.monotonic()
    if encoding != "riffle" and setting.aggregation == "sums":
        raise ValueError(f"aggregation 'sums' is for the encoding 'riffle', not {encoding!r}")
    if encoding == "riffle":
        document = _riffle(setting, effort, on_trial)
    elif encoding == "one-envelope":
        setting = replace(setting, n=ENVELOPES)
        world = replace(build(setting), on_trial=on_trial)
        document = _headline([broken.attack_envelopes(world, effort.trials, ERROR)]) | _batch(world)
    else:
        document = _headline(broken.attack_numbers(setting, effort.trials, ERROR))
    document = {"encoding": encoding, "aggregation": setting.aggregation} | document
    document["verdict"] = "violated" if document["violated"] else "not refuted"
    randomness = "the system's" if setting.seed is None else f"seeded ({setting.seed}), for tests"
    return document | {"randomness": randomness, "seconds": time.monotonic() - started}


def _riffle(setting: Setting, effort: Effort, on_trial: Callable[[], None]) -> dict[str, Any]:
    world = replace(build(setting), on_trial=on_trial)
    outcome, fresh = audit(world, effort.trials, ERROR)
    document = _headline([outcome]) | _batch(world)
    if effort.sealed:
        p_value = agreement(world, fresh, effort.sealed)
        agrees = p_value >= AGREEMENT_LEVEL
        document |= {"sealed_trials": 2 * effort.sealed, "sealed_agreement_p_value": p_value}
        document["violated"] |= not agrees
    if effort.users and not world.batch.word_bits:  # a vector's length cannot depend on data
        padded, unpadded = (observer.observe(effort.users, padded=on) for on in (True, False))
        document["observer"] = padded.as_dict()
        document["observer_without_padding"] = unpadded.as_dict()
        document["violated"] |= padded.better_than_chance
    return document


def _headline(attacks: list[Attack]) -> dict[str, Any]:
    """Returns the worst attack's numbers, and all attacks if there are several."""
    worst = max(attacks, key=lambda attack: attack.bounds.beta)
    document = worst.as_dict()
    document["confidence"] = 1.0 - ERROR
    if len(attacks) > 1:
        document["attacks"] = [attack.as_dict() for attack in attacks]
    return document | {"violated": any(attack.violated for attack in attacks)}


def _batch(world: World) -> dict[str, Any]:
    noise, layout = world.noise, world.batch.layout
    return {
        "episodes": world.setting.n,
        "families": world.setting.families,
        "counters": layout.counters,
        "cells": layout.cells,
        "bits_per_user": noise.bits,
        "p": noise.p,
        "padded_messages": world.batch.padding.messages,
    }
