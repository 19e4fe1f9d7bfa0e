"""The REST interface: what it answers, also to bad input."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from riffle.common.protocol.descriptor import Context, SignedDescriptor, parse
from riffle.common.protocol.signatures import key_id, verify_countersign
from riffle.common.protocol.wire import BATCH_KEY_HEADER, DIGEST_HEADER
from riffle.shuffler.rules import accept_deposit
from tests.shuffler.conftest import Api, both_aggregations, problem
from tests.shuffler.test_callers import ID, ROUTES
from tests.shuffler.world import (
    ANALYZER,
    COORDINATOR_TOKEN,
    NOW,
    OPERATOR_TOKEN,
    SHUFFLER_KEY,
    Batch,
    descriptor_bytes,
    public,
    signature,
    user,
)


def test_a_deposit_is_countersigned_and_served(api: Api) -> None:
    data = descriptor_bytes()
    answer = api.put(data)
    signed = SignedDescriptor.model_validate_json(answer.content)
    verify_countersign(
        public(SHUFFLER_KEY),
        parse(data).digest,
        bytes.fromhex(signed.batch_key),
        signed.shuffler_signature,
    )
    assert signed.descriptor.encode() == data
    assert signed.coordinator_signature == signature(data)
    path = f"/batches/{Batch(data, b'').batch_id}"
    assert api.call("GET", path, api.token).json() == answer.json()


def test_the_same_deposit_again_gives_the_same_answer(api: Api) -> None:
    data = descriptor_bytes()
    first = api.put(data)
    api.clock.now += 4_000  # also after its expiry
    again = api.put(data)
    api.restart()
    third = api.put(data)
    assert [first.status_code, again.status_code, third.status_code] == [201, 200, 200]
    assert first.json() == again.json() == third.json()


def test_a_second_descriptor_for_a_batch_id_is_refused(api: Api) -> None:
    batch = api.deposit()
    other = api.put(descriptor_bytes(expires_at=NOW + 100))
    assert (other.status_code, problem(other)) == (409, "descriptor-conflict")
    assert api.fill(batch)


@pytest.mark.parametrize("other", [descriptor_bytes(), descriptor_bytes(expires_at=NOW + 100)])
def test_of_two_deposits_at_once_one_is_countersigned(
    api: Api, other: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first is checked, the second is stored, with the same descriptor or another."""
    stored: list[dict[str, Any]] = []

    def meanwhile(data: bytes, *rest: Any) -> Context:
        if data == descriptor_bytes() and not stored:
            stored.append({})
            stored[0] = api.put(other).json()
        return accept_deposit(data, *rest)

    monkeypatch.setattr("riffle.shuffler.lifecycle.accept_deposit", meanwhile)
    first = api.put(descriptor_bytes())
    assert stored[0]["descriptor"].encode() == other
    if other == descriptor_bytes():
        assert (first.status_code, first.json()) == (200, stored[0])
    else:
        assert problem(first) == "descriptor-conflict"


@pytest.mark.parametrize(
    ("data", "rest", "status", "slug"),
    [
        (descriptor_bytes(), {"headers": {}}, 403, "bad-signature"),
        (descriptor_bytes(), {"headers": {"Riffle-Signature": "00" * 64}}, 403, "bad-signature"),
        (descriptor_bytes(), {"batch_id": ID}, 400, "malformed"),
        (descriptor_bytes(), {"batch_id": "nonsense"}, 400, "malformed"),
        (descriptor_bytes(shuffler_id="another"), {}, 422, "wrong-recipient"),
        (descriptor_bytes(n=1), {}, 422, "batch-too-small"),
        (descriptor_bytes(n=3), {}, 422, "weak-guarantee"),
        (descriptor_bytes(test_seed=1), {}, 403, "test-entry-refused"),
        (descriptor_bytes(expires_at=NOW), {}, 410, "late"),
    ],
)
def test_a_bad_deposit_is_refused(
    api: Api, data: bytes, rest: dict[str, Any], status: int, slug: str
) -> None:
    answer = api.put(data, **rest)
    assert (answer.status_code, problem(answer)) == (status, slug)
    assert api.call("GET", "/batches", api.token).json() == {"batches": [], "lease_seconds": 60}


def test_a_signed_body_that_is_no_descriptor_is_refused(api: Api) -> None:
    data = b"\xff\x00 not JSON"
    answer = api.put(data, batch_id=ID, headers={"Riffle-Signature": signature(data)})
    assert (answer.status_code, problem(answer)) == (400, "malformed")


