"""A node inside an app, against a shuffler in memory, on a clock that only the test moves."""

import asyncio
import heapq
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from riffle.common.mechanism.counters import Support
from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.node_client import main as module
from riffle.node_client.episode import encode_episode
from riffle.node_client.ledger import NAME, Limit, PersonalLedger
from riffle.node_client.participant import Participant, UserLease
from riffle.node_client.runner import RETRY_SECONDS
from riffle.node_client.sealing import seal_reports
from riffle.node_client.users import Users, opaque_id
from tests.node_client import world
from tests.node_client.fake_shuffler import FakeShuffler
from tests.node_client.running import node_ids, shuffler
from tests.node_client.test_ledger import spent

KEY = b"k" * 32
SEED = {"test_seed": 7}
"""Seeded noise, so that the counts of episodes are known exactly."""


class VirtualTime:
    def __init__(self) -> None:
        self.now = float(world.NOW)
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self._count += 1
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds, self._count, woken))
        await woken.wait()

    async def pass_by(self, seconds: float) -> None:
        """Lets time pass, from one sleeper's end to the next."""
        end = self.now + seconds
        await quiet()
        while self._sleepers and self._sleepers[0][0] <= end:
            self.now, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            await quiet()
        self.now = end


async def quiet() -> None:
    """Lets others run until nothing is left to do now, sealing in threads included."""
    loop: Any = asyncio.get_running_loop()
    idle = 0
    while idle < 5:
        await asyncio.sleep(0.002)
        threads = loop._default_executor
        busy = threads is not None and threads._idle_semaphore._value < len(threads._threads)
        idle = 0 if busy else idle + 1


