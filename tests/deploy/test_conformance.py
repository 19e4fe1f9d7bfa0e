"""``riffle conformance`` finds and names each mistake of a client, and Riffle's node passes it."""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from riffle.common.accounting import Account, account
from riffle.common.accounting.binomial import overflow_probability
from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.common.protocol import verification
from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import RemoteError
from riffle.deploy import offers
from riffle.deploy.conformance import Recorder, serving, session
from riffle.deploy.offers import FAULTS, FULL, LARGE, SEVERAL, SORTED, SPACED, WIDE, Case, Offer
from riffle.deploy.owner import Finding, Owner
from riffle.node_client import trust
from tests.deploy.cli.calls import riffle
from tests.deploy.wrong_client import WrongClient

LOST, BUSY, NEW_KEY, OVER, PROXY, STRANGER, MOVED, REFUSED, ROTATED, BLANKS, *OTHERS = FAULTS
WRITTEN = [Case(layer=1, support=True, fault=fault) for fault in (SPACED, SORTED)]
SMALL = Case(layer=1, support=True)
WHOLE = Case()
SUMS = Case(layer=1, aggregation="sums")
SMALL_SUMS = replace(SUMS, support=True)
CENTRAL = [Case(families, trust="central") for families in ("joint", "lean", "paper")]
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"

