"""The rule that names what limits a load: a case for each of its lines."""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riffle.deploy.load import run as load_run
from riffle.deploy.load.fleet import STAGES
from riffle.deploy.load.run import LoadConfig
from riffle.deploy.load.summary import (
    BUSY,
    MOST_STEPS,
    PRECISE,
    PROMPT,
    SATURATED,
    Evidence,
    judge,
    next_rate,
)


def evidence(stage: str, **changes: object) -> Evidence:
    """A load that lost a third of its reports, most time in ``stage``, with nobody saturated."""
    stages = dict.fromkeys(STAGES, 1.0) | {stage: 90.0}
    quiet = Evidence(
        started=300,
        prompt=200,
        filled=2,
        stages=stages,
        loops=0.3,
        sealing=0.4,
        shuffler=0.5,
        coordinator=0.2,
        opening=0.3,
    )
    return replace(quiet, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "limit", "why"),
    [
        (evidence("upload", prompt=295), "none", "98.3%"),
        (evidence("upload", started=0, prompt=0), "none", "100.0%"),
        (evidence("upload", loops=SATURATED), "generator", "event loops are saturated"),
        (evidence("upload", loops=1.1, shuffler=1.1), "generator", "event loops"),
        (evidence("lag"), "generator", "start late"),
        (evidence("episode"), "generator", "start late"),
        (evidence("sealing", sealing=1.0), "generator", "each sealing process has demand 1.00"),
        (evidence("sealing", sealing=1.0, shuffler=1.1), "generator", "sealing"),
        (evidence("batch", opening=0.99), "coordinator", "opening processes are saturated"),
        (evidence("batch", shuffler=1.0), "shuffler", "its processor"),
        (evidence("batch"), "coordinator", "its demand is 0.20 processors"),
        (evidence("batch", opening=None, coordinator=None), "coordinator", "elsewhere"),
        (evidence("upload", shuffler=0.97), "shuffler", "its processor"),
        (evidence("lease", shuffler=0.97, refused=9), "shuffler", "its processor"),
        (evidence("lease", refused=9), "shuffler", "9 answers were 429"),
        (evidence("upload"), "database", "a demand of only 0.50 processors"),
        (evidence("upload", answering=0.4), "network", "only 40% of their time"),
        (evidence("upload", answering=0.6), "database", "waits for it"),
        (evidence("lease", answering=0.4, refused=9), "shuffler", "9 answers were 429"),
        (evidence("upload", answering=0.4, shuffler=None), "network", "only 40%"),
        (evidence("upload", shuffler=None), "shuffler", "elsewhere"),
    ],
)
def test_the_rule(measured: Evidence, limit: str, why: str) -> None:
    verdict = judge(measured)
    assert verdict.limit == limit
    assert why in verdict.why


def searched(limit: float, start: float, unlucky: Collection[int] = ()) -> list[float]:
    """The rates that a search tries on a network that carries up to ``limit`` reports a second.

    The loads with the numbers ``unlucky`` fail at any rate.
    """
    steps: list[tuple[float, bool]] = []
    while (rate := next_rate(steps, start)) is not None:
        steps.append((rate, rate <= limit and len(steps) not in unlucky))
    return [rate for rate, _ in steps]


@pytest.mark.parametrize("limit", [0.7, 10, 47, 1_000])
def test_a_search_ends_close_to_the_capacity(limit: float) -> None:
    rates = searched(limit, 10)
    assert len(rates) <= MOST_STEPS
    carried = max(rate for rate in rates if rate <= limit)
    failed = min(rate for rate in rates if rate > limit)
    assert failed <= PRECISE * carried
    assert [rate for rate in rates if rates.count(rate) > 1] == [failed, failed]


@pytest.mark.parametrize("unlucky", [0, 1, 2, 3])
def test_one_unlucky_load_does_not_decide_a_search(unlucky: int) -> None:
    rates = searched(47, 10, [unlucky])
    assert max(rate for rate in rates if rate <= 47) >= 47 / PRECISE
    assert len(rates) <= MOST_STEPS


def test_a_search_is_bounded_where_nothing_or_everything_is_carried() -> None:
    assert searched(0, 10) == [10 / 2**i for i in range(MOST_STEPS)]
    assert searched(1e9, 10) == [10 * 2**i for i in range(MOST_STEPS)]


def test_shared_busy_processors_limit_the_machine_and_the_stage_is_still_named() -> None:
    shared = evidence("sealing", sealing=1.0, same_cores=True, busy=BUSY)
    assert judge(shared).limit == "machine"
    assert judge(shared).stage == "sealing"
    assert judge(shared).why.endswith("of the reports' time is sealing")
    assert judge(replace(shared, busy=0.5)).limit == "generator"
    assert judge(replace(shared, same_cores=False)).limit == "generator"
    assert judge(replace(shared, prompt=300)).limit == "none"


def test_all_batches_of_a_search_have_one_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A report of a smaller batch has more messages, so rates would not be comparable."""
    sizes = []

    def load(config: LoadConfig, *_: object) -> dict[str, Any]:
        sizes.append(config.reports_a_batch)
        return {"interrupted": len(sizes) == 3, "verdict": {"limit": "none"}}

    monkeypatch.setattr(load_run, "_enrolled", lambda *_: nullcontext(([], None)))
    monkeypatch.setattr(load_run, "_load", load)
    monkeypatch.setattr(load_run, "capacity", lambda _: {})
    monkeypatch.setattr(load_run, "step_row", lambda _: {"result": "carried", PROMPT: 99.5})
    target: Any = None
    load_run.find_capacity(LoadConfig(tmp_path, nodes=1, rate=500.0, seconds=10.0), target)
    assert sizes == [1_250] * 3