class App:
    """An app whose process can be killed: nothing that it has is closed in order."""

    def __init__(self, fake: FakeShuffler, folder: Path, time: VirtualTime) -> None:
        self.fake, self.folder, self.time = fake, folder, time
        fake.clock = time.clock
        credentials = [{"node_id": n, "token": f"token-{n}"} for n in node_ids(2)]
        (folder / "credentials.json").write_text(json.dumps(credentials))
        (folder / "users_key").write_text(KEY.hex())

    def settings(self) -> dict[str, Any]:
        return {
            "shuffler_url": "http://127.0.0.1",
            "shuffler_id": "shuffler-1",
            "shuffler_key": world.public(world.SHUFFLER).hex(),
            "coordinator_key": world.public(world.COORDINATOR).hex(),
            "credentials_file": self.folder / "credentials.json",
            "users_key_file": self.folder / "users_key",
            "state_dir": self.folder / "state",
            "max_epsilon": 5.0,
            "max_beta": 1e-2,
            "min_dishonest_fraction": 0.1,
            "test_entry": True,
        }

    @property
    def times(self) -> dict[str, Any]:
        return {"clock": self.time.clock, "sleep": self.time.sleep}

    def participant(self, **changes: Any) -> Participant:
        return Participant(world.SIZES, **self.times, **(self.settings() | changes))

    @asynccontextmanager
    async def running(self, **changes: Any) -> AsyncIterator[Participant]:
        async with self.participant(**changes) as made:
            yield made

    async def kill(self, participant: Participant) -> None:
        """Ends a participant as a killed process does: no task goes on, the files are let go."""
        tasks = [
            task
            for held in participant._held.values()
            for task in (held.timer, held.delivery)
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        participant._users.close()
        await participant._pipeline.shuffler.http.aclose()

    def on_disk(self) -> bytes:
        return b"".join(file.read_bytes() for file in (self.folder / "state").iterdir())


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    made = App(shuffler(2), tmp_path, VirtualTime())

    def client(*_: object) -> httpx.AsyncClient:
        return made.fake.client()

    monkeypatch.setattr(module, "open_client", client)
    return made


def play(lease: UserLease, step: int, state: int) -> int:
    """One step of a person: she goes on to (state + action + 1) mod X, and is glad in state 3."""
    action = lease.act(step, state)
    following = (state + action + 1) % world.SIZES.X
    lease.record(step, state, action, float(state == 3), following)
    return following


async def whole(participant: Participant, user: str) -> None:
    lease = await participant.lease(user)
    state = 0
    for step in range(world.SIZES.H):
        state = play(lease, step, state)
    await lease.report()


def steps_on_disk(lease: UserLease) -> bytes:
    return lease.row.model_dump_json(include={"steps"}).encode()[1:-1]


def counts(fake: FakeShuffler) -> Any:
    """What the reports of the batch counted, without its noise, which is seeded by slot."""
    (batch,) = fake.batches.values()
    slots = [slot for key, (_, slot, _) in batch.leases.items() if key in batch.reports]
    plan = batch.descriptor
    noise = [encode_episode(plan, None, slot, test_entry=True) for slot in slots]
    C = plan.layout.counters
    return batch.counts()[0][:C] - np.bincount(np.concatenate(noise), minlength=C + 1)[:C]


@pytest.mark.parametrize("inside", [True, False])
def test_an_episode_outside_the_support_is_reported_as_noise_only(
    app: App, *, inside: bool
) -> None:
    """An app that declares no support of its own takes any, and checks each episode instead."""
    X, A, farther = world.SIZES.X, world.SIZES.A, 1 if inside else 2
    following = tuple(tuple(((x + a + farther) % X,) for a in range(A)) for x in range(X))
    app.fake.deposit(world.signed(**SEED, support=Support((0,), (following,))))

    async def go() -> None:
        async with app.running() as participant:
            await whole(participant, "ann@example.org")

    asyncio.run(go())
    assert np.abs(counts(app.fake)).sum() == (world.SIZES.H if inside else 0)


def test_an_apps_pins_hold_for_every_batch_it_is_offered(app: App) -> None:
    """No slot is taken until the owner has pinned the key of the batch."""
    app.fake.deposit(world.signed(**SEED))
    pins = app.folder / "pins"
    pins.write_text("ab" * 32)

    async def go() -> None:
        async with app.running(analyzer_keys_file=pins) as participant:
            with pytest.raises(LocalError, match="no open batch has room"):
                await participant.lease("ann@example.org")
        pins.write_text(world.ANALYZER.public.hex())
        async with app.running(analyzer_keys_file=pins) as participant:
            await whole(participant, "ann@example.org")

    asyncio.run(go())
    assert len(app.fake.reported) == 1


def test_a_user_plays_the_drawn_policy_and_reports(app: App) -> None:
    async def go() -> None:
        async with app.running() as participant:
            lease = await participant.lease("ann@example.org")
            assert (lease.step, lease.state) == (0, None)
            first = play(lease, 0, 0)
            assert (lease.step, lease.state) == (1, first)
            assert await participant.lease("ann@example.org") is lease
            play(lease, 1, first)
            await lease.report()
            with pytest.raises(LocalError, match="its report is sent"):
                await lease.report()
            with pytest.raises(LocalError, match="asked before") as caught:
                await participant.lease("ann@example.org")
            assert caught.value.slug == "user-unavailable"

    batch = app.fake.deposit(world.signed(**SEED))
    asyncio.run(go())
    (lease,) = batch.leases.values()
    assert lease[0] == opaque_id(KEY, "ann@example.org"), "the shuffler sees no address"
    assert counts(app.fake).sum() == world.SIZES.H


@pytest.mark.parametrize("episode_seconds", [None, 180])
def test_a_user_at_22_seconds_a_step_is_in_time_where_the_descriptor_gives_time(
    episode_seconds: int | None, app: App
) -> None:
    """With a lease of 120 seconds, 7 steps at 22 seconds end too late."""
    steps = {"horizon": 7, "data_slots": 7, "policies": (((1, 0, 1, 0),) * 7,), "weights": (2**32,)}
    steps |= {"noise": {"bits": 4, "p_numerator": 1, "p_log2": 2}, "noise_slots": 900}
    app.fake.deposit(world.signed(**SEED, **steps, episode_seconds=episode_seconds))

    async def go() -> None:
        sizes = replace(world.SIZES, H=7)
        async with Participant(sizes, **app.times, **app.settings()) as participant:
            lease, state = await participant.lease("ann"), 0
            for step in range(7):
                await app.time.pass_by(22)
                state = play(lease, step, state)
            await lease.report()

    if episode_seconds:
        asyncio.run(go())
        assert counts(app.fake).sum() == 7
    else:
        with pytest.raises(LocalError, match="this episode is over"):
            asyncio.run(go())
        assert not counts(app.fake).any()


def test_noise_is_sent_for_those_who_give_up_or_take_too_long(app: App) -> None:
    async def go() -> None:
        async with app.running() as participant:
            slow, tired = await participant.lease("slow"), await participant.lease("tired")
            for lease in (slow, tired):
                play(lease, 0, 0)
            tired.give_up()
            with pytest.raises(LocalError, match="over"):
                tired.record(1, 1, tired.act(1, 1), 0.0, 2)
            await quiet()
            assert len(batch.reports) == 1, "at once"
            await app.time.pass_by(slow.ends_at - app.time.now - 1)
            assert len(batch.reports) == 1
            await app.time.pass_by(1)
            await quiet()
            assert len(batch.reports) == 2, "well before the lease ends"
            with pytest.raises(LocalError, match="over"):
                await slow.report()

    batch = app.fake.deposit(world.signed(**SEED, episode_seconds=3_600))
    asyncio.run(go())
    assert not counts(app.fake).any()
    sizes = {len(report) for report in batch.reports.values()}
    assert sizes == {batch.descriptor.report_bytes}, "as long as every report"


def test_an_episode_survives_a_killed_app_at_every_point(app: App) -> None:
    batch = app.fake.deposit(world.signed(**SEED, episode_seconds=3_600))

    async def go() -> None:
        asked: list[tuple[int, int]] = []
        state = 0
        for step in range(world.SIZES.H):
            for _ in range(2):
                participant = await app.participant().__aenter__()
                lease = await participant.lease("ann")
                assert lease.step == step
                asked.append((step, lease.act(step, state)))
                await app.kill(participant)
            participant = await app.participant().__aenter__()
            lease = await participant.lease("ann")
            following = play(lease, step, state)
            assert play(lease, step, state) == following, "a step may be repeated"
            await app.kill(participant)
            state = following
        assert len(set(asked)) == world.SIZES.H, "the policy is drawn once"
        app.fake.faults, app.fake.faulty = ["lost"] * 3, "/reports"
        participant = await app.participant().__aenter__()
        report = asyncio.create_task((await participant.lease("ann")).report())
        while not app.fake.uploads:
            await asyncio.sleep(0.001)
        await app.kill(participant)
        await asyncio.gather(report, return_exceptions=True)
        async with app.running() as participant:
            await quiet()
            with pytest.raises(LocalError, match=r"asked before|over"):
                await participant.lease("ann")

    asyncio.run(go())
    assert len(set(app.fake.uploads)) == 1, "the same bytes again, never a second report"
    assert len(batch.reports) == len(batch.ends) == 1
    assert counts(app.fake).sum() == world.SIZES.H


def test_a_killed_app_sends_noise_when_it_starts_after_the_time(app: App) -> None:
    batch = app.fake.deposit(world.signed(**SEED, episode_seconds=3_600))

    async def go() -> None:
        participant = await app.participant().__aenter__()
        for user in ("late", "gone"):
            play(await participant.lease(user), 0, 0)
        gone = participant._held[opaque_id(KEY, "gone")]
        gone.keep(lease=replace(gone.row.lease, expires_at=0))
        await app.kill(participant)
        app.time.now += 3_665
        async with app.running() as participant:
            for user in ("late", "gone"):
                with pytest.raises(LocalError):
                    await participant.lease(user)
            await quiet()

    asyncio.run(go())
    assert len(batch.reports) == 1
    assert not counts(app.fake).any()


def test_an_app_that_never_comes_back_costs_its_users_nothing_but_their_noise(app: App) -> None:
    batch = app.fake.deposit(world.signed(**SEED, episode_seconds=3_600))

    async def go() -> None:
        participant = await app.participant().__aenter__()
        for number in range(world.N):
            play(await participant.lease(f"lost {number}"), 0, 0)
        await app.kill(participant)
        assert batch.free == 0
        assert not app.fake.uploads
        app.time.now += 3_600 + 120
        async with app.running(state_dir=app.folder / "another") as participant:
            for number in range(world.N):
                await whole(participant, f"other {number}")

    asyncio.run(go())
    assert app.fake.full()
    people = {user for user, _, _ in batch.leases.values()}
    assert people == {opaque_id(KEY, f"other {number}") for number in range(world.N)}
    assert counts(app.fake).sum() == world.N * world.SIZES.H


def test_what_is_private_leaves_the_disk_when_the_report_is_sealed(app: App) -> None:
    app.fake.deposit(world.signed(episode_seconds=3_600))
    marks: list[bytes] = []

    async def go() -> None:
        async with app.running() as participant:
            for end in ("report", "give up", "time"):
                lease = await participant.lease(end)
                state = play(lease, 0, 0)
                state = play(lease, 1, state)
                mark = steps_on_disk(lease)
                marks.append(mark)
                assert mark in app.on_disk(), "it must survive a restart until then"
                if end == "report":
                    await lease.report()
                elif end == "give up":
                    lease.give_up()
                else:
                    await app.time.pass_by(3_700)
                await quiet()
                assert mark not in app.on_disk()
        assert b"ann@example.org" not in app.on_disk()

    asyncio.run(go())
    assert len(marks) == 3


def test_a_sealed_report_is_on_disk_before_it_leaves_and_its_steps_are_not(app: App) -> None:
    app.fake.deposit(world.signed())

    async def go() -> None:
        async with app.running() as participant:
            app.fake.faults, app.fake.faulty = ["503"] * 50, "/reports"
            lease = await participant.lease("ann")
            play(lease, 1, play(lease, 0, 0))
            mark = steps_on_disk(lease)
            report = asyncio.create_task(lease.report())
            while lease.row.sealed is None:
                await asyncio.sleep(0.001)
            assert lease.row.sealed[:64].encode() in app.on_disk()
            assert mark not in app.on_disk()
            app.fake.faults.clear()
            await report

    asyncio.run(go())


def record(lease: UserLease, *steps: tuple[int, int, int]) -> None:
    for number, state, after in steps:
        lease.record(number, state, lease.act(number, state), 0.0, after)


def refuse(app: App, act: Callable[[UserLease], object], **changes: Any) -> RiffleError:
    async def go() -> RiffleError:
        async with app.running(**changes) as participant:
            lease = await participant.lease("ann")
            with pytest.raises(RiffleError) as caught:
                done = act(lease)
                if asyncio.iscoroutine(done):
                    await done
            return caught.value

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("act", "slug", "says"),
    [
        (lambda lease: lease.act(2, 0), "wrong-size", "steps are 0 to 1"),
        (lambda lease: lease.act(0, 4), "wrong-size", "states 0 to 3"),
        (lambda lease: lease.record(1, 0, 0, 0.0, 0), "wrong-state", "next step is 0"),
        (lambda lease: lease.record(0, 0, 1 - lease.act(0, 0), 0.0, 0), "wrong-state", "act"),
        (lambda lease: record(lease, (1, 0, 0)), "wrong-state", "next step is 0"),
        (lambda lease: record(lease, (0, 0, 1), (0, 0, 2)), "wrong-state", "step is 1"),
        (lambda lease: record(lease, (0, 0, 1), (1, 2, 0)), "wrong-state", "led to"),
        (lambda lease: lease.record(0, 0, lease.act(0, 0), 1.5, 0), "wrong-size", "rewards"),
        (lambda lease: lease.record(0, 0, lease.act(0, 0), np.nan, 0), "wrong-size", "rewards"),
        (lambda lease: lease.record(0, 0, lease.act(0, 0), 0.0, 4), "wrong-size", "states"),
        (lambda lease: lease.record(0, 0, lease.act(0, 0), 0.0, None), "wrong-size", "absorbing"),
        (lambda lease: lease.report(), "wrong-state", "0 of 2 steps"),
    ],
)
def test_what_an_app_does_wrong_is_said(
    act: Callable[[UserLease], object], slug: str, says: str, app: App
) -> None:
    app.fake.deposit(world.signed())
    error = refuse(app, act)
    assert (error.slug, says in error.detail) == (slug, True), error.detail