MISTAKES: dict[str, tuple[Sequence[Case], str]] = {
    "digest without label": ([SMALL], "a digest without its label"),
    "descriptor written again": ([Case(fault=BLANKS)], "parsed and written again"),
    "signatures of rewritten bytes": (
        [SMALL, *WRITTEN],
        "only those with blanks after commas: are",
    ),
    "labels exchanged": ([SMALL], "the label b'riffle v1 message"),
    "label without zero byte": ([SMALL], "label without its final zero byte"),
    "no info": ([SMALL], "no label, no digest"),
    "inner seal to the batch key": ([SMALL], "10 of 10 messages do not open.*the batch's key"),
    "outer seal to the analyzer": ([SMALL], "the analyzer's key"),
    "aad of messages": ([SMALL], "10 of 10 messages.*is the aad not empty"),
    "aad of the report": ([SMALL], "is the aad not empty"),
    "little-endian": ([WHOLE], "read as little-endian, all exist"),
    "other order of counters": ([WHOLE], r"in the order \(family, x, h, a, x', r\)"),
    "indices from 1": ([WHOLE], "with 1 added to every index"),
    "step 0 for every step": ([Case("lean", 1)], "hold no episode.*at step 1; all.*of step 0"),
    "one message fewer": ([SMALL], "10 messages of 49 bytes.*those of 9 messages"),
    "dummy one too large": ([SMALL], "up to 12, the dummy's; seen 13"),
    "dummy one too small": ([SMALL], "at most 2 ones of a counter"),
    "no noise": ([SMALL], "noise of all counters.*seen 0"),
    "noise reused": ([WHOLE], "the same in several"),
    "noise of a fixed seed": ([WHOLE, WHOLE], "the same in several"),
    "no noise in every other report": ([WHOLE], "least noise of one report: .*seen 0"),
    "noise on every other counter": ([WHOLE], "counters with r = 0: .*seen 0"),
    "noise on some steps only": ([WHOLE], "counters with h = 0: .*seen 0"),
    "no noise on the last counter": ([WHOLE] * 6, "noise of the last counter: .*seen 0"),
    "other order of families": ([Case(families="paper")], "in the order .5.2. rewards, visits"),
    "one key pair": ([SUMS], "a fresh key pair in every report"),
    "poisson noise": ([WHOLE], "at most 2 ones of a counter"),
    "noise of half p": ([WHOLE], "noise of all counters"),
    "episode sent twice": ([WHOLE], "at most 2 ones"),
    "another policy": ([WHOLE], "hold no episode of the batch's mixture"),
    "a policy for each step": ([WHOLE], "all hold one with a policy drawn for each step"),
    "unreachable states counted": (
        [Case(support=True, aggregation="sums")],
        "120 words, as if states that cannot be reached had counters",
    ),
    "start at the counted step": ([SMALL], r"4 is the dummy if `start` had the states of step 1"),
    "start at the step, sums": ([SMALL_SUMS], "4 words, as if `start` had the states of step 1"),
    "no episode": ([WHOLE], "hold no episode of the batch's mixture"),
    "weights of 31 bits": (CENTRAL, "seen 0; as of a client with policy 0 alone$"),
    "reward rounded": (CENTRAL, "as of a client with rounded rewards$"),
    "reward range ignored": (CENTRAL, "with the reward itself as the probability$"),
    "user asked twice": ([SMALL, SMALL], "each asked once"),
    "report after the lease": ([Case(layer=1, support=True, fault=OVER)], "its lease ends before"),
    "lease shorter than an episode": (
        [Case(layer=1, support=True, fault=OVER)],
        "its lease ends before an episode may",
    ),
    "redirection followed": ([Case(layer=1, support=True, fault=MOVED)], "a redirection followed"),
    "refused user asked again": (
        [Case(layer=1, support=True, fault=REFUSED), SMALL],
        "one again whose report was refused",
    ),
    "first pin only": ([Case(layer=1, support=True, fault=ROTATED)], "expected 40 reports"),
    "stream big-endian": ([SUMS], "a stream of big-endian words"),
    "lease ids in hexadecimal": ([SMALL], "seen 554 bytes"),
    "lease ids of a Guid": ([SMALL], "has its bytes in another order"),
    "lease ids last": ([SMALL], "a frame to begin with the id of a lease"),
    "wrong header": ([SMALL], "the batch key's id in Riffle-Batch-Key"),
    "no header": ([SMALL], "the batch key's id in Riffle-Batch-Key; seen None"),
    "reseals on a retry": ([Case(layer=1, support=True, fault=LOST)], "the same bytes"),
    "no retry": ([Case(layer=1, support=True, fault=LOST)], "upload again after no final answer"),
    "every 404 is final": ([Case(layer=1, support=True, fault=PROXY)], "upload again after no"),
    "leases by position": (
        [Case(layer=1, support=True, fault=STRANGER)],
        "after a lease for a stranger",
    ),
    "no report of a failed episode": ([SMALL], "even for a failed episode"),
    "width of C - 1": ([Case(support=True, fault=FULL)], "seen 3723 bytes, messages of 49 bytes"),
    "redraws on a new key": ([Case(layer=1, support=True, fault=NEW_KEY)], "the same messages"),
    "old key again": ([Case(layer=1, support=True, fault=NEW_KEY)], "seen 0"),
    "one ephemeral key": ([SMALL], "a new ephemeral key in every seal"),
    "one seal for two slots": ([SMALL], "one seal for two"),
    "bits in the other order": (
        [Case(trust="local")],
        "last of 300 bits.* lowest bit is the first",
    ),
    "words big-endian": ([SUMS], "big-endian words"),
    "no mask": ([SUMS], "seen no mask"),
    "mask with another label": ([SUMS], "the label b'riffle v1 message"),
    "mask without E": ([SUMS], "a mask with no E in the info"),
    "mask key of 32 bytes": ([SUMS], "a mask with AES-256"),
    "mask reused": ([SUMS], "8 of 50 words right, and the first other one is 8"),
    "whole hash": ([SMALL], "made with all 32 bytes"),
    "hash of hexadecimal": ([SMALL], "made with the key in hexadecimal"),
    "slots filled at random": ([Case("lean", fault=LARGE)], "Do dummies fill unneeded slots"),
    "compressed answers": ([SMALL], "'Accept-Encoding: identity'; seen gzip"),
    "retry at once": ([Case(layer=1, support=True, fault=BUSY)], "only after Retry-After"),
    "noise shared by rewards": ([WHOLE] * 2, "same counter but for its r: how often both"),
    "policy of a batch": (CENTRAL * 2, "of which one has policy 0 .drawn for each report"),
}
"""Mistake, the batches that show it, and how it is named."""

QUICK = [m for number, m in enumerate(MISTAKES) if number % 2 == 0]
TRIED = QUICK if "RIFFLE_CONFORMANCE_MISTAKES" not in os.environ else list(MISTAKES)
"""Half of them; RIFFLE_CONFORMANCE_MISTAKES=all tries all, in half a minute."""

UNCHECKED = {
    "coordinator's signature": (3, "the coordinator"),
    "owner_share must not be": (2, "its owner_share is above"),
    "noise.comment": (2, "its noise has an unknown member"),
    "guarantee.comment": (2, "its guarantee has an unknown member"),
    "support.comment": (2, "its support has an unknown member"),
    "asked for": (5, "its batch id is not the one asked for"),
    "time left": (8, "an episode may outlast it"),
    "the descriptor promises": (26, "it promises a smaller epsilon than its noise gives"),
    "should match pattern": (2, r"its \w+ is in upper case"),
    "": (0, ""),
}
"""A part of the refusal that a client forgets, the check, and how its faults begin. The last client
forgets all."""

