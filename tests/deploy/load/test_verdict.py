"""The rule that names what limits a load: one case a line of it."""

from dataclasses import replace

import pytest

from riffle.deploy.load.document import BUSY, SATURATED, Evidence, judge
from riffle.deploy.load.tally import STAGES


def seen(stage: str, **changes: object) -> Evidence:
    """A load of which a third was lost, most of its time in this stage, nobody saturated."""
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
    ("evidence", "limit", "why"),
    [
        (seen("upload", prompt=295), "none", "98.3%"),
        (seen("upload", due=0, prompt=0), "none", "100.0%"),
        (seen("upload", prompt=300, filled=0), "none", "nothing is said of the coordinator"),
        (seen("upload", loops=SATURATED), "generator", "event loops are saturated"),
        (seen("upload", loops=1.1, shuffler=1.1), "generator", "event loops"),
        (seen("lag"), "generator", "start late"),
        (seen("episode"), "generator", "start late"),
        (seen("sealing", sealing=1.0), "generator", "sealers want 1.00"),
        (seen("sealing", sealing=1.0, shuffler=1.1), "generator", "sealing"),
        (seen("batch", opening=0.99), "coordinator", "opening processes are saturated"),
        (seen("batch", shuffler=1.0), "shuffler", "its processor"),
        (seen("batch"), "coordinator", "wants 0.20 processors"),
        (seen("batch", opening=None, coordinator=None), "coordinator", "elsewhere"),
        (seen("upload", shuffler=0.97), "shuffler", "its processor"),
        (seen("lease", shuffler=0.97, refused=9), "shuffler", "its processor"),
        (seen("lease", refused=9), "shuffler", "9 answers were 429"),
        (seen("upload"), "shuffler", "its disk"),
        (seen("upload", shuffler=None), "shuffler", "elsewhere"),
    ],
)
def test_the_rule(evidence: Evidence, limit: str, why: str) -> None:
    verdict = judge(evidence)
    assert verdict.limit == limit
    assert why in verdict.why


def test_where_batches_filled_nothing_is_left_unsaid() -> None:
    assert "coordinator" not in judge(seen("upload", prompt=300)).why


def test_shared_busy_processors_are_the_machines_limit_and_the_stage_is_still_said() -> None:
    shared = seen("sealing", sealing=1.0, same_cores=True, busy=BUSY)
    assert judge(shared).limit == "machine"
    assert judge(shared).stage == "sealing"
    assert judge(replace(shared, busy=0.5)).limit == "generator"
    assert judge(replace(shared, same_cores=False)).limit == "generator"
    assert judge(replace(shared, prompt=300)).limit == "none"
