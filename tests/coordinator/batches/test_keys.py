"""The analyzer's keys: states, overlap, erasure, and what a rotation does to a run."""

import asyncio
import fcntl
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.signatures import key_id
from riffle.common.server.at_rest import StorageCipher, is_sealed
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.batches.shuffler_client import ShufflerClient
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.store.transactions import Store
from tests.coordinator.calls import Api, problem
from tests.coordinator.faults import outcome, read
from tests.coordinator.world import (
    ANALYZER,
    NOW,
    RUN,
    SHUFFLER_ID,
    TOKEN,
    Clock,
    FakeShuffler,
    drivers_end,
    key_ring,
    parts,
    play,
    spec,
    until,
)

KEY = StorageCipher(bytes(range(32)))


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    new = KeyRing(tmp_path / "keys", KEY, Clock())
    new.init()
    return new


def states(ring: KeyRing) -> list[str]:
    return [record.state for record in ring.records()]


def test_a_key_goes_through_every_state(ring: KeyRing) -> None:
    ring.init()  # nothing where there are keys
    first = ring.active()
    new = ring.make()
    assert ring.make() == new, "a retry makes no second one"
    assert (states(ring), ring.active()) == (["active", "pending"], first)
    assert ring.private(new.public) is None, "a pending key opens nothing"
    ring.activate(new.id)
    ring.activate(new.id)
    assert (states(ring), ring.active()) == (["expired", "active"], new.public)
    assert ring.private(first) is not None
    ring.erase_unused(lambda: {first})
    assert states(ring) == ["expired", "active"]
    ring.erase_unused(lambda: {new.public})
    assert states(ring) == ["erased", "active"]
    assert ring.private(first) is None


def test_no_key_goes_back(ring: KeyRing) -> None:
    first = ring.records()[0].id
    ring.activate(ring.make().id)
    for _ in range(2):
        with pytest.raises(RemoteError, match="'activate' is not possible"):
            ring.activate(first)
        ring.erase_unused(set)
    with pytest.raises(RemoteError, match="no analyzer key"):
        ring.activate("00" * 16)


def test_private_halves_are_encrypted_and_erased_for_good(ring: KeyRing, tmp_path: Path) -> None:
    file = next((tmp_path / "keys").glob("*.key"))
    assert is_sealed(file.read_bytes())
    assert file.stat().st_mode & 0o777 == 0o600
    ring.activate(ring.make().id)
    ring.erase_unused(set)
    assert not file.exists()
    assert len(list((tmp_path / "keys").glob("*.key"))) == 1


