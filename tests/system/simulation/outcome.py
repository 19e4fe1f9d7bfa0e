"""What every run must have come to, whatever befell it.

The counts of a batch follow from its descriptor alone: draws are keyed by run, batch and slot. So
the undisturbed run is played again, step by step, on the batches that came about: each deployment
must be the one that a fresh learner asks for, and each histogram the one of n users, each of whom
reported once.
"""

from functools import lru_cache
from itertools import groupby

from sqlalchemy import select

from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.coordinator.batches.counts import private_counts
from riffle.coordinator.batches.issue import same_deployment
from riffle.coordinator.states import TO_ACKNOWLEDGE
from riffle.coordinator.store.records import DeploymentRecord, RunRecord
from riffle.coordinator.store.transactions import Store
from riffle.experiments.per_user import Users, batch_histogram
from riffle.node_client.environments.registry import make
from riffle.shuffler.store import schema
from tests.system.simulation.installation import ENVIRONMENT, learners
from tests.system.simulation.watch import OVER
from tests.system.simulation.world import World

KEYED = ("run_id", "batch_id", "policies", "weights", "n", "noise")


def check(world: World) -> None:
    """Note whatever is not as in an undisturbed run."""
    store, shuffler = world.core("coordinator"), world.core("shuffler")
    for run in store.runs():
        _check_run(world, store, run)
    settled = {
        row.batch_id
        for run in store.runs()
        for row in store.deployments(run.id)
        if row.state in TO_ACKNOWLEDGE
    }
    with shuffler._store.engine.connect() as connection:
        world.watch.look(connection)
        query = select(schema.batches.c.batch_id, schema.batches.c.state)
        found = {row.batch_id: row.state for row in connection.execute(query)}
    expect = world.watch.expect
    for batch_id, state in found.items():
        expect(state in OVER, f"batch {batch_id} is {state} for ever")
        forgotten = "coordinator" in world.watch.rolled_back
        kept = state != "erased" or batch_id in settled or forgotten
        expect(kept, f"batch {batch_id} was erased, and never settled")
    folder = world.folder / "shuffler" / "secrets"
    # What a kill leaves of a batch that no commit ever knew stays: nothing was sealed to it.
    left = [file.name for file in folder.iterdir() if file.name.split(".")[0] in found]
    expect(not left, f"secrets are left: {left}")


def _check_run(world: World, store: Store, run: RunRecord) -> None:
    expect, rows = world.watch.expect, store.deployments(run.id)
    ended = run.state in ("finished", "stopped")
    # A run whose batches one side has forgotten fails, and says so.
    forgot = run.state == "failed" and bool(world.watch.rolled_back) and bool(run.message)
    expect(ended or forgot, f"run {run.id} {run.state}: {run.message}")
    counted = [row.index for row in rows if row.state == "counted"]
    told = [event.data["index"] for event in store.events(run.id) if event.kind == "batch_counted"]
    spent = [entry.index for entry in store.ledger(run.id)]
    expect(counted == told == spent, f"run {run.id}: counted {counted}, {told}, spent {spent}")
    for row in rows:
        handed_over = row.batch_id in world.watch.released
        expect(
            row.state != "counted" or handed_over,
            f"batch {row.batch_id} counted, never handed over",
        )
        unspent = row.state not in TO_ACKNOWLEDGE and not world.watch.rolled_back
        expect(not (handed_over and unspent), f"batch {row.batch_id} handed over, not spent")
    _replay(world, store, run, rows)


def _replay(world: World, store: Store, run: RunRecord, rows: list[DeploymentRecord]) -> None:
    """The undisturbed run on these batches."""
    expect, histograms = world.watch.expect, store.histograms(run.id)
    learner = learners().build(run.spec)
    for step, tries in groupby(rows, key=lambda row: row.step):
        wanted, issued = learner.next_deployment(), list(tries)
        for row in issued:
            same = wanted is not None and same_deployment(row.deployment, wanted)
            expect(same, f"run {run.id}, step {step}: another deployment than undisturbed")
        states = [row.state for row in issued]
        last = issued[-1]
        early = [state for state in states[:-1] if state != "abandoned"]
        expect(not early, f"run {run.id}, step {step}: {states}")
        if last.state != "counted":
            ended = run.state in ("stopped", "failed")
            expect(ended, f"run {run.id} {run.state}, step {step}: {states}")
            return
        expected = _counts(last.descriptor)
        found = tuple(histograms[last.index].tolist())
        expect(found == expected, f"batch {last.batch_id}: counts {found}, undisturbed {expected}")
        learner.observe(private_counts(last.descriptor, histograms[last.index]))
    over = learner.next_deployment() is None
    ended = over == (run.state == "finished") or run.state in ("stopped", "failed")
    expect(ended, f"run {run.id} {run.state}")


def _counts(descriptor: BatchDescriptor) -> tuple[int, ...]:
    """Counts of all n users, each once; they depend on nothing else of a descriptor."""
    keyed = descriptor.model_copy(update={"expires_at": 1, "analyzer_key": "00" * 32})
    return _undisturbed(keyed.model_dump_json())


@lru_cache(4096)
def _undisturbed(document: str) -> tuple[int, ...]:
    descriptor = BatchDescriptor.model_validate_json(document)
    environment = make("RiverSwim-v0", **ENVIRONMENT)
    return tuple(batch_histogram(descriptor, Users(environment)).tolist())