MALFORMED = r"(in its \w+, )?its \w+ is (missing|null|a string|beyond)"
MALFORMED += r"|it (has text|begins)|its envelope|its batch_key is in|.* bits"
"""Faults of members without which the last client cannot ask for slots."""


def _larger(result: Account) -> Account:
    return replace(result, epsilon_upper=result.epsilon_upper / 1.01)


def _zero_only(key: bytes, _: str) -> None:
    if not any(key):
        raise RemoteError("wrong-key", "a point of low order")


ACCOUNT = sys.modules["riffle.common.accounting.account"]
WEAKENED: dict[str, tuple[ModuleType, str, Callable[..., object]]] = {
    "up to 1.005 times": (verification, "account", lambda e, beta: _larger(account(e, beta))),
    "at its owner_share": (
        verification,
        "required_event",
        lambda d, owner: verification.batch_event(d, owner.dishonest_fraction),
    ),
    "n times": (ACCOUNT, "overflow_probability", lambda _, *rest: overflow_probability(1, *rest)),
    "key, 1,": (trust, "_check_point", _zero_only),
}
"""A part of the fault that only a weakened check takes, and how the check is weakened."""

OWN_NODE = Path(__file__).with_name("own_node.py")


@pytest.fixture(scope="module")
def bad() -> tuple[Owner, list[Offer]]:
    owner = Owner()
    return owner, list(offers.bad_offers(owner, [WHOLE]))