def test_who_gets_no_lease_is_told_why(app: App) -> None:
    app.fake.elsewhere.add(opaque_id(KEY, "elsewhere"))

    async def go() -> None:
        async with app.running() as participant:
            with pytest.raises(LocalError, match="try again later"):
                await participant.lease("ann")
            app.fake.deposit(world.signed())
            with pytest.raises(RemoteError, match="gets no slot now"):
                await participant.lease("elsewhere")
            app.fake.batches.clear()
            soon = int(app.time.now) + 600
            app.fake.deposit(world.signed(episode_seconds=600, deployment=2, expires_at=soon))
            with pytest.raises(LocalError, match="try again later"):
                await participant.lease("ann")
            assert not app.fake.batches[next(iter(app.fake.batches))].ends, "no slot was taken"

    asyncio.run(go())


def test_an_early_end_is_reported_with_the_absorbing_state(app: App) -> None:
    app.fake.deposit(world.signed(**SEED))

    async def go() -> None:
        absorbing = Participant(world.SIZES, absorbing=3, **app.times, **app.settings())
        async with absorbing as participant:
            lease = await participant.lease("ann")
            lease.record(0, 0, lease.act(0, 0), 1.0, None)
            assert (lease.step, lease.state) == (world.SIZES.H, None)
            await lease.report()

    asyncio.run(go())
    assert counts(app.fake).sum() == world.SIZES.H


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"users_key_file": None}, "openssl rand -hex 32"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"shuffler_url": "http://shuffler:8401"}, "TLS is mandatory off loopback"),
        ({"shuffler_url": "https://shuffler:8401"}, "test_entry needs a shuffler on loopback"),
        (
            {"shuffler_url": "https://shuffler:1", "test_entry": False, "max_owner_share": 0.11},
            "max_owner_share 0.11 must not be above min_dishonest_fraction 0.1",
        ),
    ],
)
def test_an_app_is_told_what_is_wrong_with_its_settings(
    changes: dict[str, Any], says: str, app: App
) -> None:
    with pytest.raises(LocalError) as caught:
        app.participant(**changes)
    assert caught.value.slug == "invalid-spec"
    assert says in caught.value.detail


