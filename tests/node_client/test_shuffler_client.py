"""The shuffler's REST API as a node sees it: lost answers, 429, 503, nonsense, deadlines."""

import asyncio
import gzip
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from riffle.common.protocol.errors import PROBLEMS, LocalError, RemoteError, is_temporary
from riffle.common.protocol.wire import UploadReply
from riffle.node_client.shuffler_client import (
    MAX_ANSWER_BYTES,
    Backoff,
    ShufflerClient,
    open_client,
)

BATCH, LEASE, USER = "ab" * 16, "cd" * 16, "ef" * 16
DONE = {"results": [{"lease": LEASE, "outcome": "accepted"}]}
COMPRESSED = gzip.compress(json.dumps(DONE).encode())
Answer = httpx.Response | Exception


def problem(slug: str, **headers: str) -> httpx.Response:
    error = RemoteError(slug, f"because of {slug}")
    return httpx.Response(error.status, json=error.document(), headers=headers)


class Script:
    """Gives its answers in turn; keeps the requests and the delays."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []
        self.now = 1000.0

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def run(self, call: Callable[[ShufflerClient], Any]) -> Any:
        async def go() -> Any:
            transport = httpx.MockTransport(self.handle)
            async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
                backoff = Backoff(
                    base=1, cap=8, attempts=3, share=lambda: 1.0, sleep=self.sleep, clock=self.clock
                )
                return await call(ShufflerClient(client, backoff))

        return asyncio.run(go())

    def clock(self) -> float:
        return self.now

    def upload(self, deadline: float = 1e9) -> UploadReply:
        reply = self.run(
            lambda shuffler: shuffler.upload("t", BATCH, [LEASE], b"frame", deadline, "ab" * 16)
        )
        assert isinstance(reply, UploadReply)
        return reply


@pytest.mark.parametrize(
    "fault",
    [
        httpx.ConnectError("no"),
        httpx.ReadTimeout("lost"),
        httpx.RemoteProtocolError("cut"),
        problem("too-slow"),
        problem("too-many-requests"),
        problem("unavailable"),
        problem("internal"),
        httpx.Response(502, text="<html>"),
        httpx.Response(302, headers={"Location": "http://elsewhere"}),
        httpx.Response(200, text="not json"),
        httpx.Response(200, json={"results": [], "more": 1}),
        httpx.Response(200, json={"results": []}),
        httpx.Response(200, json={"results": [{"lease": "00" * 16, "outcome": "accepted"}]}),
        httpx.Response(200, content=b"x" * (MAX_ANSWER_BYTES + 1)),
        httpx.Response(200, content=COMPRESSED, headers={"Content-Encoding": "gzip"}),
    ],
    ids=str,
)
def test_an_upload_is_repeated_unchanged_until_it_is_decided(fault: Answer) -> None:
    script = Script(*[fault] * 5, httpx.Response(200, json=DONE))
    assert script.upload().results[0].outcome == "accepted"
    assert {request.content for request in script.requests} == {b"frame"}
    assert {request.headers["Accept-Encoding"] for request in script.requests} == {"identity"}
    assert script.slept == [1, 2, 4, 8, 8]


FINAL = sorted(slug for slug, (status, _) in PROBLEMS.items() if not is_temporary(status))


@pytest.mark.parametrize("slug", FINAL)
def test_a_final_problem_is_raised_once(slug: str) -> None:
    script = Script(problem(slug))
    with pytest.raises(RemoteError, match=f"because of {slug}") as caught:
        script.upload()
    assert caught.value.slug == slug
    assert script.slept == []


@pytest.mark.parametrize("status", [302, 400, 403, 404, 410])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"type": "about:blank"}',
        b"\xff",
        b'{"type": 3, "detail": 4}',
        b"<html>Please log in</html>",
        b'{"type": "urn:riffle:problem:wrong-size"}',
        b'{"type": "urn:riffle:problem:no-such-slug"}',
    ],
)
def test_a_refusal_that_is_not_the_shufflers_is_asked_for_again(body: bytes, status: int) -> None:
    script = Script(httpx.Response(status, content=body), httpx.Response(200, json=DONE))
    assert script.upload().results[0].outcome == "accepted"


def test_a_refusal_cannot_forge_log_lines() -> None:
    document = {"type": "urn:riffle:problem:late", "detail": "a\nERROR b\r\n" + "c" * 1000}
    with pytest.raises(RemoteError) as caught:
        Script(httpx.Response(410, json=document)).upload()
    assert "\n" not in caught.value.detail
    assert len(caught.value.detail) < 400


def test_a_failure_names_the_address_that_was_tried(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "riffle.node")
    script = Script(*[httpx.ConnectError("no")] * 3)
    with pytest.raises(LocalError, match=r"is the port right\? \(http://s\)$"):
        script.run(lambda shuffler: shuffler.descriptor("t", BATCH))
    assert json.loads(caplog.messages[0])["detail"].endswith("(http://s)")


def test_retry_after_is_a_floor() -> None:
    limited = httpx.Response(429, headers={"Retry-After": "7"})
    script = Script(limited, limited, httpx.Response(200, json=DONE))
    script.upload()
    assert script.slept == [8, 9]


def test_an_upload_is_late_when_its_batch_is_over() -> None:
    script = Script(*[httpx.ConnectError("no")] * 20)
    with pytest.raises(RemoteError) as caught:
        script.upload(deadline=1020.0)
    assert caught.value.slug == "late"
    assert script.slept == [1, 2, 4, 8]


def test_other_calls_give_up_after_some_attempts() -> None:
    script = Script(*[httpx.ConnectError("no")] * 3)
    with pytest.raises(LocalError, match="nothing accepts connections") as caught:
        script.run(lambda shuffler: shuffler.open_batches("t", 5))
    assert caught.value.slug == "unavailable"
    assert len(script.requests) == 3


def test_requests_follow_the_protocol() -> None:
    script = Script(httpx.Response(200, json={"batches": [], "lease_seconds": 120}))
    script.run(lambda shuffler: shuffler.open_batches("secret", 5))
    request = script.requests[0]
    assert str(request.url) == "http://s/v1/batches?wait=5&accepting=1"
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.extensions["timeout"]["read"] == 35.0
    script = Script(httpx.Response(200, json=DONE))
    script.upload()
    assert script.requests[0].headers["Content-Type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "reply",
    [
        {"leases": [], "refused": []},
        {"leases": [], "refused": [{"user": LEASE, "problem": "batch-full"}]},
        {"leases": [], "refused": [{"user": USER, "problem": "batch-full"}] * 2},
        {"leases": [{"user": USER, "slot": -1, "lease": LEASE, "expires_at": 1}], "refused": []},
    ],
)
def test_a_lease_reply_must_answer_for_every_user_once(reply: dict[str, Any]) -> None:
    script = Script(*[httpx.Response(200, json=reply)] * 3)
    with pytest.raises(LocalError, match="answer"):
        script.run(lambda shuffler: shuffler.lease("t", BATCH, [USER]))


def test_back_off_grows_to_its_cap_and_stays_finite() -> None:
    backoff = Backoff(base=0.5, cap=10, share=lambda: 1.0)
    assert [backoff.delay(k, 0.0) for k in (0, 1, 2, 10, 10_000)] == [0.5, 1, 2, 10, 10]
    assert Backoff(share=lambda: 0.0).delay(5, 3.0) == 3.0


def test_the_client_verifies_against_a_private_ca_only(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("no certificate")
    with pytest.raises(LocalError, match=r"ca\.pem"):
        open_client("https://shuffler", broken)
    assert isinstance(ssl.create_default_context(), ssl.SSLContext)
    asyncio.run(open_client("http://127.0.0.1:1", None).aclose())
