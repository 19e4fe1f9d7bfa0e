"""The rule that names what limits a load: a case for each of its lines."""

from dataclasses import replace

import pytest

from riffle.deploy.load.summary import BUSY, SATURATED, Evidence, judge
from riffle.deploy.load.tally import STAGES


def evidence(stage: str, **changes: object) -> Evidence:
    """A load that lost a third of its reports, most time in ``stage``, with nobody saturated."""
    stages = dict.fromkeys(STAGES, 1.0) | {stage: 90.0}
    quiet = Evidence(
        due=300,
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
        (evidence("upload", due=0, prompt=0), "none", "100.0%"),
        (evidence("upload", prompt=300, filled=0), "none", "nothing is said of the coordinator"),
        (evidence("upload", loops=SATURATED), "generator", "event loops are saturated"),
        (evidence("upload", loops=1.1, shuffler=1.1), "generator", "event loops"),
        (evidence("lag"), "generator", "start late"),
        (evidence("episode"), "generator", "start late"),
        (evidence("sealing", sealing=1.0), "generator", "sealers want 1.00"),
        (evidence("sealing", sealing=1.0, shuffler=1.1), "generator", "sealing"),
        (evidence("batch", opening=0.99), "coordinator", "opening processes are saturated"),
        (evidence("batch", shuffler=1.0), "shuffler", "its processor"),
        (evidence("batch"), "coordinator", "wants 0.20 processors"),
        (evidence("batch", opening=None, coordinator=None), "coordinator", "elsewhere"),
        (evidence("upload", shuffler=0.97), "shuffler", "its processor"),
        (evidence("lease", shuffler=0.97, refused=9), "shuffler", "its processor"),
        (evidence("lease", refused=9), "shuffler", "9 answers were 429"),
        (evidence("upload"), "shuffler", "its disk"),
        (evidence("upload", shuffler=None), "shuffler", "elsewhere"),
    ],
)
def test_the_rule(measured: Evidence, limit: str, why: str) -> None:
    verdict = judge(measured)
    assert verdict.limit == limit
    assert why in verdict.why


def test_a_load_with_full_batches_needs_no_caveat() -> None:
    assert "coordinator" not in judge(evidence("upload", prompt=300)).why


def test_shared_busy_processors_limit_the_machine_and_the_stage_is_still_named() -> None:
    shared = evidence("sealing", sealing=1.0, same_cores=True, busy=BUSY)
    assert judge(shared).limit == "machine"
    assert judge(shared).stage == "sealing"
    assert judge(replace(shared, busy=0.5)).limit == "generator"
    assert judge(replace(shared, same_cores=False)).limit == "generator"
    assert judge(replace(shared, prompt=300)).limit == "none"