def test_an_erasure_that_was_cut_short_is_finished(
    ring: KeyRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    ring.activate(ring.make().id)
    with monkeypatch.context() as patch:
        patch.setattr("riffle.coordinator.batches.keys.erase_file", killed)
        with pytest.raises(KeyboardInterrupt):
            ring.erase_unused(set)
    again = KeyRing(tmp_path / "keys", KEY, Clock())
    assert (states(again), len(list((tmp_path / "keys").glob("*.key")))) == (
        ["erased", "active"],
        2,
    )
    again.erase_unused(set)
    assert len(list((tmp_path / "keys").glob("*.key"))) == 1


def test_replicas_erase_at_the_same_time(ring: KeyRing, tmp_path: Path) -> None:
    other = KeyRing(tmp_path / "keys", KEY, Clock())
    ring.activate(ring.make().id)

    def meanwhile() -> set[str]:
        other.erase_unused(set)
        return set()

    ring.erase_unused(meanwhile)
    assert states(ring) == ["erased", "active"]


def test_a_key_that_expires_while_uses_are_looked_for_stays(ring: KeyRing) -> None:
    """`in_use` may have run before a batch was issued under the key while it was active."""
    ring.activate(ring.make().id)

    def meanwhile() -> set[str]:
        ring.activate(ring.make().id)
        return set()

    ring.erase_unused(meanwhile)
    assert states(ring) == ["erased", "expired", "active"]


def test_a_reader_is_not_disturbed_by_another_threads_change(ring: KeyRing) -> None:
    class Disturbed(dict[str, bytes]):
        def clear(self) -> None:
            ring._read = None  # as a thread that takes the lock does

    ring._privates, ring._read = Disturbed(), None
    assert states(ring) == ["active"]


def test_another_replica_sees_every_change(ring: KeyRing, tmp_path: Path) -> None:
    other = KeyRing(tmp_path / "keys", KEY, Clock())
    first = other.active()
    assert other.private(first) is not None  # it holds it in memory now
    ring.activate(ring.make().id)
    ring.erase_unused(set)
    assert other.active() == ring.active() != first
    assert other.private(first) is None


@pytest.mark.parametrize(
    ("act", "after"),
    [
        ("make", ["active", "pending"]),
        ("activate", ["expired", "active", "pending"]),
        ("erase", ["erased", "active", "pending"]),
    ],
)
def test_a_change_keeps_what_another_replica_changed_before_the_lock(
    ring: KeyRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, after: list[str]
) -> None:
    other, flock = KeyRing(tmp_path / "keys", KEY, Clock()), fcntl.flock
    if act != "make":
        new = ring.make().id
        if act == "erase":
            ring.activate(new)
    ring.check()  # it holds all records in memory now

    def late(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        if act == "activate":
            other.activate(new)
        other.make()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    acts = {"make": ring.make, "activate": lambda: ring.activate(new)}
    acts.get(act, lambda: ring.erase_unused(set))()
    assert (fcntl.flock, states(ring)) == (flock, after), "the lock was not taken"
    ring.check()


def test_two_replicas_rotate_at_once(ring: KeyRing, tmp_path: Path) -> None:
    def rotate() -> None:
        mine = KeyRing(tmp_path / "keys", KEY, Clock())
        for _ in range(5):
            with suppress(RemoteError):  # another one activated it, and the next one too
                mine.activate(mine.make().id)

    threads = [threading.Thread(target=rotate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states(ring).count("active") == 1
    assert set(states(ring)) == {"expired", "active"}
    ring.check()


@pytest.mark.parametrize("how", ["missing", "another's", "storage key", "folder", "not json"])
def test_faults_of_the_folder_are_reported(ring: KeyRing, tmp_path: Path, how: str) -> None:
    file = next((tmp_path / "keys").glob("*.key"))
    at_rest = StorageCipher(bytes(32)) if how == "storage key" else KEY
    if how == "missing":
        file.unlink()
    elif how == "another's":
        name = f"analyzer key {file.stem}"
        file.write_bytes(KEY.seal(KeyPair.generate().private.hex().encode(), name))
    elif how == "not json":
        (tmp_path / "keys" / "keys.json").write_text("{")
    folder = tmp_path / ("nowhere" if how == "folder" else "keys")
    expected = {"folder": "cannot read", "not json": "cannot read"}.get(how, how)
    with pytest.raises(LocalError, match=expected):
        KeyRing(folder, at_rest, Clock()).check()


@pytest.mark.parametrize("name", ["../../signing", "ab" * 8])
def test_no_record_names_another_file_as_its_key(ring: KeyRing, tmp_path: Path, name: str) -> None:
    """An id becomes the name of a file, which an erasure overwrites."""
    records = tmp_path / "keys" / "keys.json"
    (record,) = json.loads(records.read_text())
    victim = tmp_path / "signing.key"
    victim.write_bytes(b"key")
    erased = record | {"id": name, "state": "erased"}
    records.write_text(json.dumps([record, erased]))
    with pytest.raises(LocalError, match="is not the id of its public key"):
        ring.erase_unused(tuple)
    assert victim.read_bytes() == b"key"


# -- a run --------------------------------------------------------------------------------------


def rotating(directory: Path, shuffler: FakeShuffler, act: Any) -> KeyRing:
    ring = key_ring(directory)
    given = parts(directory, shuffler)
    play(replace(given, keys=ring, analyzer=Analyzer(ring.private, 1, ThreadPoolExecutor)), act)
    return ring


def test_a_rotation_amid_a_run_loses_nothing(tmp_path: Path) -> None:
    """Both keys open what was sealed to them; the old one goes with its last batch."""
    shuffler = FakeShuffler()
    shuffler.fills = False
    old = ANALYZER.public.hex()
    file = tmp_path / "analyzer_keys" / f"{key_id(ANALYZER.public)}.key"

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: "open" in shuffler.states.values())
        ring = key_ring(tmp_path)
        ring.activate(ring.make().id)
        ring.erase_unused(lambda: read(tmp_path, lambda store: store.keys_in_use()))
        assert file.exists(), "a batch that is still open was issued under it"
        shuffler.fills = True
        await drivers_end()

    ring = rotating(tmp_path, shuffler, act)
    result = outcome(tmp_path)
    assert result["state"][0] == "finished"
    rows = read(tmp_path, lambda store: store.deployments(RUN))
    used = [row.descriptor.analyzer_key for row in rows]
    assert used == [old, ring.active()]
    assert (states(ring), file.exists()) == (["erased", "active"], False)
    analyzer = Analyzer(ring.private, 1, ThreadPoolExecutor)
    with pytest.raises(LocalError, match=f"{key_id(ANALYZER.public)}, which is not here"):
        analyzer.check_key(parse(rows[0].data))
    analyzer.close()


def test_a_batch_issued_under_a_key_that_is_gone_is_issued_again(tmp_path: Path) -> None:
    """The batch was not deposited before the key was erased: nobody has seen its descriptor."""
    shuffler = FakeShuffler()
    shuffler.down = 10**9

    async def create(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: "deposit" in shuffler.calls)

    rotating(tmp_path, shuffler, create)
    ring = key_ring(tmp_path)
    ring.activate(ring.make().id)
    ring.erase_unused(set)
    shuffler.down = 0

    async def rest(coordinator: Coordinator) -> None:
        await drivers_end()

    rotating(tmp_path, shuffler, rest)
    result = outcome(tmp_path)
    assert result["state"][0] == "finished"
    assert [state for state, _, _ in result["states"]] == ["abandoned", "counted", "counted"]


def test_a_batch_is_not_issued_under_a_key_that_expired_while_it_was_planned(
    tmp_path: Path,
) -> None:
    """Otherwise the key could be erased, unseen, between making the descriptor and its commit."""
    given, ring = parts(tmp_path, FakeShuffler()), key_ring(tmp_path)
    deployment = given.registry.build(spec()).next_deployment()
    assert deployment is not None
    planned = Issuer(SHUFFLER_ID, ring.active, given.clock).issue(
        RUN, spec(), deployment, index=0, step=0
    )
    ring.activate(ring.make().id)
    with pytest.raises(LocalError, match="was replaced") as caught:
        given.store.create_run(RUN, spec(), planned, NOW, "one", NOW + 15)
    assert caught.value.slug == "unavailable"
    assert given.store.runs() == []
    given.close()


def test_a_rotation_while_the_next_batch_is_planned_costs_no_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is made under the old key, which another replica then replaces."""
    ring, settle = key_ring(tmp_path), Store.settle

    def late(store: Store, *arguments: Any) -> None:
        if len(ring.records()) == 1:
            ring.activate(ring.make().id)
            ring.erase_unused(store.keys_in_use)
        settle(store, *arguments)

    monkeypatch.setattr(Store, "settle", late)

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec(reissues=0))
        await drivers_end()

    rotating(tmp_path, FakeShuffler(), act)
    assert outcome(tmp_path)["state"][0] == "finished"
    used = [row.descriptor.analyzer_key for row in read(tmp_path, lambda s: s.deployments(RUN))]
    assert used == [ANALYZER.public.hex(), ring.active()]
    assert states(ring) == ["erased", "active"]


def test_a_shuffler_without_the_pin_delays_the_run() -> None:
    document = RemoteError("outdated-key", "not pinned here").document()
    answer = httpx.MockTransport(lambda _: httpx.Response(409, json=document))

    async def deposit() -> None:
        async with httpx.AsyncClient(transport=answer, base_url="http://s") as client:
            await ShufflerClient(client).deposit("00" * 16, b"", "")

    with pytest.raises(LocalError, match="pin the analyzer's new key") as caught:
        asyncio.run(deposit())
    assert caught.value.slug == "unavailable"


# -- over REST ----------------------------------------------------------------------------------


def call(api: Api, method: str, path: str, token: str = TOKEN) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    return api.client.request(method, f"/v1/keys{path}", headers=headers)


def test_a_rotation_over_rest(api: Api) -> None:
    assert call(api, "GET", "", "guess").status_code == 401
    new = call(api, "POST", "").json()
    assert new["state"] == "pending"
    assert call(api, "POST", f"/{new['id']}/activate").json()["state"] == "active"
    listed = call(api, "GET", "").json()["keys"]
    assert [key["state"] for key in listed] == ["erased", "active"], "no batch needs the first"
    assert ANALYZER.private.hex() not in json.dumps(listed)
    refused = call(api, "POST", f"/{listed[0]['id']}/activate")
    assert problem(refused)[:2] == (409, "wrong-state")
    assert problem(call(api, "POST", "/nothing/activate"))[:2] == (404, "not-found")
