"""What `riffle audit` does and says: the attacks on one encoding, as one document.

A claim is violated when a bound says so at the family-wise error, when sealed trials do not follow
the law of the identity ones (then the bounds say nothing of the product), or when the observer
guesses better than chance. The last two are tested at 1e-6, which adds next to nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from riffle.experiments.audit import broken, observer
from riffle.experiments.audit.attack import TUNING_SHARE, Attack, agreement, audit
from riffle.experiments.audit.world import Setting, World, build

Encoding = Literal["riffle", "paper-sums", "one-envelope"]

ERROR = 0.01
"""Family-wise error of a report: its bounds hold with 99 % confidence."""

AGREEMENT_LEVEL = 1e-6

TRIALS: dict[Encoding, int] = {"riffle": 30_000, "paper-sums": 100_000, "one-envelope": 5_000}
"""Fresh trials a side that fit into a minute; half as many choose the thresholds."""

LEAST_TRIALS, MOST_TRIALS = 100, 10**9

ENVELOPES = 16
"""Users of a one-envelope batch: each vector hides in 1/16 of the noise the claim counts on."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Fresh trials a side, sealed trials a side, users observed (the last two for riffle)."""

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
        """Batches that an attack runs: tuning, fresh and sealed, on both sides.

        None for the papers' sums, whose views are drawn from their law, all at once.
        """
        if encoding == "paper-sums":
            return None
        sealed = self.sealed if encoding == "riffle" else 0
        return 2 * (max(1, self.trials // TUNING_SHARE) + self.trials + sealed)


def run(
    encoding: Encoding,
    setting: Setting,
    effort: Effort,
    on_trial: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Attack an encoding; the document that the command prints. ``violated`` says the verdict.

    ``on_trial`` is called after every one of its batches.
    """
    started = time.monotonic()
    if encoding == "riffle":
        document = _riffle(setting, effort, on_trial)
    elif encoding == "one-envelope":
        setting = replace(setting, n=ENVELOPES)
        world = replace(build(setting), on_trial=on_trial)
        document = _headline([broken.attack(world, effort.trials, ERROR)]) | _batch(world)
    else:
        document = _headline(broken.attacks(setting, effort.trials, ERROR))
    document = {"encoding": encoding} | document
    document["verdict"] = "violated" if document["violated"] else "not refuted"
    randomness = "the system's" if setting.seed is None else f"seeded ({setting.seed}), for tests"
    return document | {"randomness": randomness, "seconds": time.monotonic() - started}


def _riffle(setting: Setting, effort: Effort, on_trial: Callable[[], None]) -> dict[str, Any]:
    world = replace(build(setting), on_trial=on_trial)
    found, fresh = audit(world, effort.trials, ERROR)
    document = _headline([found]) | _batch(world)
    if effort.sealed:
        p_value = agreement(world, fresh, effort.sealed)
        agrees = p_value >= AGREEMENT_LEVEL
        document |= {"sealed_trials": 2 * effort.sealed, "sealed_agreement_p_value": p_value}
        document["violated"] |= not agrees
    if effort.users:
        seen = observer.observe(effort.users, padded=True)
        document["observer"] = seen.document()
        document["observer_without_padding"] = observer.observe(
            effort.users, padded=False
        ).document()
        document["violated"] |= seen.better_than_chance
    return document


def _headline(attacks: list[Attack]) -> dict[str, Any]:
    """The worst attack's numbers, and all of them where there are several."""
    worst = max(attacks, key=lambda attack: attack.bounds.beta)
    document = worst.document()
    document["confidence"] = 1.0 - ERROR
    if len(attacks) > 1:
        document["attacks"] = [attack.document() for attack in attacks]
    return document | {"violated": any(attack.violated for attack in attacks)}


def _batch(world: World) -> dict[str, Any]:
    noise, layout = world.noise, world.plan.layout
    return {
        "episodes": world.setting.n,
        "families": world.setting.families,
        "counters": layout.counters,
        "cells": layout.cells,
        "bits_per_user": noise.bits,
        "p": noise.p,
        "padded_messages": world.plan.padding.messages,
    }
