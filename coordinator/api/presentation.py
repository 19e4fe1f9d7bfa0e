"""From records to answers. Pure: everything the routes show is computed here."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from riffle.common.accounting import run_guarantee
from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.coordinator.api import models
from riffle.coordinator.batches import ledger
from riffle.coordinator.batches.counts import plain, private_counts, value_estimate
from riffle.coordinator.learning.true_values import LEVEL, Band, Bands, Curve, TrueRow
from riffle.coordinator.store.records import DeploymentRecord, LedgerRecord, RunRecord, Tally

Spends = Sequence[LedgerRecord]
Rows = Sequence[DeploymentRecord]


def run_view(run: RunRecord, tally: Tally, trouble: str | None) -> models.RunView:
    """A run and how far it is."""
    summary = run.summary or {}
    return models.RunView(
        id=run.id,
        name=run.spec.name,
        state=run.state,
        message=run.message,
        trouble=trouble,
        spec=run.spec,
        created_at=run.created_at,
        ended_at=run.ended_at,
        deployments=tally.deployments,
        episodes=tally.episodes,
        stage=summary.get("stage", 0),
        active=summary.get("active"),
    )


def deployment_view(row: DeploymentRecord) -> models.DeploymentView:
    """What was deployed."""
    return models.DeploymentView(**_deployment(row, row.descriptor))


def progress_view(row: DeploymentRecord) -> models.ProgressView:
    """A deployment and where it stands."""
    return models.ProgressView(**_deployment(row, row.descriptor), **_progress(row))


def detail_view(
    row: DeploymentRecord, histogram: Ints | None, spend: LedgerRecord | None, delta: float
) -> models.DeploymentDetail:
    """A deployment with its private counts, value estimate and spend, as far as there are any."""
    descriptor = row.descriptor
    counts = None if histogram is None else private_counts(descriptor, histogram)
    estimate = None if counts is None else value_estimate(counts, delta)
    return models.DeploymentDetail(
        **_deployment(row, descriptor),
        **_progress(row),
        counts=None if counts is None else models.CountsView(**plain(counts)),
        value_estimate=None if estimate is None else models.ValueView(**asdict(estimate)),
        spend=None if spend is None else _spend(row, descriptor, spend),
    )


def ledger_view(run: RunRecord, rows: Rows, spends: Spends) -> models.LedgerView:
    """All spends of a run and what they come to."""
    by_index = {row.index: row for row in rows}
    # Spends are read after rows: those of deployments issued in between are for the next answer.
    pairs = [(by_index[spend.index], spend) for spend in spends if spend.index in by_index]
    entries = [_spend(row, row.descriptor, spend) for row, spend in pairs]
    total = run_guarantee([ledger.entry(row.descriptor, spend.spend) for row, spend in pairs])
    budget = run.spec.budget
    return models.LedgerView(
        epsilon=total.epsilon,
        beta=total.beta,
        budget_epsilon=budget.epsilon,
        budget_beta=budget.beta,
        within_budget=total.epsilon <= budget.epsilon and total.beta <= budget.beta,
        entries=entries,
    )


def result_view(run: RunRecord, rows: Rows, spends: Spends) -> models.ResultView:
    """The answer of a run so far."""
    spent, summary = ledger_view(run, rows, spends), run.summary or {}
    return models.ResultView(
        state=run.state,
        message=run.message,
        policy=summary.get("policy"),
        value_estimate=summary.get("value_estimate"),
        active=summary.get("active"),
        epsilon=spent.epsilon,
        beta=spent.beta,
        within_budget=spent.within_budget,
        episodes=_counted(rows),
        episodes_executed=sum(row.executed for row in rows),
        episodes_planned=run.spec.episodes,
        reports=sum(entry.n for entry in spent.entries),
        messages_forwarded=sum(entry.messages for entry in spent.entries),
        messages_counted=sum(entry.opened for entry in spent.entries),
        failed=sum(entry.failed for entry in spent.entries),
        policy_switches=_switches(rows),
        timings=_seconds(rows),
        constants=summary.get("constants", {}),
    )


def truth_view(curve: Curve, rows: Sequence[TrueRow], found: Bands | None) -> models.TruthView:
    """What the operator supplied, the regret that follows, and the bands over runs."""
    return models.TruthView(
        optimal_value=rows[0].optimal if rows else None,
        deployments=[row.index for row in rows if row.episodes > 0],
        episodes=curve.episodes.tolist(),
        value=curve.value.tolist(),
        regret=curve.regret.tolist(),
        bands=None if found is None else _bands(found),
    )


def _bands(found: Bands) -> models.BandsView:
    def band(one: Band) -> models.BandView:
        return models.BandView(mean=one.mean.tolist(), low=one.low.tolist(), high=one.high.tolist())

    return models.BandsView(
        runs=found.runs,
        confidence=LEVEL,
        episodes=found.episodes.tolist(),
        regret=band(found.regret),
        value=band(found.value),
    )


def _deployment(row: DeploymentRecord, descriptor: BatchDescriptor) -> dict[str, Any]:
    mixture = descriptor.mixture
    return {
        "index": row.index,
        "step": row.step,
        "stage": row.stage,
        "purpose": row.purpose,
        "n": row.n,
        "layer": row.layer,
        "mixture": models.MixtureView(
            policies=mixture.policies.tolist(),
            weights=mixture.weights.tolist(),
            probabilities=mixture.probabilities.tolist(),
        ),
        "batch_id": row.batch_id,
        "trust": descriptor.trust,
        "expires_at": descriptor.expires_at,
        "messages": descriptor.padding.messages,
        "report_bytes": descriptor.report_bytes,
        "noise": _noise(descriptor),
    }


def _progress(row: DeploymentRecord) -> dict[str, Any]:
    return {
        "state": row.state,
        "acknowledged": row.acknowledged,
        "episodes_executed": row.episodes_executed,
        "issued_at": row.issued_at,
        "settled_at": row.settled_at,
        "timings": dict(row.timings),
    }


def _noise(descriptor: BatchDescriptor) -> models.NoiseView:
    noise, n = descriptor.to_noise(), descriptor.n
    return models.NoiseView(
        **descriptor.noise.model_dump(), variance=noise.variance(n), expected_ones=noise.mean(n)
    )


def _spend(
    row: DeploymentRecord, descriptor: BatchDescriptor, record: LedgerRecord
) -> models.SpendView:
    return models.SpendView(
        deployment=row.index,
        batch_id=row.batch_id,
        trust=descriptor.trust,
        n=row.n,
        epsilon_lower=record.spend.epsilon_lower,
        epsilon_upper=record.spend.epsilon_upper,
        beta=record.spend.beta,
        dishonest_fraction=descriptor.guarantee.dishonest_fraction,
        dishonest_reports=record.spend.dishonest,
        used=record.spend.within_promise,
        messages=record.messages,
        opened=record.opened,
        failed=record.failed,
        noise=_noise(descriptor),
        episodes_executed=row.episodes_executed,
        recorded_at=record.recorded_at,
    )


def _counted(rows: Rows) -> int:
    return sum(row.n for row in rows if row.state == "counted")


def _switches(rows: Rows) -> int:
    """Changes of the deployed mixture, in the order of issue."""
    mixtures = [row.descriptor.mixture for row in rows]
    return sum(not one.same_as(other) for one, other in pairwise(mixtures))


def _seconds(rows: Rows) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for kind, seconds in row.timings.items():
            totals[kind] = totals.get(kind, 0.0) + seconds
    return totals
