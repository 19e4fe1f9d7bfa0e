"""Both REST surfaces under calls generated from their own OpenAPI documents, over real HTTP.

Some 300 calls by default; ``RIFFLE_FUZZ_CALLS=10000`` for a campaign. Every answer must be one that
the document describes; no 5xx, no traceback; who has no valid token gets nothing of what needs one.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from riffle.common.protocol.errors import MEDIA_TYPE, problem_document, problem_slug
from riffle.deploy.network.processes import read_usage
from tests.fuzz.live import TOKENS, Batch, Network, network_apart
from tests.shuffler.test_callers import ID, ROUTES
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN

CALLS = int(os.environ.get("RIFFLE_FUZZ_CALLS", "300"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    ignored_auth,
    unsupported_method,
]
MOST_GROWTH_KB = {"shuffler": 50 << 10, "coordinator": 500 << 10}
"""The coordinator plans any run it is asked for, and keeps as much as large plans took: some 300 MB
after 600 calls to make a run, and 250 after 5,400."""
SECONDS = 30


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, Batch, int]]:
    """A network with a run, an open batch and one lease; the batch; and the services' process."""
    changes = {"node_requests": 1e6, "lease_seconds": 86_400}
    with network_apart(tmp_path_factory.mktemp("live"), **changes) as (made, pid):
        batch = made.deploy()
        made.leases(batch, made.users(1))
        yield made, batch, pid


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("service", ["shuffler", "coordinator"])
def test_answers_are_those_of_the_description(
    service: str, live: tuple[Network, Batch, int]
) -> None:
    network, batch, pid = live
    url = getattr(network, service)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found: list[Any] = list(schema.get_all_operations())
    operations = [operation.ok() for operation in found]
    before, seen, slowest = memory(pid), Counter[int](), 0.0
    with requests.Session() as session:
        for operation in operations:
            calls = CALLS // (2 * len(operations))
            tokens = [*callers(service, operation, network), "guess"]
            took = try_out(operation, calls, session, url, tokens, batch, seen)
            slowest = max(slowest, took)
    grown = memory(pid) - before
    print(
        f"{service}: {sum(seen.values())} calls, {dict(sorted(seen.items()))}, "
        f"slowest {slowest:.1f} s, {grown} kB"
    )
    assert seen[200] and seen[401]
    assert grown < MOST_GROWTH_KB[service]


def callers(service: str, operation: Any, network: Network) -> list[str]:
    """Tokens that the operation takes, several times each."""
    if service == "coordinator":
        return [TOKENS[service]] * 7
    tokens = {
        "coordinator": COORDINATOR_TOKEN,
        "operator": OPERATOR_TOKEN,
        "node": network.node,
    }
    path = re.sub("{.*?}", ID, operation.path.removeprefix("/v1"))
    allowed = [
        who for method, at, who in ROUTES if (method.lower(), at) == (operation.method, path)
    ]
    return [tokens[who] for who in sorted(*allowed or [set(tokens)])] * 5


def try_out(
    operation: Any,
    calls: int,
    session: requests.Session,
    url: str,
    tokens: list[str],
    batch: Batch,
    seen: Counter[int],
) -> float:
    """Call it so often; how long the slowest answer took, in seconds."""
    slowest = [0.0]
    known = {"run_id": batch.context.descriptor.run_id, "batch_id": batch.id, "index": 0}
    either = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))

    @settings(
        max_examples=max(2, calls),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(either, st.sampled_from(tokens), st.integers(0, 3))
    def one(case: Any, token: str, guess: int) -> None:
        if guess:  # most ids that are drawn name nothing
            case.path_parameters.update(
                {name: known[name] for name in case.path_parameters.keys() & known.keys()}
            )
        hurry(case)
        headers = {"Authorization": f"Bearer {token}"}
        sent = {"base_url": url, "session": session, "timeout": SECONDS}
        answer = case.call(headers=headers, **sent)
        seen[answer.status_code] += 1
        slowest[0] = max(slowest[0], answer.elapsed)
        case.validate_response(answer, checks=CHECKS, headers=headers, transport_kwargs=sent)
        check_problem(answer)

    one()
    return slowest[0]


def hurry(case: Any) -> None:
    """Do not wait for news, nor follow a stream that does not end."""
    query = case.query or {}
    if str(query.get("wait", "")).replace(".", "").isdigit():
        query["wait"] = 0
    if "/events" in case.path:
        case.query = {**query, "follow": False}


def check_problem(answer: Any) -> None:
    assert b"Traceback" not in answer.content
    if answer.status_code >= 400 and answer.headers["content-type"] == [MEDIA_TYPE]:
        assert problem_slug(problem_document(answer.content)) != "internal"


def memory(pid: int) -> int:
    """Resident size of a process, in kB."""
    return read_usage([pid])[pid].rss >> 10
