"""The batches that ``riffle conformance`` offers to a client: good or with one fault.

All batches are for one small deterministic environment, so the distribution of every
counter is known. A bad offer fails one of the checks in docs/protocol.md, section 11.
"""

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, product
from typing import Any, get_args

import numpy as np
from pydantic import ConfigDict

from riffle.common.mechanism.counters import Families, Successors, Support, possible_cells
from riffle.common.mechanism.parameters import Aggregation, Trust
from riffle.common.mechanism.policy import TOTAL_WEIGHT, Mixture
from riffle.common.protocol import descriptor, signatures
from riffle.common.protocol.descriptor import BatchDescriptor, Document, SignedDescriptor
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.signatures import batch_id, sign
from riffle.common.protocol.wire import Lease
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec
from riffle.deploy.owner import (
    BETA,
    ENVIRONMENT,
    EPSILON,
    GAMMA,
    LOW_ORDER,
    NEXT,
    OWNER_GAMMA,
    SHUFFLER_ID,
    A,
    H,
    MistakeError,
    Owner,
    X,
    shortened,
)

Json = dict[str, Any]
REPORTS, INDEX = 40, 7
LOW, HIGH = -1.0, 1.0
"""The range of rewards in descriptors. The rewards of the environment are in [0, 1]."""
LOST, BUSY, NEW_KEY = "answer lost", "shuffler busy", "batch has a new key"
OVER, PROXY, STRANGER = "first leases too short", "a proxy's 404 page", "a lease for a stranger"
MOVED, REFUSED, ROTATED = "a redirection", "a report refused", "second pinned analyzer key"
BLANKS, SPACED, SORTED = "blanks before commas", "blanks after commas", "sorted members"
"""JSON libraries write none, or one of the others. So a client that rewrites JSON refuses some."""
AWAY, ZIPPED = "its descriptor redirected", "a compressed answer"
EMPTY, STATUS = "an answer without results", "a final problem with status 503"
SHUT, BEYOND, LACKING = "a user refused", "a slot beyond n", "an answer without a user"
WIDE, WRONG_LEASES = "words of 32 bits", {STRANGER, BEYOND, LACKING}
FAULTS: tuple[str, ...] = (LOST, BUSY, NEW_KEY, OVER, PROXY, STRANGER, MOVED, REFUSED, ROTATED)
FAULTS = (*FAULTS, BLANKS, AWAY, ZIPPED, EMPTY, STATUS, SHUT, BEYOND, LACKING, SPACED, SORTED)
FULL, SEVERAL, LARGE = "256 counters", "3 noise bits", "100000 users, so little noise"
SEVERAL_BITS: Json = {"noise": {"bits": 3, "p_numerator": 1, "p_log2": 3}, "noise_slots": 128}
WIDE_NOISE: Json = {"noise": {"bits": 5_000, "p_numerator": 1, "p_log2": 1}, "word_bits": 32}
CHANGES = {SEVERAL: SEVERAL_BITS, OVER: {"episode_seconds": 3}, WIDE: WIDE_NOISE}
COMMENT: Json = {"comment": ""}
_h, _x, _a = np.indices((H, X, A))
POLICIES = np.array([(_h[..., 0] + b + (_x[..., 0] >= 3)) % A for b in (1, 0)])
MIXTURE = Mixture(POLICIES, np.array([3 * TOTAL_WEIGHT // 4, TOTAL_WEIGHT // 4]))
"""The two policies take different transitions at every step. A client that draws a policy with 31
random bits instead of 32 never draws the second policy."""


def _support(*steps: int, full: int = 0) -> Support:
    """Returns a support. It allows y + s modulo X for s in ``steps``, with y the true next state.

    If ``full`` is above 0, the start and the first ``full`` lists of successors allow all states.
    """
    each = enumerate(NEXT.ravel().tolist())
    lists = (tuple(sorted((y + s) % X for s in (steps, range(X))[k < full])) for k, y in each)
    return Support(tuple(range(X if full else 1)), _tables(lists))


def _pruned(support: Support) -> Support:
    """Returns the support without successors of unreachable states (docs/protocol.md, 5.4)."""
    cells = possible_cells(support, X, A, H)
    lists = (tuple((cells[cells // X == row] % X).tolist()) for row in range(H * X * A))
    return Support(support.start, _tables(lists))


def _tables(lists: Iterator[tuple[int, ...]]) -> tuple[Successors, ...]:
    return tuple(tuple(tuple(islice(lists, A)) for _ in range(X)) for _ in range(H))


@dataclass(frozen=True, slots=True)
class Case:
    """A good batch: what is counted, under which trust model, and how the counts are sent.

    ``fault`` is an event that the client must survive (`FAULTS`), an unusual size (`SEVERAL`,
    `FULL`, `LARGE` or `WIDE`), or "".
    """

    families: Families = "joint"
    layer: int | None = None
    support: bool = False
    trust: Trust = "shuffle"
    aggregation: Aggregation = "messages"
    fault: str = ""

    @property
    def name(self) -> str:
        """The description of the case in words."""
        how = self.aggregation if self.trust == "shuffle" else f"trust {self.trust}"
        parts = [how, self.families, "all steps" if self.layer is None else f"step {self.layer}"]
        parts += ["declared support"] * self.support + [self.fault] * bool(self.fault)
        return ", ".join(parts)


def good_cases(
    families: Sequence[Families], trust: Sequence[Trust], aggregations: Sequence[Aggregation]
) -> list[Case]:
    """Returns good batches for a client with these families, trust models and aggregations."""
    kinds: list[tuple[Trust, Aggregation]] = [
        (t, g) for t in trust for g in (aggregations if t == "shuffle" else ("messages",))
    ]
    ways = product(kinds, families, (None, 1), (False, True))
    cases = [Case(family, layer, support, *kind) for kind, family, layer, support in ways]
    whole, small = cases[0], replace(cases[0], layer=1, support=True)
    cases += [replace((small, whole)[f in {NEW_KEY, ROTATED, BLANKS}], fault=f) for f in FAULTS]
    cases += [replace(whole, support=True, fault=FULL)] * (families[0] == "joint")
    cases += [replace(whole, families=each, fault=LARGE) for each in families]
    several = [replace(whole, support=True, fault=SEVERAL)]
    cases += [replace(small, trust=t, aggregation=g, fault=WIDE) for t, g in kinds if g == "sums"]
    return cases + several * (kinds[0] == ("shuffle", "messages"))


class Envelope(SignedDescriptor):
    """An envelope that may have unknown members, for bad offers."""

    model_config = ConfigDict(extra="allow")


@dataclass
class Offer:
    """A batch that is listed as ``batch_id``, its descriptor's bytes, and what the client did.

    A good offer has a ``case``, and the case's ``fault`` until this event has happened. A bad
    offer has a ``fault`` that check number ``check`` finds. Only the last of the batch ``keys`` is
    valid. ``uploads`` has the first report of each lease under each batch key.
    """

    batch_id: str
    data: bytes
    signed: SignedDescriptor
    keys: list[KeyPair]
    case: Case | None = None
    check: int = 0
    fault: str = ""
    leases: dict[str, Lease] = field(default_factory=dict)
    uploads: dict[str, dict[KeyPair, bytes]] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    mistakes: dict[str, MistakeError] = field(default_factory=dict)
    looked_at: float = math.inf
    unanswered: bool = False
    busy_until: float = 0.0
    beyond: str = ""
    over: bool = False

    @property
    def free(self) -> int:
        """The number of slots that nobody holds; 0 if the batch is over."""
        waiting = (lease for name, lease in self.leases.items() if name not in self.reported)
        live = sum(lease.expires_at > time.time() for lease in waiting)
        return 0 if self.over else REPORTS - len(self.reported) - live

    def note(self, section: str, detail: str) -> None:
        """Records a mistake once."""
        self.mistakes.setdefault(detail, MistakeError(section, detail))


def good_offer(case: Case, owner: Owner) -> Offer:
    """Returns the offer of a good batch."""
    return replace(_offer(owner, _named(_document(case, owner)), 0, case.fault), case=case)


def change_key(offer: Offer, owner: Owner) -> None:
    """Gives the batch of an offer a new batch key."""
    again = _offer(owner, json.loads(offer.data), 0, "")
    offer.signed, offer.keys = again.signed, offer.keys + again.keys


def _document(case: Case, owner: Owner, **changes: Any) -> Json:  # noqa: ANN401
    """Returns a descriptor without run id and batch id. ``changes`` replace fields of the spec."""
    fields: Json = {"name": SHUFFLER_ID, "environment": ENVIRONMENT}
    fields |= {"states": X, "actions": A, "horizon": H, "reward_low": LOW, "reward_high": HIGH}
    fields |= {"epsilon": EPSILON, "beta": BETA, "dishonest_fraction": GAMMA}
    fields |= {"trust": case.trust, "aggregation": case.aggregation, "families": case.families}
    supports = {FULL: _support(0, 1, 2, 3, full=8), SEVERAL: _pruned(_support(0, 1))}
    fields |= {"support": supports.get(case.fault, _support(0, 1)) if case.support else None}
    n = fields["episodes"] = 100_000 if case.fault == LARGE else REPORTS
    spec, key = RunSpec(**(fields | changes)), (owner.analyzer, owner.second)[case.fault == ROTATED]
    issuer = Issuer(SHUFFLER_ID, key.public.hex, time.time, spec.dishonest_fraction)
    deployment = Deployment(0, "manual", MIXTURE, n, case.layer)
    issue = issuer.issue(os.urandom(16).hex(), spec, deployment, index=INDEX, step=INDEX)
    document: Json = json.loads(issue.data, parse_float=shortened)
    ids = ("run_id", "batch_id")
    return {k: v for k, v in document.items() if k not in ids} | CHANGES.get(case.fault, {})


def _named(document: Json) -> Json:
    """Returns the document with new ids of run and batch, to be listed under the new batch id."""
    run = os.urandom(16).hex()
    return document | {"run_id": run, "batch_id": (own := batch_id(run, INDEX)), "listed": own}


def _offer(owner: Owner, document: Json, check: int, fault: str) -> Offer:
    """Returns the offer of a descriptor, which need not be valid.

    Members named in ``how`` (below) say how to serve and sign the descriptor, and are not in it.
    """
    pair = KeyPair.generate()
    how: Json = {"listed": document.get("batch_id"), "first": "", "label": signatures.LABEL_DEPOSIT}
    how |= {"before": "", "after": "", "envelope": {}}
    how |= {"coordinator": owner.coordinator, "shuffler": owner.shuffler}
    how |= {"shown_key": pair.public, "signed_key": pair.public}
    members = {k: v for k, v in document.items() if k not in how and v is not ...}
    how |= {k: document[k] for k in document.keys() & how.keys()}
    marks = {BLANKS: (" ,", ": "), SPACED: (", ", ": ")}.get(fault, (",", ":"))
    text = json.dumps(members, separators=marks, sort_keys=fault == SORTED)
    text = text.replace("{", "{" + how["first"], 1)
    data = (how["before"] + text + how["after"]).encode()
    digest = hashlib.sha256(descriptor.LABEL_DIGEST + data).digest()
    envelope: Json = {
        "descriptor": data.decode(),
        "coordinator_signature": sign(how["coordinator"], how["label"] + data),
        "batch_key": how["shown_key"].hex(),
        "shuffler_signature": signatures.countersign(how["shuffler"], digest, how["signed_key"]),
    }
    other = {k: v(envelope[k]) if callable(v) else v for k, v in how["envelope"].items()}
    signed = Envelope.model_construct(**envelope | other)
    return Offer(how["listed"], data, signed, [pair], None, check, fault)


def bad_offers(owner: Owner, cases: Sequence[Case]) -> Iterator[Offer]:
    """Yields offers with one fault each. Every kind of batch is offered with faulty guarantees."""
    good = _document(cases[0], owner)
    wrong = ((2, *each) for each in _wrong_members(BatchDescriptor, good))
    rows = chain(_members(cases[0], owner, good), wrong, _others(owner), _envelopes(owner))
    pairs = [(good, row) for row in rows]
    for base in {(case.trust, case.aggregation): case for case in reversed(cases)}.values():
        document = _document(base, owner)
        pairs += [(document, row) for row in _promises(base, owner, document)]
    for document, (check, fault, changes) in pairs:
        named = _named(document)
        changed = {k: v(named[k]) if callable(v) else v for k, v in changes.items()}
        yield _offer(owner, named | changed, check, fault)


Row = tuple[int, str, Json]
"""The number of the check that finds a fault, the fault in words, and the members that differ from
a good descriptor. The value ``...`` removes a member. A function is applied to the good value."""


def _wrong_members(kind: type[Document], good: Json) -> Iterator[tuple[str, Json]]:
    """Yields a fault and a changed member (`Row`), which a document's schema does not allow."""
    schema = kind.model_json_schema()
    for name, rule in schema["properties"].items():
        wrong: Json = {"is missing": ...} if name in schema["required"] else {}
        if "anyOf" not in rule:
            wrong["is null"] = None
        wrong |= _wrong_values(rule, good.get(name))
        yield from ((f"its {name} {how}", {name: value}) for how, value in wrong.items())
        nested = kind.model_fields[name].annotation
        if isinstance(nested, type) and issubclass(nested, Document):
            for fault, change in _wrong_members(nested, good[name]):
                whole = {k: v for k, v in (good[name] | change).items() if v is not ...}
                yield f"in its {name}, {fault}", {name: whole}
            yield f"its {name} has an unknown member", {name: good[name] | COMMENT}


def _wrong_values(rule: Json, good: object) -> Json:
    wrong: Json = {}
    if isinstance(good, int | float):
        wrong["is a string"] = str(good)
        wrong |= {"is 0": 0} if isinstance(good, bool) else {"is true": True}
        if rule.get("type") == "integer":
            wrong["is written with a fraction, .0"] = float(good)
    if rule.get("type") == "number":
        wrong["is not a finite number"] = math.nan
    if "[0-9a-f]" in rule.get("pattern", ""):
        wrong["is in upper case"] = str.upper
    bounds = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 0}
    for bound in bounds.keys() & rule.keys():
        wrong[f"is beyond its {bound}, {rule[bound]}"] = rule[bound] + bounds[bound]
    return wrong


def _members(base: Case, owner: Owner, good: Json) -> list[Row]:
    """Returns changes that make a good descriptor contradict itself, or not suit this node."""
    now, first = int(time.time()), good["weights"][0]
    wide_batch = _document(base, owner, actions=A + 1, support=None)
    narrow_batch = _document(base, owner, support=_support(1))
    wide = _document(base, owner, support=_support(0, 1))
    policies = [good["policies"][0], [[A] * X] * H]
    descending, ending = copy.deepcopy(wide["support"]), copy.deepcopy(wide["support"])
    descending["next"][0][0][0].reverse()
    ending["next"][1][3][0] = []
    kind = "flips" if base.trust != "local" else "laplace"
    less = good["guarantee"] | {"dishonest_fraction": GAMMA / 2}
    noise = {"kind": kind, "bits": 1, "p_numerator": 1 << 30, "p_log2": 32}
    return [
        (5, "its batch id is not the one asked for", {"listed": os.urandom(16).hex()}),
        (6, "its batch id does not follow from run and deployment", {"deployment": INDEX + 1}),
        (7, "it is for another shuffler", {"shuffler_id": "another"}),
        (8, "it expired an hour ago", {"expires_at": now - 3_600}),
        (8, "an episode may outlast it (4.7)", {"episode_seconds": 7200, "expires_at": now + 99}),
        (9, "it is open for longer than the owner allows", {"expires_at": now + 172_800}),
        (10, "its episodes may take longer than the owner allows", {"episode_seconds": 1_000_000}),
        (13, "it has an epoch, and the owner allows none", {"epoch_seconds": 604_800}),
        (15, "its analyzer key is not pinned", {"analyzer_key": KeyPair.generate().public.hex()}),
        (16, "it is for another environment", {"environment": "RiverSwim-v0"}),
        (18, "its reward range ends below a reward", {"reward_high": 0.5}),
        (18, "its reward range begins above a reward", {"reward_low": 0.5}),
        (19, "it declares steps alike that differ", {"homogeneous": True}),
        (21, "it has a test seed", {"test_seed": 1}),
        (17, "it has one action more than the environment", wide_batch),
        (20, "its support leaves out transitions that occur", narrow_batch),
        (2, "it has an unknown member", COMMENT),
        (2, "its support has an unknown member", wide | {"support": wide["support"] | COMMENT}),
        (2, "its layer is not below horizon", {"layer": H}),
        (2, "a weight is 0", {"weights": [TOTAL_WEIGHT, 0]}),
        (2, "it has more weights than policies", {"weights": [first, TOTAL_WEIGHT - first - 1, 1]}),
        (2, "a policy has a row too many", {"policies": [[*p, p[-1]] for p in good["policies"]]}),
        (2, "its owner_share is less than one slot", {"owner_share": 0.02}),
        (2, "its support lists states in descending order", {**wide, "support": descending}),
        (2, "its support ends in a state that is reached", {**wide, "support": ending}),
        (22, "the analyzer key is pinned, but a point of low order", {"analyzer_key": LOW_ORDER}),
        (2, "its weights do not sum to 2^32", {"weights": [first, TOTAL_WEIGHT - first - 1]}),
        (2, "a policy has actions that do not exist", {"policies": policies}),
        (2, "its data_slots do not follow from the counters", {"data_slots": 1_000}),
        (2, "its noise is of a kind for another trust model", {"noise": noise}),
        (2, "its owner_share is above the promised dishonest fraction", {"guarantee": less}),
        (2, "its word_bits do not follow from the batch", {"word_bits": 24}),
    ]


def _promises(base: Case, owner: Owner, good: Json) -> Iterator[Row]:
    """Yields faults: a weaker guarantee than the owner demands or than the descriptor promises."""
    batch, kind = partial(_document, base, owner), f"; {base.name}"
    yield 24, f"one owner may hold more slots than allowed{kind}", batch(dishonest_fraction=0.3)
    is_coarse = base.trust == "central" or base.aggregation == "sums"  # noise comes in whole bits
    factor = 1.125 if is_coarse else 1.005
    larger = batch(epsilon=factor * EPSILON, dishonest_fraction=OWNER_GAMMA)
    yield 25, f"its epsilon is up to {factor} times the owner's (12.5){kind}", larger
    yield 25, f"its epsilon is small only at a larger beta (12.5){kind}", batch(beta=0.3)
    less = {"guarantee": good["guarantee"] | {"epsilon": EPSILON / 2}}
    yield 26, f"it promises a smaller epsilon than its noise gives{kind}", less
    if base.trust == "shuffle":
        fault = "its epsilon is small only at a smaller dishonest fraction than the owner's"
        yield 25, f"{fault}{kind}", batch(dishonest_fraction=0.05)
        yield 25, f"its epsilon is too large at its owner_share (12.5){kind}", batch(epsilon=4.06)
    if base.aggregation == "sums":
        bits = 48 - good["word_bits"]
        yield 2, "its word_bits are not the fewest that suffice (8.1)", {"word_bits": bits}
    elif base.trust == "shuffle":
        fault = "it drops more noise than beta pays for: n times a report's chance (12.3)"
        yield 25, fault, {"noise_slots": good["noise_slots"] - 4}
        yield 2, "it has more than 65536 messages", {"noise_slots": 65_536}
        noise = {"bits": 900_000, "p_numerator": 800, "p_log2": 32}
        yield 2, "it has more than 268435456 noise bits", {"noise": noise, "noise_slots": 128}


def _others(owner: Owner) -> Iterator[Row]:
    """Yields faults: a trust model or an aggregation that the owner does not allow."""
    for other in get_args(Trust):
        if other not in owner.trust:
            yield 12, f"its trust model is {other}", _document(Case(trust=other), owner)
    if "sums" not in owner.aggregations:
        yield 11, "its aggregation is sums", _document(Case(aggregation="sums"), owner)


def _envelopes(owner: Owner) -> Iterator[Row]:
    """Yields faults of a descriptor's bytes, of its signatures and of the batch key (`_offer`)."""
    other, low = os.urandom(32), b"\1" + bytes(31)
    yield 1, "it has more than 16777216 bytes", {"first": " " * (1 << 24)}
    yield 2, "it has a member twice", {"first": '"n": 1 ,'}
    yield 2, "it has a member twice, once with an escape", {"first": '"\\u006e": 1 ,'}
    yield 2, "it begins with a byte order mark", {"before": "\ufeff"}
    yield 2, "it has text after its object", {"after": " {}"}
    yield 2, "its envelope has an unknown member (4.1)", {"envelope": COMMENT}
    yield 4, "its batch_key is in upper case (4.1)", {"envelope": {"batch_key": str.upper}}
    yield 3, "the coordinator signed with a key that is not pinned", {"coordinator": other}
    yield 3, "the coordinator signed the bytes without their label", {"label": b""}
    yield 4, "the key of the shuffler is not pinned (13.9)", {"shuffler": owner.impostor}
    yield 4, "the shuffler signed another batch key", {"signed_key": other}
    yield 23, "the batch key, 1, is a point of low order", {"shown_key": low, "signed_key": low}
