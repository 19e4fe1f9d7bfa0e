"""No seeded generator reaches a person's draws: past trust, past the types, and in the source.

See also `test_report`.
"""

import ast
import asyncio
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle import node_client
from riffle.common.mechanism import parameters
from riffle.common.protocol.descriptor import parse, serialize
from riffle.common.protocol.wire import Lease
from riffle.node_client.environments.registry import make
from riffle.node_client.episode import slot_report
from riffle.node_client.pipeline import Job, Pipeline, Totals
from riffle.node_client.sealing import SealKeys
from tests.node_client import world

PACKAGE = Path(node_client.__file__).parent
COMMON = Path(parameters.__file__).parents[1]
SEEDED_NAMES = {"SeededRandomness", "generator_for"}
MAY_NAME_THEM = {"episode.py"}
GENERATORS = ("random.", "np.random.", "numpy.random.")


class NoUsers:
    def mark_asked(self, users: Any, _charge: Any) -> Any:
        return users

    def give_back(self, *_: Any) -> None:
        pass


async def never(*_: Any) -> Any:
    raise AssertionError("a seeded report was sealed or sent")


def forged_job() -> Job:
    """A seeded batch, as if `trust` had accepted it."""
    context = parse(serialize(world.descriptor(test_seed=7)))
    keys = SealKeys.of(context, world.BATCH.public)
    return Job(context.descriptor, keys)


def test_a_seeded_job_past_trust_stops_in_the_pipeline() -> None:
    pipeline = Pipeline(
        environment=make("RiverSwim-v0", states=4, horizon=2),
        seal=never,
        shuffler=object(),  # type: ignore[arg-type]
        users=NoUsers(),  # type: ignore[arg-type]
        totals=Totals(),
        capacity=asyncio.Semaphore(1),
        test_entry=False,
    )
    lease = Lease(user="00" * 16, slot=0, lease="11" * 16, expires_at=world.EXPIRES)
    with pytest.raises(Exception, match="seeded"):
        asyncio.run(pipeline.submit(forged_job(), None, [lease]))  # type: ignore[arg-type]
    assert pipeline.totals.episodes == 0


def test_seeding_every_global_generator_changes_nothing() -> None:
    """Two reports after the same global seeds are equal with probability below 2^-40."""
    plan, environment = (
        world.descriptor(),
        make("RiverSwim-v0", states=4, horizon=2),
    )

    def drawn() -> bytes:
        random.seed(1)
        np.random.seed(1)
        rows = [slot_report(plan, environment, 0)[1] for _ in range(20)]
        return np.concatenate(rows).tobytes()

    assert drawn() != drawn()


def test_noise_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """With os.urandom fixed everything a node draws is fixed: there is no other source."""
    monkeypatch.setattr(os, "urandom", lambda size: b"\x5a" * size)
    plan, environment = (
        world.descriptor(),
        make("RiverSwim-v0", states=4, horizon=2),
    )
    first, second = (slot_report(plan, environment, slot)[1].tolist() for slot in (0, 1))
    assert first == second


def dotted(path: Path) -> set[str]:
    """Returns every name, dotted name and ``from`` import (as module.name) of a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def seeded(path: Path) -> set[str]:
    """Returns a file's names that draw from a seed; `random.SystemRandom` does not."""
    return {
        name
        for name in dotted(path)
        if name.rsplit(".", 1)[-1] in SEEDED_NAMES
        or (name.startswith(GENERATORS) and not name.startswith("random.SystemRandom"))
    }


def test_only_the_episode_names_a_seeded_generator() -> None:
    """Environments may seed the making of an MDP (`random_mdp`), never a person's draws."""
    for path in PACKAGE.glob("*.py"):
        assert path.name in MAY_NAME_THEM or not seeded(path), path
    assert seeded(PACKAGE / "episode.py") >= {"SeededRandomness"}


def test_the_mechanism_names_no_seeded_generator() -> None:
    for name in (
        "mechanism/shuffle_model",
        "mechanism/parameters",
        "mechanism/counters",
        "protocol/hpke",
    ):
        assert not seeded((COMMON / name).with_suffix(".py")), name


def test_the_scan_recognizes_seeded_generators(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    for text in ("np.random.default_rng()", "random.random()", "from random import choice"):
        file.write_text(text)
        assert seeded(file), text
    file.write_text("random.SystemRandom().random()")
    assert not seeded(file)
