"""The coordinator as an object: what its routes ask for."""

import asyncio
import secrets
from pathlib import Path

from riffle.common.process.workers import in_thread
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.coordinator.batches.issue import Issue, check_bytes, same_deployment
from riffle.coordinator.learners.registry import batches, refusal
from riffle.coordinator.learning.learner import Deployment, Learner, LearnerError
from riffle.coordinator.metrics import JOURNAL
from riffle.coordinator.runs.desk import Desk
from riffle.coordinator.runs.drivers import Drivers
from riffle.coordinator.specs import MANUAL, ManualDeployment, RunSpec
from riffle.coordinator.store.events import STOPPED, wait
from riffle.coordinator.store.leases import Replica
from riffle.coordinator.store.records import DeploymentRecord

LONGEST_WAIT_SECONDS = 30.0


class Coordinator:
    """All runs of one store. Made and closed inside a running event loop."""

    def __init__(self, desk: Desk, *, test_entry: bool, replica: Replica) -> None:
        self.desk = desk
        self._test_entry = test_entry
        self._drivers = Drivers(desk, replica)
        self._listening: asyncio.Task[None] | None = None
        self._restarts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Take up every run where it was left, unless another replica drives it."""
        await in_thread(self.desk.erase_keys)
        self._listening = asyncio.create_task(self.desk.store.listen(self._heard))
        await self._drivers.start()

    async def close(self) -> None:
        """Stop driving; nothing is lost, `start` takes up again."""
        if self._listening is not None:
            self._listening.cancel()
        if self._restarts:  # each would go on to drive a run that nobody halts
            await asyncio.wait(self._restarts)
        await self._drivers.close()

    # -- runs ------------------------------------------------------------------------------------

    async def create(self, spec: RunSpec) -> str:
        """Make a run with its first deployment and start driving it; returns its id.

        Raises:
            RemoteError: ``invalid-spec``, ``batch-too-small`` (naming the smallest n),
                ``test-entry-refused``, ``wrong-state`` when the id has another spec.
        """
        if spec.test_seed is not None and not self._test_entry:
            raise RemoteError("test-entry-refused", "this coordinator takes no test_seed")
        run_id = spec.run_id or secrets.token_hex(16)
        learner, first = await in_thread(self._first, run_id, spec)
        now, holder, until = self.desk.clock(), self._drivers.name, self._drivers.until
        create = self.desk.store.create_run
        lease = await in_thread(create, run_id, spec, first, now, holder, until)
        if lease is not None:
            self._drivers.drive(lease, learner)
            self.desk.bell.ring(run_id)
        return run_id

    def _first(self, run_id: str, spec: RunSpec) -> tuple[Learner, Issue | None]:
        learner = self.desk.registry.build(spec)
        for n, layer in batches(learner):
            check_bytes(spec, n, layer)
        try:
            deployment = learner.next_deployment()
        except LearnerError as error:
            JOURNAL.exception("learner-failed", error, run_id=run_id)
            raise refusal(spec, error) from error
        if deployment is None:
            return learner, None
        return learner, self.desk.issue(run_id, spec, deployment, index=0, step=0)

    async def stop(self, run_id: str) -> None:
        """Stop a run; its open batch is abandoned. Stopping a stopped run changes nothing.

        Raises:
            RemoteError: ``unknown-run``; ``wrong-state`` when it finished or failed.
        """
        run = await in_thread(self.desk.store.run, run_id)
        if run.state == "stopped":
            return
        if run.state != "running":
            raise RemoteError("wrong-state", f"run {run_id} is {run.state}")
        lease = await self._drivers.halt(run_id)
        try:
            await in_thread(self.desk.store.stop, run_id, self.desk.clock())
        except LocalError as error:
            raise RemoteError(error.slug, "the run ended meanwhile") from error
        finally:
            if lease is not None:
                self._drivers.drive(lease)
            self.desk.bell.ring(run_id)

    def trouble(self, run_id: str) -> str | None:
        """What keeps a run that is driven here from going on at the moment, if anything."""
        return self._drivers.trouble(run_id)

    def _heard(self, what: str) -> None:
        """A replica, perhaps this one, has changed a run; or "": one may have, unheard."""
        if not what:
            self.desk.bell.ring_all()
            return
        self.desk.bell.ring(what.removeprefix(STOPPED))
        task = asyncio.create_task(self._drivers.heard(what), name=f"news {what}")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    # -- deployments by hand ---------------------------------------------------------------------

    async def deploy(self, run_id: str, wanted: ManualDeployment) -> DeploymentRecord:
        """Issue a deployment asked for by hand.

        Raises:
            RemoteError: ``unknown-run``, ``invalid-spec``, ``batch-too-small``, ``wrong-state``.
        """
        issued = await in_thread(self._deploy, run_id, wanted)
        self.desk.bell.ring(run_id)
        return issued

    def _deploy(self, run_id: str, wanted: ManualDeployment) -> DeploymentRecord:
        run, rows = self.desk.store.run(run_id), self.desk.store.deployments(run_id)
        if run.spec.learner != MANUAL:
            raise RemoteError("wrong-state", f"run {run_id} is driven by {run.spec.learner}")
        if wanted.layer is not None and wanted.layer >= run.spec.horizon:
            raise RemoteError("invalid-spec", f"layer: must be below {run.spec.horizon}")
        step = rows[-1].step + 1 if rows else 0
        mixture = wanted.mixture(run.spec.sizes)
        number = step if wanted.step is None else wanted.step
        asked = Deployment(number, "manual", mixture, wanted.episodes, wanted.layer)
        if number != step:
            return _repeated(rows, asked)
        issued = self.desk.issue(run_id, run.spec, asked, index=len(rows), step=step)
        return self.desk.store.issue_manual(run_id, issued, self.desk.clock())

    # -- waiting ---------------------------------------------------------------------------------

    async def current(
        self, run_id: str, known: int | None, seconds: float
    ) -> DeploymentRecord | None:
        """The newest deployment, as soon as its index is not ``known``, or after ``seconds``."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(seconds, LONGEST_WAIT_SECONDS)
        await in_thread(self.desk.store.run, run_id)  # a ticket of no run would be kept for ever
        while True:
            ticket = self.desk.bell.ticket(run_id)
            run = await in_thread(self.desk.store.run, run_id)
            newest = await in_thread(self.desk.store.newest, run_id)
            left = deadline - clock()
            changed = newest is not None and newest.index != known
            over = run.state != "running" or self.desk.bell.closed
            if changed or left <= 0 or over:
                return newest
            await wait(ticket, min(left, self.desk.bell.pause))


def _repeated(rows: list[DeploymentRecord], asked: Deployment) -> DeploymentRecord:
    """A deployment that was asked for before: the answer to a retry."""
    for row in reversed(rows):
        if row.step == asked.stage and same_deployment(row.deployment, asked):
            return row
    raise RemoteError("wrong-state", f"step {asked.stage} is not the next one, or was another one")


def prepare_directory(path: Path) -> None:
    """Make the data directory, readable by its owner only.

    Raises:
        LocalError: ``unavailable``.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError("unavailable", f"cannot use data directory {path}: {error}") from error