def test_seeded_noise_is_taken_where_the_test_entry_is_open(api: Api) -> None:
    api.restart(test_entry=True)
    assert api.put(descriptor_bytes(test_seed=1)).status_code == 201


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("POST", "/leases", {"users": [user(0)]}),
        ("POST", "/reports", None),
        ("GET", "/status", None),
        ("GET", "/messages", None),
        ("POST", "/acknowledgement", {"messages_sha256": "00" * 32}),
        ("POST", "/abandon", None),
    ],
)
def test_an_unknown_batch_is_refused(api: Api, method: str, path: str, body: Any) -> None:
    node_route = path in ("", "/leases", "/reports")
    token = api.token if node_route else COORDINATOR_TOKEN
    answer = api.call(method, f"/batches/{ID}{path}", token, json=body)
    assert (answer.status_code, problem(answer)) == (404, "unknown-batch")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"users": []}',
        b'{"users": ["zz"]}',
        b'{"users": ["AB"]}',
        b'{"users": [1]}',
        b'{"users": ["' + b"ab" * 16 + b'"], "more": 1}',
        b'{"users": [' + b",".join([b'"' + b"ab" * 16 + b'"'] * 2_049) + b"]}",
    ],
)
def test_a_malformed_lease_request_is_refused(api: Api, body: bytes) -> None:
    batch = api.deposit()
    answer = api.call("POST", f"/batches/{batch.batch_id}/leases", api.token, content=body)
    assert (answer.status_code, problem(answer)) == (400, "malformed")


@pytest.mark.parametrize(
    "query", ["wait=31", "wait=-1", "wait=x", "wait=nan", "wait=inf", "accepting=maybe"]
)
def test_a_malformed_query_is_refused(api: Api, query: str) -> None:
    answer = api.call("GET", f"/batches?{query}", api.token)
    assert (answer.status_code, problem(answer)) == (400, "malformed")


def test_bodies_are_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = api.deposit()
    monkeypatch.setattr("riffle.shuffler.app.MAX_DESCRIPTOR_BYTES", 100)
    monkeypatch.setattr("riffle.shuffler.app.MAX_JSON_BYTES", 100)
    deposit = api.put(descriptor_bytes(deployment=1))
    lease = api.lease(batch, [user(i) for i in range(10)])
    report = api.call(
        "POST", f"/batches/{batch.batch_id}/reports", api.token, content=bytes(4_000_000)
    )
    for answer in (deposit, lease, report):
        assert (answer.status_code, problem(answer)) == (413, "too-large")


def test_memory_of_incoming_uploads_is_bounded(api: Api) -> None:
    api.restart(max_inflight_bytes=4_096)
    batch = api.deposit()
    path = f"/batches/{batch.batch_id}/reports"
    for content in (bytes(5_000), iter([bytes(3_000)] * 2)):  # a declared length or none
        answer = api.call("POST", path, api.token, content=content)
        assert (answer.status_code, problem(answer)) == (429, "too-many-requests")
        assert answer.headers["Retry-After"] == "1"
    frame = bytes.fromhex(api.leases(batch, [user(0)])[0].lease) + batch.report()
    undeclared = api.call("POST", path, api.token, content=iter([frame[:100], frame[100:]]))
    assert undeclared.json()["results"][0]["outcome"] == "accepted", "only what came is charged"


