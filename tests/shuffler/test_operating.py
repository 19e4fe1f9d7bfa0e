"""What the shuffler's operator bounds and sees: how long batches last, and each node's counts."""

from types import SimpleNamespace

import pytest

from tests.common.descriptors import ONE_MESSAGE
from tests.shuffler.conftest import Api, both_aggregations, both_engines, problem
from tests.shuffler.world import COORDINATOR_TOKEN, NOW, OPERATOR_TOKEN, descriptor_bytes, user


def test_a_batch_may_not_be_open_too_long(api: Api) -> None:
    """The coordinator chooses the expiry, until which reports can be linked to senders."""
    endless = api.put(descriptor_bytes(expires_at=(1 << 53) - 1))
    assert (endless.status_code, problem(endless)) == (422, "wrong-size")
    api.restart(max_batch_seconds=100)
    assert problem(api.put(descriptor_bytes(expires_at=NOW + 101))) == "wrong-size"
    assert api.put(descriptor_bytes(expires_at=NOW + 100)).status_code == 201


@both_engines
def test_the_operator_sees_every_nodes_counts(api: Api) -> None:
    """A lease ends without a report when it expires, or with its batch."""
    batch, other = api.deposit(), api.deposit(deployment=1)
    api.clock.now += 1
    idle, _ = api.enrol(7, "somebody")
    held = api.leases(batch, [user(0), user(1), user(2)])
    api.outcomes(batch, [(held[0].lease, batch.report())])
    api.clock.now += 60
    api.leases(batch, [user(1)])
    api.leases(other, [user(3)])
    unblamed = {"failed_messages": 0, "failed_batches": 0}
    for lapsed in (2, 4):
        nodes = api.call("GET", "/nodes", OPERATOR_TOKEN).json()["nodes"]
        assert nodes == [
            {
                "node_id": api.node_id,
                "name": "a node",
                "owner": "owner",
                "enrolled_at": NOW,
                "revoked_at": None,
                "users": 1_000,
                "users_left": 996,
                "reports": 1,
                "lapsed": lapsed,
                **unblamed,
            },
            {
                "node_id": idle,
                "name": "a node",
                "owner": "somebody",
                "enrolled_at": NOW + 1,
                "revoked_at": None,
                "users": 7,
                "users_left": 7,
                "reports": 0,
                "lapsed": 0,
                **unblamed,
            },
        ]
        api.abandon(batch)
        api.abandon(other)
    api.call("DELETE", f"/nodes/{idle}", OPERATOR_TOKEN)
    api.clock.now += 5
    api.call("DELETE", f"/nodes/{idle}", OPERATOR_TOKEN)
    nodes = api.call("GET", "/nodes", OPERATOR_TOKEN).json()["nodes"]
    assert nodes[1]["revoked_at"] == NOW + 61
    for token in (COORDINATOR_TOKEN, api.token):
        assert api.call("GET", "/nodes", token).status_code == 401


@both_aggregations
def test_a_batch_that_the_disk_cannot_hold_is_refused(
    api: Api, aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 40]
    usage = "riffle.shuffler.store.report_rows.disk_usage"
    monkeypatch.setattr(usage, lambda _: SimpleNamespace(free=free[0]))
    first = api.deposit(n=1_000)
    free[0] = (64 << 20) + 1_000_000
    data = descriptor_bytes(1_000, 1, **ONE_MESSAGE.get(aggregation, {}))
    answer = api.put(data)
    assert (answer.status_code, problem(answer)) == (503, "unavailable")
    assert len(list((api.settings.data_dir / "secrets").iterdir())) == 1, "of the first"
    needed = int(answer.json()["detail"].split()[3])
    free[0] = (64 << 20) + 2 * needed - 1  # for the first batch and this one
    assert api.put(data).json() == answer.json()
    free[0] += 1
    assert api.put(data).status_code == 201
    free[0] = 64 << 20
    assert api.put(first.data).status_code == 200, "what was countersigned stays so"


@both_aggregations
def test_every_open_batch_keeps_the_disk_for_its_missing_reports(
    api: Api, aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sums, three copies of the sum; for each report, 512 bytes; and 64 MiB for all."""
    first, *_ = (api.deposit(n, number) for number, n in enumerate((1_000, 2_000, 4_000)))
    api.deposit(8_000, 3, expires_at=NOW + 10)
    held = api.leases(first, [user(number) for number in range(5)])
    api.outcomes(first, [(lease.lease, first.report()) for lease in held])
    api.clock.now += 10
    usage = "riffle.shuffler.store.report_rows.disk_usage"
    size, reports = first.context.descriptor.report_bytes, (995, 2_000, 4_000, 500)
    copies = [3 if aggregation == "sums" else n for n in reports]
    enough = (64 << 20) + size * sum(copies) + 512 * sum(reports)
    for free, status in ((enough - 1, 503), (enough, 201)):
        monkeypatch.setattr(usage, lambda _, free=free: SimpleNamespace(free=free))
        assert api.put(descriptor_bytes(500, 4, **api.fields)).status_code == status


@both_aggregations
def test_a_deposit_that_is_refused_for_want_of_disk_tells_no_count_of_reports(
    api: Api, aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator may repeat it as often as it likes while another batch fills."""
    batch = api.deposit()
    usage = "riffle.shuffler.store.report_rows.disk_usage"
    monkeypatch.setattr(usage, lambda _: SimpleNamespace(free=64 << 20))
    data = descriptor_bytes(1_000, 1, **ONE_MESSAGE.get(aggregation, {}))
    answers = [api.put(data)]
    for number in range(3):
        (lease,) = api.leases(batch, [user(number)])
        assert api.outcomes(batch, [(lease.lease, batch.report())]) == ["accepted"]
        answers.append(api.put(data))
    assert {(one.status_code, one.text) for one in answers} == {(503, answers[0].text)}


def test_disk_that_an_erased_batch_has_left_is_free(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = api.deposit(n=200)
    api.fill(batch)
    api.finish(batch)
    usage = "riffle.shuffler.store.report_rows.disk_usage"
    monkeypatch.setattr(usage, lambda _: SimpleNamespace(free=(64 << 20) + 120_000))
    assert api.put(descriptor_bytes(200, 1)).status_code == 201
    assert problem(api.put(descriptor_bytes(200, 2))) == "unavailable"
