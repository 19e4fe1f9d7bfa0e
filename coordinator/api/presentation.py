"""Pure functions that turn records into response models, and compute all that routes show."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import RemoteError, RiffleError
from riffle.common.protocol.wire import Conservation
from riffle.coordinator.api import models
from riffle.coordinator.batches import ledger
from riffle.coordinator.batches.counts import private_counts, value_estimate
from riffle.coordinator.learning.true_values import Bands, Curve, TrueRow
from riffle.coordinator.store.records import DeploymentRecord, LedgerRecord, RunRecord, Tally

Spends = Sequence[LedgerRecord]
Rows = Sequence[DeploymentRecord]
ShufflerRecord = Conservation | RiffleError
"""The shuffler's record of a batch, or the error that explains why it is missing."""

Model = TypeVar("Model", bound=models.Answer)


def _model(kind: type[Model], *records: object, **values: object) -> Model:
    """Builds a model. Reads fields that ``values`` lacks from the first record that has them."""
    for name in kind.model_fields.keys() - values.keys():
        for record in records:
            if hasattr(record, name):
                values[name] = getattr(record, name)
                break
    return kind.model_validate(values)


def run_model(run: RunRecord, tally: Tally, trouble: str | None) -> models.Run:
    """Presents a run. ``trouble`` comes from the run's driver if this replica drives the run."""
    summary = run.summary or {}
    progress = {"stage": summary.get("stage", 0), "active": summary.get("active")}
    if progress["stage"]:
        progress |= {name: summary.get(name) for name in ("value_estimate", "radius")}
    return _model(
        models.Run,
        run,
        tally,
        name=run.spec.name,
        trouble=trouble or run.trouble or None,
        **progress,
    )


def deployment_model(kind: type[Model], row: DeploymentRecord, **values: object) -> Model:
    """Presents a deployment as a `models.Deployment` or a class derived from it."""
    descriptor = row.descriptor
    L, noise = descriptor.padding.messages, _noise(descriptor)
    return _model(kind, row, descriptor, messages=L, noise=noise, **values)


def detail_model(
    row: DeploymentRecord, histogram: Ints | None, spend: LedgerRecord | None, delta: float
) -> models.DeploymentDetail:
    """Presents a deployment with its private counts, value estimate and spend, if they exist."""
    counts = None if histogram is None else private_counts(row.descriptor, histogram)
    return deployment_model(
        models.DeploymentDetail,
        row,
        counts=counts,
        value_estimate=None if counts is None else value_estimate(counts, delta),
        spend=None if spend is None else _spend(row, spend),
    )


def ledger_model(run: RunRecord, rows: Rows, spends: Spends) -> models.Ledger:
    """Presents all spends of a run and their composition."""
    by_index = {row.index: row for row in rows}
    # Spends are read after rows, so a deployment issued in between may have a spend but no row.
    pairs = [(by_index[spend.index], spend) for spend in spends if spend.index in by_index]
    entries = [_spend(row, spend) for row, spend in pairs]
    total = ledger.composed([(row.descriptor, spend.spend) for row, spend in pairs])
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
    return _model(
        models.Result,
        run,
        total,
        policy=summary.get("policy"),
        value_estimate=summary.get("value_estimate"),
        active=summary.get("active"),
        episodes=sum(row.n for row in rows if row.state == "counted"),
        episodes_executed=sum(row.executed for row in rows),
        episodes_planned=run.spec.episodes,
        reports=sum(entry.n for entry in total.entries),
        messages_forwarded=sum(entry.messages for entry in total.entries),
        messages_counted=sum(entry.opened for entry in total.entries),
        failed=sum(entry.failed for entry in total.entries),
        suspicious_batches=sum(entry.suspicious or False for entry in total.entries),
        policy_switches=_switches(rows),
        timings=_seconds(rows),
        constants=summary.get("constants", {}),
    )


def true_values_model(
    curve: Curve, rows: Sequence[TrueRow], bands: Bands | None
) -> models.TrueValueCurve:
    """Presents supplied true values, the regret computed from them, and bands over runs."""
    return _model(
        models.TrueValueCurve,
        curve,
        optimal_value=rows[0].optimal if rows else None,
        deployments=[row.index for row in rows if row.episodes > 0],
        bands=bands,
    )


def conservation_model(
    rows: Rows, spends: Spends, records: Sequence[ShufflerRecord]
) -> models.RunConservation:
    """Presents what became of messages at both services, for each batch and in total."""
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
    # The shuffler knows every deposited batch, so a batch that it does not know has no report.
    unknown = isinstance(record, RemoteError) and record.slug == "unknown-batch"
    empty = unknown and row.opened_at is None
    expected = row.n * row.descriptor.padding.messages
    return _model(
        models.BatchConservation,
        row,
        deployment=row.index,
        expected=expected,
        opened=None if spend is None else spend.opened,
        failed=None if spend is None else spend.failed,
        shuffler=known,
        trouble=record.detail if isinstance(record, RiffleError) and not empty else None,
        balanced=empty or _balanced(expected, spend, known),
    )


def _balanced(
    expected: int, spend: LedgerRecord | None, record: Conservation | None
) -> bool | None:
    """Returns whether the numbers of both services add up and agree; None if this is not known."""
    if spend is not None and spend.opened + spend.failed != expected:
        return False
    if record is None:
        return None
    forwarded = None if record.messages is None else record.messages.forwarded
    return record.balanced and (spend is None or forwarded == expected)


def _noise(descriptor: BatchDescriptor) -> models.Noise:
    noise, n = descriptor.batch_noise, descriptor.n
    values = {"variance": noise.variance(n), "expected_ones": noise.mean(n)}
    return _model(models.Noise, descriptor.noise, **values)


def _spend(row: DeploymentRecord, record: LedgerRecord) -> models.Spend:
    descriptor, spend = row.descriptor, record.spend
    return _model(
        models.Spend,
        record,
        spend,
        row,
        descriptor,
        record.check,
        deployment=row.index,
        dishonest_fraction=descriptor.guarantee.dishonest_fraction,
        dishonest_reports=spend.dishonest,
        used=spend.within_promise,
        noise=_noise(descriptor),
    )


def _switches(rows: Rows) -> int:
    mixtures = [row.descriptor.mixture for row in rows]
    return sum(not before.same_as(after) for before, after in pairwise(mixtures))


def _seconds(rows: Rows) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for kind, seconds in row.timings.items():
            totals[kind] = totals.get(kind, 0.0) + seconds
    return totals