@contextmanager
def running(recorder: Recorder, settings: Path, mistake: str) -> Iterator[None]:
    """Runs a client with one mistake, in a thread."""
    client = WrongClient(json.loads(settings.read_text()), list(recorder.owner.users), mistake)
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            if not client.turn():
                over.wait(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        client.http.close()


def findings(
    folder: Path,
    mistake: str,
    cases: Sequence[Case],
    bad: tuple[Owner, list[Offer]] | None = None,
) -> list[Finding]:
    owner, offered = bad or (Owner(), [])
    trust: Sequence[Trust] = ["shuffle"] if bad else list({case.trust for case in cases})
    sent: Sequence[Aggregation] = (
        ["messages"] if bad else list({case.aggregation for case in cases})
    )
    owner = replace(owner, trust=trust, aggregations=sent)
    recorder = Recorder(owner)
    # These clients stop in the middle of a batch.
    halts = mistake in {"no retry", "old key again", "lease ids last", "report after the lease"}
    halts |= mistake in {"every 404 is final", "no report of a failed episode"}
    idle = 1.5 if halts or "twice" in mistake else 15.0
    with serving(recorder) as url:
        owner.write_settings(folder, url)
        with running(recorder, folder / "settings.json", mistake):
            return list(session(recorder, cases, deepcopy(offered), idle, 60.0, 0.5))


@pytest.mark.parametrize("mistake", TRIED)
def test_each_mistake_is_found_and_named(mistake: str, tmp_path: Path) -> None:
    cases, named = MISTAKES[mistake]
    wrong = [finding for finding in findings(tmp_path, mistake, cases) if not finding.ok]
    assert any(re.search(named, finding.detail) for finding in wrong), wrong


@pytest.mark.parametrize("detail", UNCHECKED)
def test_each_forgotten_check_is_found(
    detail: str, bad: tuple[Owner, list[Offer]], tmp_path: Path
) -> None:
    """A client that forgets a check takes the batches which it should refuse, and no others."""
    (check, begin), (owner, offered) = UNCHECKED[detail], bad
    if not detail:
        offered = [o for o in offered if not re.match(MALFORMED, o.fault)]
    mistake = f"unchecked {detail}"
    found = [f for f in findings(tmp_path, mistake, [SMALL], (owner, offered)) if not f.ok]
    faulty = [o for o in offered if check in {0, o.check} and re.match(begin, o.fault)]
    assert [finding.step for finding in found] == [f"check {o.check}: {o.fault}" for o in faulty]
    assert all("seen a request for slots" in finding.detail for finding in found)


@pytest.mark.parametrize("fault", WEAKENED)
def test_a_weakened_check_takes_an_offer(
    fault: str,
    bad: tuple[Owner, list[Offer]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, taken = WrongClient.offline(bad[0], tmp_path), []
    ACCOUNT._account.cache_clear()
    monkeypatch.setattr(*WEAKENED[fault])
    for offer in (each for each in bad[1] if each.check > 8):
        with suppress(RemoteError):
            trust.accept(offer.signed, offer.batch_id, client.demands, time.time())
            taken.append(offer.fault)
    ACCOUNT._account.cache_clear()
    assert fault in taken[-1] and len(taken) <= 2


def test_a_right_client_passes_every_kind_of_batch(tmp_path: Path) -> None:
    kinds: list[Case] = [SMALL, SUMS, CENTRAL[1], Case("paper", 1, True, trust="local")]
    kinds += [Case(layer=1, support=True, fault=fault) for fault in FAULTS]
    kinds += [Case(support=True, fault=SEVERAL), Case(support=True, fault=FULL)]
    kinds += [Case("lean", aggregation=sent, fault=LARGE) for sent in ("messages", "sums")]
    kinds += [Case(layer=1, support=True, aggregation="sums", fault=WIDE)]
    assert [finding for finding in findings(tmp_path, "", kinds) if not finding.ok] == []


def test_a_good_batch_has_no_successors_of_states_that_cannot_be_reached() -> None:
    """A client that compares all lists with its environment's would refuse this batch."""
    offer = offers.good_offer(Case(support=True, fault=SEVERAL), Owner())
    support = json.loads(offer.data)["support"]["next"]
    assert support[0][0] != [[], []]
    assert support[0][1] == [[], []]


@pytest.mark.long
def test_riffles_own_node_passes(tmp_path: Path) -> None:
    """In full it takes a minute: `riffle conformance -- python -P tests/deploy/own_node.py`."""
    command = ["conformance", "--families", "lean", "--out", str(tmp_path), "--format", "json"]
    done = riffle(*command, "--", sys.executable, "-P", str(OWN_NODE))
    document = json.loads(done.stdout)
    assert [each for each in document["findings"] if not each["ok"]] == []
    assert document["ok"] and len(document["findings"]) > 40


def test_every_section_that_is_named_exists(bad: tuple[Owner, list[Offer]]) -> None:
    headings = set(re.findall(r"^##+ ([\d.]+?)\.? ", PROTOCOL.read_text(), re.MULTILINE))
    folder = Path(__file__).parents[2]
    files = ("deploy/conformance.py", "deploy/report_check.py", "deploy/owner.py")
    text = "".join((folder / name).read_text() for name in files)
    named = set(re.findall(r'"(\d+(?:\.\d)?)"', text))
    assert named and named <= headings
    checks = re.findall(r"^\| (\d+) \| .* \| `[a-z-]+` \|$", PROTOCOL.read_text(), re.MULTILINE)
    # 14: only where epochs are allowed.
    assert {str(each.check) for each in bad[1]} == set(checks) - {"14"}


def test_one_report_is_checked_from_files(tmp_path: Path) -> None:
    owner = Owner()
    offer = offers.good_offer(WHOLE, owner)
    client = WrongClient.offline(owner, tmp_path)
    lease = {"lease": "ab" * 16, "slot": 0}
    names = [tmp_path / name for name in ("descriptor", "report", "analyzer", "batch")]
    descriptor, report, analyzer, batch = names
    descriptor.write_text(offer.signed.model_dump_json())
    analyzer.write_text(owner.analyzer.private.hex())
    batch.write_text(offer.keys[-1].private.hex())
    options = ["--analyzer-key", str(analyzer), "--batch-key", str(batch), "--format", "json"]
    for mistake, code in (("", 0), ("label without zero byte", 1), ("no noise", 1)):
        client.mistake = mistake
        plain = client._encode(parse(offer.signed.descriptor.encode()).descriptor, 0)
        report.write_bytes(client._body(offer.signed, [lease], [plain]))
        done = riffle("check-report", str(descriptor), str(report), *options)
        assert done.exit_code == code, done.output
        findings = json.loads(done.stdout)["findings"]
        assert [each["ok"] for each in findings].count(False) == code, findings
    refused = riffle("check-report", str(report), str(report), *options)
    assert refused.exit_code == 3 and refused.stderr.count("\n") == 1
    batch.write_text("no key")
    assert riffle("check-report", str(descriptor), str(report), *options).exit_code == 3