@pytest.mark.parametrize("user", ["", " ann", "ann ", "ann  b", "a" * 201, "\ud800", "a\nb"])
def test_ids_that_could_make_one_person_two_are_refused(user: str, app: App) -> None:
    async def go() -> None:
        async with app.running() as participant:
            with pytest.raises(LocalError, match="user's id") as caught:
                await participant.lease(user)
            assert caught.value.slug == "invalid-spec"

    asyncio.run(go())


def test_a_lease_that_the_app_no_longer_waits_for_is_returned_by_the_next_call(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = app.fake.deposit(world.signed())
    marking, mark = threading.Event(), Users.mark_asked

    def slow(*values: Any) -> object:
        marking.set()
        time.sleep(0.05)
        return mark(*values)

    async def go() -> None:
        async with app.running() as participant:
            monkeypatch.setattr(Users, "mark_asked", slow)
            first = asyncio.create_task(participant.lease("ann"))
            await asyncio.to_thread(marking.wait, 10)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            async with asyncio.timeout(10):
                while not participant._held:
                    await asyncio.sleep(0.001)
            await whole(participant, "ann")

    asyncio.run(go())
    assert len(batch.reports) == 1


# With the owner's ledger

HOUR = 3_600


def limited(app: App, reports: int = 1, **changes: Any) -> dict[str, Any]:
    """Settings with a lifetime limit that lets a person into this many batches."""
    limit = {"lifetime_epsilon": 1.0001 * spent(reports), "lifetime_beta": 1e-2}
    return {"ledger_file": app.folder / "ledger.sqlite"} | limit | changes


def charged(app: App, user: str) -> list[str]:
    """The batches that a person was charged for."""
    heads = HeadFolder(app.folder, NAME)
    histories = PersonalLedger(app.folder / "ledger.sqlite", heads, Limit(1.0, 1e-2)).histories()
    return [charge.batch_id for _, charge in histories.get(opaque_id(KEY, user), [])]


def test_a_limit_is_refused_before_anything_leaves(app: App) -> None:
    async def go() -> None:
        app.fake.deposit(world.signed())
        async with app.running(**limited(app)) as participant:
            await whole(participant, "ann")
        app.fake.batches.clear()
        app.fake.deposit(world.signed(deployment=1))
        sent = app.fake.requests["leases"]
        # Another app of the owner, or the same one without its memory.
        async with app.running(**limited(app, state_dir=app.folder / "new")) as participant:
            with pytest.raises(LocalError, match="lifetime limit") as caught:
                await participant.lease("ann")
            assert caught.value.slug == "user-unavailable"
            assert app.fake.requests["leases"] == sent
            await whole(participant, "bob")

    asyncio.run(go())
    assert [len(charged(app, user)) for user in ("ann", "bob")] == [1, 1]


@pytest.mark.parametrize(
    "end", ["report", "give up", "time", "the shuffler is away", "the shuffler refuses"]
)
def test_a_report_is_charged_before_the_episode_and_stays_charged(end: str, app: App) -> None:
    batch = app.fake.deposit(world.signed(episode_seconds=HOUR))

    async def go() -> None:
        async with app.running(**limited(app)) as participant:
            lease = await participant.lease("ann")
            assert charged(app, "ann") == [batch.descriptor.batch_id]
            play(lease, 1, play(lease, 0, 0))
            if end == "report":
                await lease.report()
            elif end == "give up":
                lease.give_up()
            elif end == "the shuffler refuses":
                app.fake.lose_leases = True
                with pytest.raises(RemoteError, match="refused"):
                    await lease.report()
            else:
                if end != "time":
                    app.fake.faults, app.fake.faulty = ["refused"] * 6, ""
                await app.time.pass_by(2 * HOUR)
            await quiet()
        async with app.running(**limited(app)) as participant:
            with pytest.raises(LocalError, match=r"asked before|over"):
                await participant.lease("ann")

    asyncio.run(go())
    assert charged(app, "ann") == [batch.descriptor.batch_id]
    assert len(batch.reports) == (not end.startswith("the shuffler"))


def test_an_app_that_dies_after_the_charge_sends_one_report_for_it(app: App) -> None:
    batch = app.fake.deposit(world.signed(episode_seconds=HOUR))

    async def go() -> None:
        for _ in range(3):
            participant = await app.participant(**limited(app)).__aenter__()
            lease = await participant.lease("ann")
            await app.kill(participant)
        async with app.running(**limited(app)) as participant:
            lease = await participant.lease("ann")
            play(lease, 1, play(lease, 0, 0))
            await lease.report()

    asyncio.run(go())
    assert charged(app, "ann") == [batch.descriptor.batch_id]
    assert len(batch.reports) == len(batch.ends) == 1


def test_an_app_that_dies_amid_the_charge_keeps_the_charge_and_sends_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = app.fake.deposit(world.signed(episode_seconds=HOUR))

    async def go() -> None:
        participant = await app.participant(**limited(app, 2)).__aenter__()
        with monkeypatch.context() as patch:
            patch.setattr(PersonalLedger, "charge", dies_after(PersonalLedger.charge))
            with pytest.raises(RuntimeError, match="killed"):
                await participant.lease("ann")
        await app.kill(participant)
        async with app.running(**limited(app, 2)) as participant:
            with pytest.raises(LocalError, match="charged for this batch before"):
                await participant.lease("ann")
            app.fake.batches.clear()
            app.fake.deposit(world.signed(deployment=1))
            await whole(participant, "ann")

    asyncio.run(go())
    assert len(charged(app, "ann")) == 2
    assert not first.reports


def dies_after(step: Callable[..., object]) -> Callable[..., object]:
    def dying(*values: Any) -> object:
        step(*values)
        raise RuntimeError("killed")

    return dying


def test_apps_of_one_owner_that_race_do_not_pass_the_limit_together(app: App) -> None:
    app.fake.deposit(world.signed())
    app.fake.deposit(world.signed(deployment=1))

    async def go() -> list[object]:
        async with (
            app.running(**limited(app)) as one,
            app.running(**limited(app, state_dir=app.folder / "two")) as two,
        ):
            asked = (each.lease(f"person {n}") for n in range(4) for each in (one, two))
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(go())
    assert sum(isinstance(answer, UserLease) for answer in answers) == 4
    assert [len(charged(app, f"person {n}")) for n in range(4)] == [1] * 4


def test_an_older_copy_of_the_ledger_lets_nobody_take_part(app: App) -> None:
    app.fake.deposit(world.signed())
    file = app.folder / "ledger.sqlite"

    async def go() -> None:
        async with app.running(**limited(app)) as participant:
            older = file.read_bytes()
            await whole(participant, "ann")
            file.write_bytes(older)
            sent = app.fake.requests["leases"]
            with pytest.raises(LocalError, match="older copy"):
                await participant.lease("bob")
            assert app.fake.requests["leases"] == sent
        with pytest.raises(LocalError, match="older copy"):
            await app.participant(**limited(app)).__aenter__()

    asyncio.run(go())


def test_a_person_takes_part_once_an_epoch_while_the_limit_allows_it(app: App) -> None:
    settings = limited(app, 2, shortest_epoch_seconds=HOUR, max_batch_seconds=86_400)
    epochs = {"epoch_seconds": HOUR}
    end = world.NOW // HOUR * HOUR + HOUR - 1

    async def go() -> None:
        async with app.running(**settings) as participant:
            for month, says in [(0, ""), (0, "asked before"), (1, ""), (2, "lifetime limit")]:
                app.time.now = float(end + month * HOUR - 600)
                app.fake.batches.clear()
                app.fake.reported.clear()
                number, close = next(numbers), end + month * HOUR
                app.fake.deposit(world.signed(**epochs, deployment=number, expires_at=close))
                if says:
                    with pytest.raises(LocalError, match=says):
                        await participant.lease("ann")
                else:
                    await whole(participant, "ann")

    numbers = iter(range(9))
    asyncio.run(go())
    assert len(charged(app, "ann")) == 2


@pytest.mark.parametrize("file", ["ledger", "users"])
def test_another_users_key_is_refused_because_everybody_would_be_new(app: App, file: str) -> None:
    """Also without a ledger, where a person reports once in a lifetime."""
    before = limited(app) if file == "ledger" else {}
    after = limited(app, state_dir=app.folder / "new") if file == "ledger" else {}

    async def go() -> None:
        async with app.running(**before):
            pass
        (app.folder / "users_key").write_text("0f" * 32)
        with pytest.raises(LocalError, match=rf"{file}\.sqlite was made with another users key"):
            await app.participant(**after).__aenter__()

    asyncio.run(go())


@pytest.mark.parametrize("end", ["give up", "time"])
def test_steps_leave_the_disk_and_stay_gone_while_the_shuffler_is_away(app: App, end: str) -> None:
    """Also if the app is killed then: what it has left to send is noise."""
    batch = app.fake.deposit(world.signed(**SEED, episode_seconds=3_600))

    async def go() -> None:
        participant = await app.participant().__aenter__()
        lease = await participant.lease("ann")
        play(lease, 1, play(lease, 0, 0))
        mark = steps_on_disk(lease)
        assert mark in app.on_disk()
        app.fake.faults, app.fake.faulty = ["503"] * 10_000, ""
        if end == "give up":
            lease.give_up()
            assert mark not in app.on_disk(), "at once"
        else:
            await app.time.pass_by(lease.ends_at - app.time.now)
        await app.kill(participant)
        assert mark not in app.on_disk()
        assert not batch.reports
        app.fake.faults.clear()
        async with app.running():
            await app.time.pass_by(lease.ends_at - app.time.now + 1)
            await quiet()

    asyncio.run(go())
    assert len(batch.reports) == 1
    assert not counts(app.fake).any(), "noise only"


def test_steps_leave_the_disk_when_the_app_starts_after_the_lease(app: App) -> None:
    """Nothing can be sent any more, so nothing is left to keep them for."""
    batch = app.fake.deposit(world.signed(episode_seconds=3_600))

    async def go() -> None:
        participant = await app.participant().__aenter__()
        lease = await participant.lease("ann")
        play(lease, 1, play(lease, 0, 0))
        mark = steps_on_disk(lease)
        await app.kill(participant)
        assert mark in app.on_disk()
        app.time.now = float(lease.row.lease.expires_at)
        async with app.running():
            await quiet()
            assert mark not in app.on_disk()

    asyncio.run(go())
    assert not batch.reports


def test_a_report_that_the_disk_did_not_take_does_not_leave(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an app that is killed then would seal, and send, a second one."""
    app.fake.deposit(world.signed())
    keep, full = Users.keep_episode, [True]

    def on_a_full_disk(users: Users, user: str, episode: str | None) -> None:
        if full and episode and json.loads(episode)["sealed"]:
            raise LocalError("unavailable", "the disk is full")
        keep(users, user, episode)

    monkeypatch.setattr(Users, "keep_episode", on_a_full_disk)

    async def go() -> None:
        participant = await app.participant().__aenter__()
        lease = await participant.lease("ann")
        play(lease, 1, play(lease, 0, 0))
        report = asyncio.create_task(lease.report())
        await app.time.pass_by(25)  # it is tried again
        assert not app.fake.uploads
        await app.kill(participant)
        report.cancel()
        await asyncio.gather(report, return_exceptions=True)
        full.clear()
        async with app.running() as again:
            await (await again.lease("ann")).report()

    asyncio.run(go())
    assert len(app.fake.uploads) == 1


def test_an_app_asks_nobody_whose_report_would_be_too_late(app: App) -> None:
    batch = app.fake.deposit(world.signed())

    async def go() -> None:
        async with app.running() as participant:
            app.fake.lease_ends = int(app.time.now)
            with pytest.raises(LocalError, match="try again later"):
                await participant.lease("ann")
            assert participant._users.episodes() == []
            app.fake.lease_ends = None
            await whole(participant, "ann")

    asyncio.run(go())
    assert len(batch.reports) == 1


@pytest.mark.parametrize("changes", [{}, world.SUMS], ids=["messages", "sums"])
def test_nobody_sees_by_its_length_whether_a_report_holds_an_episode(
    app: App, changes: dict[str, Any]
) -> None:
    batch = app.fake.deposit(world.signed(**changes))

    async def go() -> None:
        async with app.running(aggregations=("messages", "sums")) as participant:
            await whole(participant, "ann")
            (await participant.lease("bob")).give_up()
            late = await participant.lease("carl")
            play(late, 1, play(late, 0, 0))
            await app.time.pass_by(late.ends_at - app.time.now)
            await quiet()

    asyncio.run(go())
    sizes = [len(report) for report in batch.reports.values()]
    assert sizes == [batch.descriptor.report_bytes] * 3


def test_an_app_reads_its_pins_at_every_batch(app: App) -> None:
    """A key that is pinned later costs no report, and one that is pinned no more gets none."""
    pins, right, other = app.folder / "pins", world.ANALYZER.public.hex(), "ab" * 32

    async def go() -> None:
        async with app.running(analyzer_keys_file=pins) as participant:
            for number, pinned in enumerate((other, right, other)):
                pins.write_text(pinned)
                app.fake.batches.clear()
                app.fake.deposit(world.signed(deployment=number))
                if pinned == right:
                    await whole(participant, "ann")
                else:
                    with pytest.raises(LocalError, match="try again later"):
                        await participant.lease("bob")

    pins.write_text(other)
    asyncio.run(go())
    assert len(app.fake.uploads) == 1


@pytest.mark.parametrize("fraction", [0.05, 0.1])
def test_a_report_is_charged_at_the_share_of_dishonest_reports_that_the_owner_demands(
    app: App, fraction: float
) -> None:
    """The coordinator's own assumption, 0.1 here, may be another."""
    app.fake.deposit(world.signed())

    async def go() -> None:
        demands = {"min_dishonest_fraction": fraction, "lifetime_epsilon": 50.0}
        async with app.running(**limited(app) | demands) as participant:
            await whole(participant, "ann")

    asyncio.run(go())
    heads = HeadFolder(app.folder, NAME)
    book = PersonalLedger(app.folder / "ledger.sqlite", heads, Limit(1.0, 1e-2))
    (((_, charge),),) = book.histories().values()
    assert charge.event is not None
    assert charge.event.dishonest_fraction == fraction


def test_an_app_that_is_too_slow_takes_no_slot_and_says_so(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures its speed before it asks the first person."""
    app.fake.deposit(world.signed())

    def slow(*values: Any) -> bytes:
        app.time.now += 0.6 * app.fake.lease_seconds
        return seal_reports(*values)

    monkeypatch.setattr("riffle.node_client.participant.seal_reports", slow)

    async def go() -> None:
        async with app.running() as participant:
            participant._pipeline.monotonic = app.time.clock
            with pytest.raises(LocalError, match="try again later"):
                await participant.lease("ann")

    asyncio.run(go())
    assert (app.fake.requests["leases"], app.fake.declined) == (0, ["too-slow"])


TROUBLES = (
    "none",
    "the shuffler is away",
    "the report is refused",
    "the batch is unknown",
    "the credential is gone",
)


@contextmanager
def trouble(app: App, what: str, node_id: str) -> Iterator[None]:
    """Something that hinders the reports of a node until it is mended."""
    fake, batches, file = app.fake, app.fake.batches, app.folder / "credentials.json"
    credentials = file.read_text()
    if what == "the shuffler is away":
        fake.faults, fake.faulty = ["503"] * 10_000, ""
    elif what == "the report is refused":
        fake.lose_leases = True
    elif what == "the batch is unknown":
        fake.batches = {}
    elif what == "the credential is gone":
        left = [one for one in json.loads(credentials) if one["node_id"] != node_id]
        file.write_text(json.dumps(left))
    yield
    fake.faults, fake.lose_leases, fake.batches = [], False, batches
    file.write_text(credentials)


async def killed_before_the_end(app: App, end: str) -> tuple[UserLease, bytes]:
    """Plays an episode, kills the app, and lets the end pass; returns the mark of the steps."""
    participant = await app.participant().__aenter__()
    lease = await participant.lease("ann")
    play(lease, 1, play(lease, 0, 0))
    await app.kill(participant)
    mark = steps_on_disk(lease)
    assert mark in app.on_disk()
    app.time.now = 1 + (lease.ends_at if end == "time" else lease.row.lease.expires_at)
    return lease, mark


@pytest.mark.parametrize("what", TROUBLES)
@pytest.mark.parametrize("end", ["time", "lease"])
def test_steps_of_an_episode_that_ended_while_the_app_was_off_leave_the_disk(
    app: App, end: str, what: str
) -> None:
    """At the next start, whatever becomes of the report; and what is sent is noise."""
    batch = app.fake.deposit(world.signed(**SEED, episode_seconds=HOUR))

    async def go() -> None:
        lease, mark = await killed_before_the_end(app, end)
        for now in (what, "none"):
            with trouble(app, now, lease.row.node_id):
                participant = await app.participant().__aenter__()
                await quiet()
                assert mark not in app.on_disk()
                assert end == "time" or not participant._users.episodes()
                await app.kill(participant)
                assert mark not in app.on_disk()

    asyncio.run(go())
    assert len(batch.reports) == (end == "time" and what != "the report is refused")
    assert not (batch.reports and counts(app.fake).any())


@pytest.mark.parametrize("end", ["time", "lease"])
def test_steps_that_a_full_disk_keeps_leave_it_when_it_can_be_written(
    app: App, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = app.fake.deposit(world.signed(**SEED, episode_seconds=HOUR))

    def full(*_: object) -> None:
        raise LocalError("unavailable", "the disk is full")

    async def go() -> None:
        _, mark = await killed_before_the_end(app, end)
        with monkeypatch.context() as patch:
            patch.setattr(Users, "keep_episode", full)
            participant = await app.participant().__aenter__()
            await quiet()
        await app.time.pass_by(RETRY_SECONDS)
        await quiet()
        assert mark not in app.on_disk()
        await app.kill(participant)

    asyncio.run(go())
    assert len(batch.reports) == (end == "time")
