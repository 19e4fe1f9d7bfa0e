"""The learner of a run: its replay, the counts that it observes, and the run's next step.

A learner is deterministic (`coordinator.learning.learner`). If a learner is lost, a fresh one
observes the stored private counts in order (replay). During the replay, the fresh learner must ask
for every stored deployment; otherwise the run must not go on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from riffle.common.mechanism.counters import Ints
from riffle.common.process.tracing import span
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.batches.counts import check, private_counts, value_estimate
from riffle.coordinator.batches.issue import Issuer, same_deployment
from riffle.coordinator.learners.registry import ManualLearner, Registry
from riffle.coordinator.learning.learner import Learner
from riffle.coordinator.specs import MANUAL
from riffle.coordinator.states import UNSETTLED
from riffle.coordinator.store.records import DeploymentRecord, NextStep, RunRecord, Settlement
from riffle.coordinator.store.transactions import Store


@dataclass
class RunLearner:
    """The learner of a run. ``learner`` has seen all counts so far, or is None before a replay."""

    store: Store
    registry: Registry
    issuer: Issuer
    learner: Learner | None = None

    def forget(self) -> None:
        """Drops the learner, because it may have observed counts that were not committed."""
        self.learner = None

    @span("plan")
    def complete(self, run: RunRecord, row: DeploymentRecord, settlement: Settlement) -> Settlement:
        """Adds the learner's results and the run's next step to a batch's settlement.

        If the run is over, adds nothing. If more reports were dishonest than promised, the
        deployment is issued again. Otherwise the counts are tested for lies.

        With the aggregation `messages`, the learner uses suspicious counts all the same. Otherwise
        one liar could stop every run and use up the run's users. With the aggregation `sums`, one
        liar can set every counter to any value. So suspicious sums are tested again, and are used
        only if they pass. In the second test, as many reports may hold only noise as the guarantee
        allows to be dishonest.
        """
        if run.state != "running":
            return settlement
        if not settlement.spend.within_promise:
            reason = (
                f"was rejected with {settlement.spend.dishonest} dishonest reports or more, whose "
                "nodes the shuffler's operator can see"
            )
            return replace(settlement, next=self.reissue(run, row, reason))
        counts = private_counts(row.descriptor, settlement.opened.histogram)
        found = check(counts, run.spec.d1)
        settlement = replace(settlement, check=found)
        if found.suspicious and row.descriptor.aggregation == "sums":
            found = check(counts, run.spec.d1, without_data=settlement.spend.dishonest)
            if found.suspicious:
                reason = f"was rejected: its counts fail the test {found.test!r}, as lies make them"
                unused = replace(settlement.spend, within_promise=False)
                return replace(settlement, spend=unused, next=self.reissue(run, row, reason))
        learner = self._current(run)
        stage, estimate = learner.observe(counts), value_estimate(counts, run.spec.delta)
        summary = learner.summary()
        step = self._next_step(run, row, learner)
        return replace(settlement, stage=stage, summary=summary, estimate=estimate, next=step)

    def reissue(self, run: RunRecord, row: DeploymentRecord, reason: str) -> NextStep:
        """Issues a deployment again because its batch was not counted.

        The learner expects n reports, so the whole deployment is issued again. The episodes
        executed may then exceed K. After `RunSpec.reissues` reissues, the run fails instead.
        """
        if run.state != "running":
            return NextStep()
        rows = self.store.deployments(run.id)
        tries = sum(other.step == row.step for other in rows)
        if tries <= run.spec.reissues:
            place = {"index": len(rows), "step": row.step}
            return NextStep(issue=self.issuer.issue(run.id, run.spec, row.deployment, **place))
        failure = (
            f"the batch of deployment {row.index} (n={row.n}) {reason}; this was try {tries} "
            f"of {tries}; check that enough honest nodes serve users who have not reported yet"
        )
        return NextStep(failure=failure)

    def _next_step(self, run: RunRecord, row: DeploymentRecord, learner: Learner) -> NextStep:
        deployment = learner.next_deployment()
        if deployment is None:
            executed = sum(other.executed for other in self.store.deployments(run.id))
            return NextStep(finished=run.spec.learner != MANUAL or executed >= run.spec.episodes)
        index, step = row.index + 1, row.step + 1
        issue = self.issuer.issue(run.id, run.spec, deployment, index=index, step=step)
        return NextStep(issue=issue)

    def _current(self, run: RunRecord) -> Learner:
        """Returns the learner after all stored counts. Rebuilds a manual learner in every call."""
        if self.learner is None or run.spec.learner == MANUAL:
            learner = self.registry.build(run.spec)
            replay(learner, self.store.deployments(run.id), self.store.histograms(run.id))
            self.learner = learner
        return self.learner


def replay(
    learner: Learner, rows: Sequence[DeploymentRecord], histograms: Mapping[int, Ints]
) -> None:
    """Gives a fresh learner all counts of its run, and checks the deployments on the way.

    Raises LocalError ``wrong-state`` if the learner asks for a deployment that was not stored.
    """
    for row in rows:
        if row.state == "counted":
            _check_deployment(learner, row)
            learner.observe(private_counts(row.descriptor, histograms[row.index]))
        elif row.state in UNSETTLED:
            _check_deployment(learner, row)


def _check_deployment(learner: Learner, row: DeploymentRecord) -> None:
    """Checks that the learner asks for this stored deployment; submits it to a manual learner."""
    deployment = row.deployment
    if isinstance(learner, ManualLearner):
        learner.submit(deployment)
        return
    wanted = learner.next_deployment()
    if wanted is None or not same_deployment(wanted, deployment):
        raise LocalError(
            "wrong-state",
            f"replayed up to deployment {row.index}, the learner asks for another one than was "
            "issued: was the learner changed since? The run's counts are kept; start a new run, or "
            "go back to the version that began this one",
        )