def test_an_upload_has_its_memory_until_its_reports_are_stored(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only while it arrives: it may wait for other uploads, which arrive meanwhile."""
    batch, write, taken = api.deposit(), api.core._store.write, list[int]()

    async def slow(*args: Any, **kwargs: Any) -> Any:
        taken.append(api.core.inflight.taken)
        return await write(*args, **kwargs)

    frame = (api.leases(batch, [user(0)])[0].lease, batch.report())
    monkeypatch.setattr(api.core._store, "write", slow)
    assert api.outcomes(batch, [frame]) == ["accepted"]
    assert taken == [len(bytes.fromhex(frame[0]) + frame[1])]


def test_every_upload_gives_its_memory_back(api: Api) -> None:
    batch, (_, other) = api.deposit(), api.enrol(10)
    lease, path = api.leases(batch, [user(0)])[0].lease, f"/batches/{batch.batch_id}/reports"
    good = bytes.fromhex(lease) + batch.report()
    large = good * 2_049
    stale = {BATCH_KEY_HEADER: key_id(bytes(32))}
    expected = [
        (api.call("POST", path, api.token, content=good[:-1]), 422),
        (api.call("POST", path, api.token, content=large), 413),
        (api.call("POST", path, api.token, content=iter([large[:999], large[999:]])), 413),
        (api.call("POST", path, api.token, content=good, headers=stale), 409),
        (api.call("POST", f"/batches/{ID}/reports", api.token, content=good), 404),
        (api.call("POST", path, OPERATOR_TOKEN, content=good), 401),
        (api.call("POST", path, other, content=good), 200),
        (api.call("POST", path, api.token, content=good), 200),
    ]
    assert [answer.status_code for answer, _ in expected] == [status for _, status in expected]
    assert (api.core.inflight.taken, api.core.inflight._held) == (0, {})


def test_a_revoked_node_is_refused_everywhere(api: Api) -> None:
    batch = api.deposit()
    held = api.leases(batch, [user(0)])[0]
    revoked = api.call("DELETE", f"/nodes/{api.node_id}", OPERATOR_TOKEN)
    again = api.call("DELETE", f"/nodes/{api.node_id}", OPERATOR_TOKEN)
    assert [revoked.status_code, again.status_code] == [204, 204]
    for answer in (
        api.upload(batch, [(held.lease, batch.report())]),
        api.lease(batch, [user(1)]),
        *(
            api.call(method, path.replace(ID, batch.batch_id), api.token)
            for method, path, callers in ROUTES
            if "node" in callers
        ),
    ):
        assert (answer.status_code, problem(answer)) == (401, "unauthorized")
    assert api.status(batch)["reports"] == 0


def test_revoking_an_unknown_node_is_refused(api: Api) -> None:
    answer = api.call("DELETE", f"/nodes/{ID}", OPERATOR_TOKEN)
    assert (answer.status_code, problem(answer)) == (404, "not-found")


@pytest.mark.usefixtures("only_signals_wake")
def test_a_long_poll_for_a_free_slot_wakes_at_a_deposit(api: Api) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(api.call, "GET", "/batches?wait=30&accepting=1", api.token)
        api.has_waiting()
        batch = api.deposit()
        found = waiting.result(20).json()
    assert found == {
        "batches": [{"batch_id": batch.batch_id, "free_slots": 4}],
        "lease_seconds": 60,
    }


@pytest.mark.usefixtures("only_signals_wake")
def test_a_long_poll_for_the_seal_wakes_when_full(api: Api) -> None:
    batch = api.deposit()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(api.status, batch, wait=30, state="sealed")
        api.has_waiting()
        api.fill(batch)
        assert waiting.result(20)["state"] == "sealed"


def test_the_coordinator_lists_its_open_batches(api: Api) -> None:
    """The ids only: with leases and reports the answer stays the same until a batch is over."""

    def listed() -> list[str]:
        found: list[str] = api.call("GET", "/deposits", COORDINATOR_TOKEN).json()["open"]
        return found

    assert listed() == []
    batches = sorted(
        (api.deposit(deployment=0), api.deposit(deployment=1)), key=lambda b: b.batch_id
    )
    ids = [batch.batch_id for batch in batches]
    assert listed() == ids
    held = api.leases(batches[0], [user(0)])
    api.outcomes(batches[0], [(held[0].lease, batches[0].report())])
    assert listed() == ids
    api.abandon(batches[0])
    assert listed() == ids[1:]


def test_the_coordinator_sees_no_clock_of_arrivals(api: Api) -> None:
    """While a batch fills, its status as the coordinator sees it never changes."""
    batch = api.deposit()
    quiet = {
        "batch_id": batch.batch_id,
        "state": "open",
        "n": 4,
        "reports": None,
        "leased": None,
        "episodes": None,
        "dropped": None,
        "declined": [],
    }
    assert api.status(batch, COORDINATOR_TOKEN) == quiet
    leases = api.leases(batch, [user(i) for i in range(4)])
    assert api.status(batch, COORDINATOR_TOKEN) == quiet
    api.outcomes(batch, [(lease.lease, batch.report()) for lease in leases[:3]])
    api.outcomes(batch, [(leases[3].lease, bytes(len(batch.report())))])
    assert api.status(batch, COORDINATOR_TOKEN) == quiet
    seen = api.status(batch)
    assert (seen["reports"], seen["leased"], seen["episodes"]) == (3, 1, 4)
    assert seen["dropped"] == {"wrong-key": 1}
    api.outcomes(batch, [(leases[3].lease, batch.report())])
    assert api.status(batch, COORDINATOR_TOKEN) == quiet | {"state": "sealed", "episodes": 4}


READ = ("status", "conservation", "messages")


@both_aggregations
def test_no_answer_to_the_coordinator_changes_with_a_lease_or_a_report(api: Api) -> None:
    """Refusals neither: no problem's text, no header."""
    batch = api.deposit()
    path = f"/batches/{batch.batch_id}"

    def answers() -> list[object]:
        api.clock.now += 10  # the record may change again
        each = [
            *(
                api.call("GET", route, COORDINATOR_TOKEN)
                for route in ("/deposits", *(f"{path}/{name}" for name in READ))
            ),
            api.acknowledge(batch, "00" * 32),
            api.put(batch.data),
            api.put(descriptor_bytes(expires_at=NOW + 100, **api.fields)),
        ]
        return [
            (one.status_code, one.text, {k: v for k, v in one.headers.items() if k != "date"})
            for one in each
        ]

    before = answers()
    leases = api.leases(batch, [user(number) for number in range(4)])
    assert answers() == before
    for lease in leases[:3]:
        assert api.outcomes(batch, [(lease.lease, batch.report())]) == ["accepted"]
        assert answers() == before
    assert api.outcomes(batch, [("00" * 16, batch.report())]) == ["unknown-lease"]
    assert answers() == before


@pytest.mark.parametrize(("token", "reports"), [(COORDINATOR_TOKEN, None), (OPERATOR_TOKEN, 1)])
def test_answers_to_an_end_show_what_the_status_shows(
    api: Api, token: str, reports: int | None
) -> None:
    batch = api.deposit()
    lease = api.leases(batch, [user(0)])[0]
    api.outcomes(batch, [(lease.lease, batch.report())])
    answer = api.abandon(batch, token).json()
    assert (answer["state"], answer["episodes"], answer["reports"]) == ("abandoned", 4, reports)
    other = api.deposit(deployment=1)
    api.fill(other, first_user=10)
    digest = api.messages(other).headers[DIGEST_HEADER]
    erased = api.acknowledge(other, digest).json()
    assert (erased["state"], erased["episodes"], erased["reports"]) == ("erased", 4, None)


def test_no_page_loads_scripts_from_other_hosts(api: Api) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert problem(api.client.get(path)) == "not-found"


def test_health_identity_and_openapi(api: Api) -> None:
    assert api.client.get("/livez").json() == {"status": "ok"}
    assert api.client.get("/readyz").json() == {"status": "ok"}
    assert api.call("GET", "/identity", None).json() == {
        "shuffler_id": "shuffler-1",
        "public_key": public(SHUFFLER_KEY).hex(),
    }
    assert "/v1/batches/{batch_id}/reports" in api.client.get("/openapi.json").json()["paths"]


def test_the_service_is_not_ready_without_its_secrets(api: Api) -> None:
    (api.directory / "data" / "secrets").rmdir()
    answer = api.client.get("/readyz")
    assert (answer.status_code, problem(answer)) == (503, "unavailable")
    assert "/" not in answer.json()["detail"], "strangers may ask"
    refused = api.put(descriptor_bytes())
    assert (refused.status_code, "/" in refused.json()["detail"]) == (503, False)


def test_open_batches_are_bounded(api: Api) -> None:
    api.restart(max_open_batches=2)
    first, _ = api.deposit(), api.deposit(deployment=1)
    refused = api.put(descriptor_bytes(deployment=2))
    assert (refused.status_code, problem(refused)) == (429, "too-many-requests")
    assert api.put(first.data).status_code == 200, "the same deposit again is no new one"
    api.abandon(first)
    assert api.put(descriptor_bytes(deployment=2)).status_code == 201


def test_unknown_paths_and_methods_are_refused(api: Api) -> None:
    missing, wrong = api.call("GET", "/nothing", None), api.call("PATCH", "/nodes", None)
    assert (missing.status_code, problem(missing)) == (404, "not-found")
    assert (wrong.status_code, problem(wrong)) == (405, "method-not-allowed")


def test_messages_carry_their_digest(api: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    answer = api.messages(batch)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert len(answer.headers[DIGEST_HEADER]) == 64


def test_a_deposit_names_a_pinned_analyzer_key_where_any_is_pinned(api: Api) -> None:
    pins = api.directory / "pins"
    pins.write_text("ab" * 32)
    api.restart(analyzer_keys_file=pins)
    refused = api.put(descriptor_bytes())
    assert (refused.status_code, problem(refused)) == (409, "outdated-key")
    pins.write_text(f"{'ab' * 32}\n{ANALYZER.public.hex()}\n")
    assert api.put(descriptor_bytes()).status_code == 201
    pins.write_text("ab" * 32)  # after a rotation the same deposit again is still the same
    assert api.put(descriptor_bytes()).status_code == 200
    for _ in range(2):
        assert problem(api.put(descriptor_bytes(deployment=1))) == "outdated-key"
        api.restart()


@pytest.mark.parametrize("wrong", [None, "", "no key", "# nothing but a comment"])
def test_without_readable_pins_no_analyzer_key_is_accepted(api: Api, wrong: str | None) -> None:
    """A file that is deleted or spoilt while the service runs does not lift the pins."""
    pins = api.directory / "pins"
    pins.write_text(ANALYZER.public.hex())
    api.restart(analyzer_keys_file=pins)
    assert api.put(descriptor_bytes()).status_code == 201
    pins.unlink() if wrong is None else pins.write_text(wrong)
    assert problem(api.put(descriptor_bytes(deployment=1))) == "invalid-spec"
    pins.write_text(ANALYZER.public.hex())
    assert api.put(descriptor_bytes(deployment=1)).status_code == 201


def test_an_upload_sealed_to_another_batch_key_is_refused(api: Api) -> None:
    batch = api.deposit()
    held = api.leases(batch, [user(0)])[0]
    body = bytes.fromhex(held.lease) + batch.report()
    path = f"/batches/{batch.batch_id}/reports"
    for key, status in ((bytes(32), 409), (batch.batch_key, 200)):
        headers = {BATCH_KEY_HEADER: key_id(key)}
        answer = api.call("POST", path, api.token, content=body, headers=headers)
        assert answer.status_code == status
    assert api.status(batch)["dropped"] == {}


def test_a_full_disk_is_not_ready(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.client.get("/readyz").status_code == 200
    monkeypatch.setattr("riffle.shuffler.core.disk_trouble", lambda _: "1 MiB are free")
    api.clock.now += 1
    answer = api.client.get("/readyz")
    assert (answer.status_code, answer.json()["detail"]) == (503, "1 MiB are free")


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_loses_nothing_that_was_accepted(api: Api, jump: float) -> None:
    """Forward, a short batch and its leases are over; back, they are as they were before."""
    batch = api.deposit()
    held = api.leases(batch, [user(0), user(1)])
    frame, later = (held[0].lease, batch.report()), (held[1].lease, batch.report())
    assert api.outcomes(batch, [frame]) == ["accepted"]
    api.clock.now += jump
    assert api.outcomes(batch, [frame]) == ["replayed"]
    expected, state = ("late", "abandoned") if jump > 0 else ("accepted", "open")
    assert api.outcomes(batch, [later]) == [expected]
    assert (api.status(batch)["state"], api.status(batch)["reports"]) == (
        state,
        1 if jump > 0 else 2,
    )
    api.clock.now -= jump  # a batch that was given up stays given up
    assert api.status(batch)["state"] == state
    problem_now = "late" if jump > 0 else "user-unavailable"
    assert api.lease(batch, [user(0)]).json()["refused"][0]["problem"] == problem_now


PAGE = "https://clinic.example"


@pytest.mark.parametrize("allowed", [(), (PAGE,), (PAGE, "http://localhost:8080")])
@pytest.mark.parametrize("origin", [PAGE, "https://other.example", "null"])
def test_only_pages_of_allowed_origins_may_be_nodes(
    api: Api, allowed: tuple[str, ...], origin: str
) -> None:
    api.restart(allowed_origins=allowed)
    names = "authorization,content-type,riffle-batch-key"
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    path = f"/batches/{ID}/reports"
    preflight = api.call(
        "OPTIONS", path, None, headers=asked | {"Access-Control-Request-Headers": names}
    )
    answer = api.call("GET", "/batches", api.token, headers={"Origin": origin})
    refused = api.call("GET", f"/batches/{ID}", api.token, headers={"Origin": origin})
    assert (answer.status_code, refused.status_code) == (200, 404)
    may = origin in allowed
    assert preflight.is_success is may
    for each in (answer, refused):
        assert each.headers.get("Access-Control-Allow-Origin") == (origin if may else None)
        assert "Access-Control-Allow-Credentials" not in each.headers


def test_no_page_may_use_routes_of_the_coordinator(api: Api) -> None:
    api.restart(allowed_origins=(PAGE,))
    for method in ("PUT", "DELETE"):
        asked = {"Origin": PAGE, "Access-Control-Request-Method": method}
        assert api.call("OPTIONS", f"/batches/{ID}", None, headers=asked).status_code == 400


@pytest.mark.parametrize("origin", ["*", "clinic.example", "https://clinic.example/page"])
def test_an_origin_is_a_scheme_and_a_host(api: Api, origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins"):
        api.restart(allowed_origins=(origin,))
