"""Rebuild a run's learner after a crash, by replaying what it has observed.

A learner is deterministic (`coordinator.learning.learner`), so a fresh one that is shown the stored
private counts in order is in the state of the lost one. The stored deployments are the truth: each
must be what the replayed learner asks for, else the run must not go on.
"""

from collections.abc import Mapping, Sequence

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.batches.counts import private_counts
from riffle.coordinator.batches.issue import same_deployment
from riffle.coordinator.learners.manual import ManualLearner
from riffle.coordinator.learning.learner import Learner
from riffle.coordinator.states import UNSETTLED
from riffle.coordinator.store.records import DeploymentRecord


def replay(
    learner: Learner, rows: Sequence[DeploymentRecord], histograms: Mapping[int, Ints]
) -> None:
    """Show a fresh learner all counted batches of its run, then check what is under way.

    Raises:
        LocalError: ``wrong-state``, when the learner would have deployed something else.
    """
    for row in rows:
        if row.state == "counted":
            _expect(learner, row)
            learner.observe(private_counts(row.descriptor, histograms[row.index]))
        elif row.state in UNSETTLED:
            _expect(learner, row)


def _expect(learner: Learner, row: DeploymentRecord) -> None:
    deployment = row.deployment
    if isinstance(learner, ManualLearner):
        learner.submit(deployment)
        return
    asked = learner.next_deployment()
    if asked is None or not same_deployment(asked, deployment):
        raise LocalError(
            "wrong-state",
            f"replayed up to deployment {row.index}, the learner asks for another one than was "
            "issued: was the learner changed since? The run's counts are kept; start a new run, or "
            "go back to the version that began this one",
        )
