"""Turns records into response models. Pure: everything that routes show is computed here."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from riffle.common.accounting import run_guarantee
from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import RiffleError
from riffle.common.protocol.messages import Conservation
from riffle.coordinator.api import models
from riffle.coordinator.batches import ledger
from riffle.coordinator.batches.counts import counts_document, private_counts, value_estimate
from riffle.coordinator.learning.true_values import LEVEL, Band, Bands, Curve, TrueRow
from riffle.coordinator.store.records import DeploymentRecord, LedgerRecord, RunRecord, Tally

Spends = Sequence[LedgerRecord]
Rows = Sequence[DeploymentRecord]
ShufflerRecord = Conservation | RiffleError
"""The shuffler's record of a batch, or why it is missing."""


def run_model(run: RunRecord, tally: Tally, trouble: str | None) -> models.Run:
    """Presents a run and its progress."""
    summary = run.summary or {}
    return models.Run(
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


def deployment_model(row: DeploymentRecord) -> models.Deployment:
    """Presents a deployment as issued."""
    return models.Deployment(**_deployment(row, row.descriptor))


def progress_model(row: DeploymentRecord) -> models.DeploymentProgress:
    """Presents a deployment and its progress."""
    return models.DeploymentProgress(**_deployment(row, row.descriptor), **_progress(row))


def detail_model(
    row: DeploymentRecord, histogram: Ints | None, spend: LedgerRecord | None, delta: float
) -> models.DeploymentDetail:
    """Presents a deployment with its private counts, value estimate and spend, if it has them."""
    descriptor = row.descriptor
    counts = None if histogram is None else private_counts(descriptor, histogram)
    estimate = None if counts is None else value_estimate(counts, delta)
    return models.DeploymentDetail(
        **_deployment(row, descriptor),
        **_progress(row),
        counts=None if counts is None else models.Counts(**counts_document(counts)),
        value_estimate=estimate,
        spend=None if spend is None else _spend(row, descriptor, spend),
    )


def ledger_model(run: RunRecord, rows: Rows, spends: Spends) -> models.Ledger:
    """Presents all spends of a run and their composition."""
    by_index = {row.index: row for row in rows}
    # Spends are read after rows: a spend of a deployment issued in between has no row here.
    pairs = [(by_index[spend.index], spend) for spend in spends if spend.index in by_index]
    entries = [_spend(row, row.descriptor, spend) for row, spend in pairs]
    total = run_guarantee([ledger.entry(row.descriptor, spend.spend) for row, spend in pairs])
    budget = run.spec.budget
    return models.Ledger(
        epsilon=total.epsilon,
        beta=total.beta,
        budget_epsilon=budget.epsilon,
        budget_beta=budget.beta,
        within_budget=total.epsilon <= budget.epsilon and total.beta <= budget.beta,
        entries=entries,
    )


def result_model(run: RunRecord, rows: Rows, spends: Spends) -> models.Result:
    """Presents the answer of a run so far."""
    total, summary = ledger_model(run, rows, spends), run.summary or {}
    return models.Result(
        state=run.state,
        message=run.message,
        policy=summary.get("policy"),
        value_estimate=summary.get("value_estimate"),
        active=summary.get("active"),
        epsilon=total.epsilon,
        beta=total.beta,
        within_budget=total.within_budget,
        episodes=_counted(rows),
        episodes_executed=sum(row.executed for row in rows),
        episodes_planned=run.spec.episodes,
        reports=sum(entry.n for entry in total.entries),
        messages_forwarded=sum(entry.messages for entry in total.entries),
        messages_counted=sum(entry.opened for entry in total.entries),
        failed=sum(entry.failed for entry in total.entries),
        policy_switches=_switches(rows),
        timings=_seconds(rows),
        constants=summary.get("constants", {}),
    )


def true_values_model(
    curve: Curve, rows: Sequence[TrueRow], bands: Bands | None
) -> models.TrueValueCurve:
    """Presents supplied true values, the regret that follows, and bands over runs."""
    return models.TrueValueCurve(
        optimal_value=rows[0].optimal if rows else None,
        deployments=[row.index for row in rows if row.episodes > 0],
        episodes=curve.episodes.tolist(),
        value=curve.value.tolist(),
        regret=curve.regret.tolist(),
        bands=None if bands is None else _bands(bands),
    )


def conservation_model(
    rows: Rows, spends: Spends, records: Sequence[ShufflerRecord]
) -> models.RunConservation:
    """Presents conservation over both services, for all batches and in sum.

    At the shuffler accepted = held + forwarded + dropped; of a settled batch opened + failed = n L
    = forwarded.
    """
    by_index = {spend.index: spend for spend in spends}
    batches = [
        _batch_conservation(row, by_index.get(row.index), record)
        for row, record in zip(rows, records, strict=True)
    ]
    flows = [each.shuffler.messages for each in batches if each.shuffler and each.shuffler.messages]
    balances = [each.balanced for each in batches]
    return models.RunConservation(
        batches=batches,
        accepted=sum(flow.accepted for flow in flows),
        held=sum(flow.held for flow in flows),
        forwarded=sum(flow.forwarded for flow in flows),
        dropped=sum(flow.dropped for flow in flows),
        opened=sum(each.opened or 0 for each in batches),
        failed=sum(each.failed or 0 for each in batches),
        balanced=False if False in balances else None if None in balances else True,
    )


def _batch_conservation(
    row: DeploymentRecord, spend: LedgerRecord | None, record: ShufflerRecord
) -> models.BatchConservation:
    known = record if isinstance(record, Conservation) else None
    expected = row.n * row.descriptor.padding.messages
    return models.BatchConservation(
        deployment=row.index,
        batch_id=row.batch_id,
        state=row.state,
        n=row.n,
        expected=expected,
        opened=None if spend is None else spend.opened,
        failed=None if spend is None else spend.failed,
        shuffler=known,
        trouble=record.detail if isinstance(record, RiffleError) else None,
        balanced=_balanced(expected, spend, known),
    )


def _balanced(
    expected: int, spend: LedgerRecord | None, record: Conservation | None
) -> bool | None:
    """Tells whether both sides add up and agree; None if the shuffler's record is missing."""
    if spend is not None and spend.opened + spend.failed != expected:
        return False
    if record is None:
        return None
    forwarded = None if record.messages is None else record.messages.forwarded
    return record.balanced and (spend is None or forwarded == expected)


def _bands(bands: Bands) -> models.Bands:
    def model(band: Band) -> models.Band:
        return models.Band(mean=band.mean.tolist(), low=band.low.tolist(), high=band.high.tolist())

    return models.Bands(
        runs=bands.runs,
        confidence=LEVEL,
        episodes=bands.episodes.tolist(),
        regret=model(bands.regret),
        value=model(bands.value),
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
        "mixture": models.Mixture(
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


def _noise(descriptor: BatchDescriptor) -> models.Noise:
    noise, n = descriptor.to_noise(), descriptor.n
    return models.Noise(
        **descriptor.noise.model_dump(), variance=noise.variance(n), expected_ones=noise.mean(n)
    )


def _spend(
    row: DeploymentRecord, descriptor: BatchDescriptor, record: LedgerRecord
) -> models.Spend:
    return models.Spend(
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
    """Counts changes of the deployed mixture, in the order of issue."""
    mixtures = [row.descriptor.mixture for row in rows]
    return sum(not before.same_as(after) for before, after in pairwise(mixtures))


def _seconds(rows: Rows) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for kind, seconds in row.timings.items():
            totals[kind] = totals.get(kind, 0.0) + seconds
    return totals
