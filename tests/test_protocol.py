# ruff: noqa: RUF001  (the page has multiplication signs)
"""docs/protocol.md says what the code does: every number on the page is compared with the code.

`faults` compares a text of the page. One test changes each number of the page, one at a time, and
expects a fault; `FREE` lists the few numbers that are no part of the protocol.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np

from riffle.common.accounting.binomial import TAIL_EXPONENT
from riffle.common.accounting.calibrate import MARGIN
from riffle.common.mechanism import randomness, sums
from riffle.common.mechanism.counters import MAX_COUNTERS, CounterLayout, Episode, Sizes
from riffle.common.mechanism.parameters import MAX_DRAWS, MAX_P_LOG2, honest_reports
from riffle.common.mechanism.policy import TOTAL_WEIGHT
from riffle.common.protocol import descriptor as d
from riffle.common.protocol import errors, hpke, signatures, wire
from riffle.common.server import service
from riffle.deploy.owner import Owner
from riffle.node_client import pipeline, runner, shuffler_client, users
from riffle.node_client.environments import tabular as t
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler import app, rules
from riffle.shuffler.settings import Settings
from tests.common.descriptors import ONE_MESSAGE, descriptor
from tests.vectors import read

PAGE = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()

LABELS = {
    "DESCRIPTOR": d.LABEL_DIGEST,
    "DEPOSIT": signatures.LABEL_DEPOSIT,
    "COUNTERSIGN": signatures.LABEL_COUNTERSIGN,
    "KEY_ID": signatures.LABEL_KEY_ID,
    "BATCH_ID": signatures.LABEL_BATCH_ID,
    "MESSAGE": hpke.LABEL_MESSAGE,
    "REPORT": hpke.LABEL_REPORT,
    "MASK": d.LABEL_MASK,
}
LIMITS = {
    "bytes of a descriptor": d.MAX_DESCRIPTOR_BYTES,
    "counters of a batch": MAX_COUNTERS,
    "noise bits of a report": MAX_DRAWS,
    "messages of a report": d.MAX_MESSAGES,
    "users of a lease request": wire.MAX_USERS_A_LEASE,
    "frames of an upload": wire.MAX_USERS_A_LEASE,
    "seconds of a long poll": app.MAX_WAIT_SECONDS,
    "seconds between two declines": wire.DECLINE_SECONDS,
    "bytes of a JSON request": service.MAX_JSON_BYTES,
    "characters of a problem's `detail`": errors.MAX_DETAIL_LENGTH,
    "seconds for a request's body": service.BODY_SECONDS,
}
DEFAULTS = {
    "seconds of a lease": "lease_seconds",
    "bytes of an upload (one frame always fits)": "max_upload_bytes",
    "requests a second of one node; up to ten times as many may come at once": "node_requests",
    "reports a second of one node; up to ten times as many may come at once": "node_reports",
    "requests of one node at the same time": "node_requests_at_once",
    "bytes of a request's head": "max_head_bytes",
    "seconds for a request's head, TLS included": "head_seconds",
    "seconds for which a batch may be open": "max_batch_seconds",
}
BACKOFF = shuffler_client.Backoff()
KEY, TAG, SEAL = hpke.KEY_BYTES, hpke.TAG_BYTES, hpke.OVERHEAD
P = 1 << MAX_P_LOG2
RIVER = t.riverswim()
EPISODE_SHARE = NodeSettings.model_fields["episode_share"].default
FRAME = len(read("reports.json")["vectors"][0]["frame"]) // 2
USER = users.opaque_id(bytes(range(32)), "ann@example.org")

SENTENCES = (
    f"private key {KEY}, public key {KEY}, signature 64 |",
    f"| SHA-256 | {KEY} |",
    f"AES-128-GCM `0001` | public key {KEY}, tag {TAG} |",
    f"AES-128-CTR | public key {KEY}, AES key {sums.AES_KEY_BYTES} |",
    "Each label is ASCII text and one zero byte.",
    f"SHA-256(DESCRIPTOR ‖ D), {KEY} bytes",
    f"COUNTERSIGN ‖ digest ‖ batch key ({KEY} bytes)",
    "hex of the first 16 bytes of SHA-256(KEY_ID ‖ public key)",
    "hex of the first 16 bytes of SHA-256(BATCH_ID ‖ run id (16 bytes) ‖ BE(deployment, 8))",
    "HPKE with sequence number 0.",
    f"= enc ({KEY}) ‖ ciphertext (as long as the plaintext) ‖ tag ({TAG})",
    f"A seal is {SEAL} bytes longer than its plaintext.",
    f"An empty salt is {KEY} zero bytes in HMAC.",
    f"gives {KEY} zero bytes for every private key".replace("gives", "keys gives"),
    f"more than {d.MAX_DESCRIPTOR_BYTES:,} bytes",
    f"Integers reach 2^{d.MAX_EXACT.bit_length()} − 1 and weights reach 2^{MAX_P_LOG2}: "
    "32-bit signed integers",
    f"`coordinator_signature` | {4 * KEY} hex digits |",
    f"`shuffler_signature` | {4 * KEY} hex digits |",
    f"`batch_key` | {2 * KEY} hex digits |",
    "DHKEM(X25519, HKDF-SHA256) `0020`, HKDF-SHA256 `0001`, AES-128-GCM `0001`",
    "| bits of a word of `sums`: 16 or 32 |",
    f"So floor(0.3 × 10) is {10 - honest_reports(10, 0.3)}, although the double 0.3 is below 3/10.",
    "If 32 is too small, the descriptor is",
    "The plaintext has ceil(C / 8) bytes.",
    f"q = `p_numerator` / 2^{MAX_P_LOG2} for Laplace",
    "`Hex16` and `Hex32` are 32 and 64 hexadecimal digits",
    "matches `[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}` as a whole",
    f"They sum to exactly {TOTAL_WEIGHT}.",
    f"C is at most {MAX_COUNTERS}.",
    f"`noise.bits` × C is at most {MAX_DRAWS}.",
    f"`data_slots` + `noise_slots` is at most {d.MAX_MESSAGES}.",
    f"it lists at most {MAX_COUNTERS} transitions",
    f"policy i with probability weights[i] / 2^{TOTAL_WEIGHT.bit_length() - 1}, exactly. With a "
    "uniform 32-bit word",
    "`word_bits` is the least b of 16 and 32 for which",
    f"room² ≥ {sums.DEVIATIONS**2} × V",
    f"info = MASK ‖ digest ‖ E, {sums.AES_KEY_BYTES} bytes)",
    "first counter block = 16 zero bytes), C × b / 8 bytes",
    f"Flip each bit independently with f = `p_numerator` / 2^{MAX_P_LOG2}: draw a uniform 32-bit",
    f"| D has at most {d.MAX_DESCRIPTOR_BYTES} bytes |",
    f"(the reference node: {runner.RETRY_SECONDS:g} s, doubling up to "
    f"{runner.RETRY_SECONDS * 2**runner.REFUSAL_DOUBLINGS:g} s)",
    f"than {TAIL_EXPONENT / 3:g} + sqrt({(TAIL_EXPONENT / 3) ** 2:g} + {2 * TAIL_EXPONENT:g} N p "
    f"(1 − p)) have probability below e^−{TAIL_EXPONENT:g}",
    f"makes noise for epsilon × (1 − {MARGIN:.0e})".replace("e-06", "e-6"),
    f"the reference node reads at most {shuffler_client.MAX_ANSWER_BYTES} bytes of an answer",
    f"wait a random time up to min({BACKOFF.cap:g} s, {BACKOFF.base:g} s × 2^k)",
    f"reference node gives up after {BACKOFF.attempts} tries",
    {0.5: "plus half of what is left of the lease"}[
        NodeSettings.model_fields["episode_share"].default
    ],
    f"plus `Retry-After` (at most {errors.LONGEST_WAIT_SECONDS:g} s)",
    f"`wait` (0 to {app.MAX_WAIT_SECONDS}) makes it",
    f"or to n if n is below {rules.SMALLEST_SHOWN}",
    f"with 1 to {wire.MAX_USERS_A_LEASE} users:",
    f"A lease id is {2 * wire.LEASE_BYTES} hexadecimal digits.",
    {0.25: "within a quarter of a lease's life"}[pipeline.PORTION],
    f"| leave this batch for {runner.RETRY_SECONDS:g} s or more |",
    f"more than one lapsed lease for every {rules.REPORTS_A_LAPSE} reports",
    f"The body is 1 to {wire.MAX_USERS_A_LEASE} frames",
    f"frame = lease id ({wire.LEASE_BYTES} bytes) ‖ report",
    f"repeat this every {wire.DECLINE_SECONDS} seconds",
    f"A user id is {len(USER) // 2} bytes, as {len(USER)} hexadecimal digits.",
    f"id = first {len(USER) // 2} bytes of HMAC-SHA256(key, "
    f'"{users.LABEL_USER[:-1].decode()}" ‖ 00 ‖ the owner',
    f"With key `00 01 02 ... 1f`, `ann@example.org` becomes `{USER}`.",
    f'"public_key": "..."}}` (Ed25519, {2 * KEY} hex digits)',
    f"(the keys to pin, {2 * KEY} hexadecimal digits each)",
    f"one public key of {2 * KEY} hexadecimal digits a line",
    "A policy takes one 32-bit word.",
    "A reward bit takes one 64-bit word. It is 1 if the word's upper 53 bits are below the "
    "probability × 2^53.",
    "Flips take one 32-bit word for each counter.",
    "Overflow takes one 64-bit key",
    f"drawn in blocks of {randomness.BLOCK} bits",
    "g is the largest number for which a group has at most "
    f"2^{randomness.DRAWS_AT_ONCE.bit_length() - 1} draws, but at least 1;",
    f"first every draw reads {randomness.FIRST_BITS} bits. Then, in the same order, each draw that "
    f"these bits do not decide reads {randomness.MORE_BITS} bits at a time until it is decided;",
    f"the lease id `lease`, then the first {FRAME - wire.LEASE_BYTES} bytes of the report.",
    "reads 16 bytes for each message from AES-256-CTR (first counter block 0) under `key`, as two "
    "little-endian 64-bit integers",
    "are the version of this protocol: 1.",
    f"(X = {RIVER.sizes.X}, H = {RIVER.sizes.H} by default)",
    f"with probability {t.MOVE:g}, {t.STAY:g} and {t.SLIP:g}; in state 0 it moves right with "
    f"{t.MOVE_LEFT_END:g}, else stays; in state X − 1 it moves left with {t.SLIP_RIGHT_END:g}",
    f"Action 0 in state 0 gives the reward {t.REWARD_LEFT:g}, action 1 in state X − 1 gives "
    f"{t.REWARD_RIGHT:g}, every",
    f"a file with a key of {2 * KEY} hexadecimal digits",
)
"""Sentences of the page, made from the code's values."""


def plain(text: str) -> str:
    return " ".join(text.split())


def section(text: str, number: str) -> str:
    """Returns the text from the heading with this number to the next heading."""
    found = re.search(rf"^#+ {re.escape(number)}\.? .*?(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return found.group() if found else ""


def rows(text: str, number: str) -> list[list[str]]:
    """Returns the rows of a section's tables, without their heads."""
    lines = [line for line in section(text, number).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {i - 1 for i, row in enumerate(cells) if set(row[0]) <= {"-"}}
    return [row for i, row in enumerate(cells) if i not in heads and i - 1 not in heads]


# ---- members of the descriptor -----------------------------------------------------------------


def bounds(schema: dict[str, Any]) -> str:
    """Returns the bounds of a member as the page writes them."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if "minItems" in schema:
        return f"{schema['minItems']} to {schema['maxItems']} items"
    if low is not None and high is not None:
        return f"{low:g} to {high}" if isinstance(high, int) else f"{low:g} to {high:g}"
    lower = (
        f"at least {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    )
    upper = (
        f"at most {high:g}" if high is not None else f"below {below:g}" if below is not None else ""
    )
    return ", ".join(filter(None, (lower, upper)))


def members(model: type[d.Document]) -> dict[str, tuple[str, str]]:
    """Returns each member's bounds and default as the page writes them."""
    found = {}
    for name, schema in model.model_json_schema()["properties"].items():
        parts = [*schema.get("anyOf", ()), schema]
        limits = [text for part in parts if (text := bounds(part))]
        if "const" in schema:
            limits = [f"{schema['const']} to {schema['const']}"]
        default = model.model_fields[name].get_default()
        text = {None: "null", False: "false"}.get(default, str(default))
        text = f"`{text}`" if isinstance(default, str) else text
        required = model.model_fields[name].is_required()
        found[name] = (limits[0] if limits else "", "" if required else text)
    return found


def members_on_page(text: str, number: str, width: int) -> dict[str, tuple[str, str]]:
    of_width = [row for row in rows(text, number) if len(row) == width]
    return {
        row[0].strip("`"): (row[2], row[3] if width > 3 else "")
        for row in of_width
        if row[0].startswith("`")
    }


DOCUMENTS = (d.BatchDescriptor, d.NoiseDocument, d.GuaranteeDocument)
MEMBERS, NOISE, GUARANTEE = (members(model) for model in DOCUMENTS)


def type_faults(text: str) -> Iterator[str]:
    """The types that the code gives by a pattern or a list of values."""
    patterns = {"^[0-9a-f]{32}$": "Hex16", "^[0-9a-f]{64}$": "Hex32"}
    written = {row[0].strip("`"): row[1] for row in rows(text, "4.3") if len(row) == 5}
    for name, schema in d.BatchDescriptor.model_json_schema()["properties"].items():
        pattern, values = schema.get("pattern"), schema.get("enum", ())
        kind = patterns.get(pattern, "Name") if pattern else " or ".join(f"`{v}`" for v in values)
        kind = kind.replace(" or ", ", ", len(values) - 2) if len(values) > 2 else kind
        if kind and written.get(name) != kind:
            yield f"4.3: type of {name}: {written.get(name)}, in the code {kind}"


def member_faults(text: str) -> Iterator[str]:
    if members_on_page(text, "4.3", 5) != MEMBERS:
        yield "4.3: members, bounds or defaults"
    four = members_on_page(text, "4.4", 4)
    noise = {name: four.get(name) for name in NOISE}
    if noise != NOISE:
        yield f"4.4: noise {noise}"
    three = members_on_page(text, "4.4", 3)
    if three != GUARANTEE:
        yield f"4.4: guarantee {three}"
    for row in rows(text, "4.4"):
        if row[0] in ("`flips`", "`laplace`"):
            most = P // 2 if row[0] == "`flips`" else P
            numbers = f"`bits` = 1, `p_log2` = {MAX_P_LOG2}, `p_numerator` < 2^"
            if row[3] != f"{numbers}{most.bit_length() - 1}" or f"/ 2^{MAX_P_LOG2}" not in row[2]:
                yield f"4.4: {row}"
        fair = row[-1] == "`p_numerator` = 1, `p_log2` = 1" and "Binomial(`bits`, 1/2)" in row[2]
        if row[0] == "`binomial`" and not fair:
            yield f"4.4: {row}"
        if (
            row[0] == "`bernoulli`"
            and "each is 1 with p = `p_numerator` / 2^`p_log2`" not in row[2]
        ):
            yield f"4.4: {row}"
    kinds = {row[0].strip("`"): row[1].strip("`") for row in rows(text, "4.4") if len(row) == 4}
    for trust, allowed in d.KINDS.items():
        if any(kinds.get(kind) != trust for kind in allowed):
            yield f"4.4: kinds of {trust}"


# ---- sizes and counters ------------------------------------------------------------------------


def evaluate(formula: str, **values: int) -> int:
    text = formula.replace("`", "").replace("×", "*").replace(" / ", " // ")
    text = re.sub(r"ceil\((\w+) // (\d+)\)", r"-(-\1 // \2)", text)
    return int(eval(text, {}, values))  # noqa: S307  (a formula of our own page)


@cache
def sizes_of(trust: str, families: str) -> tuple[dict[str, int], list[int]]:
    """Returns a batch's numbers, and the four sizes that follow."""
    changes: dict[str, Any] = {"families": families, "data_slots": 2 if families == "joint" else 6}
    changes |= {"states": 3, "policies": (((0, 1, 0), (1, 0, 1)),), "weights": (TOTAL_WEIGHT,)}
    batch = descriptor(**{**changes, **ONE_MESSAGE.get(trust, {})})
    layout = batch.layout
    values = {
        "data_slots": batch.data_slots,
        "noise_slots": batch.noise_slots,
        "L": batch.padding.messages,
        "w": layout.width,
        "C": layout.counters,
        "cells": layout.cells,
        "word_bits": batch.word_bits or 0,
    }
    message, report = batch.message_bytes, batch.report_bytes
    return values, [batch.padding.messages, batch.symbols.size, message, report]


def size_faults(text: str) -> Iterator[str]:
    table = {row[0].replace("`", ""): row[1:] for row in rows(text, "4.6")}
    for name, trust in (
        ("shuffle, messages", "shuffle"),
        ("shuffle, sums", "sums"),
        ("local", "local"),
        ("central", "central"),
    ):
        for families in ("joint", "paper"):
            values, sizes = sizes_of(trust, families)
            for formula, size in zip(table.get(name, ["0"] * 4), sizes, strict=True):
                if formula and evaluate(formula, **values) != size:
                    yield f"4.6: {name}: {formula} is not {size}"


def shape(text: str, layers: int, X: int, A: int) -> dict[str, tuple[int, ...]]:
    """Returns the families of a cell of the table in 5.2, with their shapes."""
    found = {}
    for part in re.sub(r"\), (then )?", ");", text).split(";"):
        name, numbers = part.split(" (")
        entries = numbers.strip(")").split(", ")
        known = {"S": layers, "X": X, "A": A}
        found[name] = tuple(known[e] if e in known else int(e) for e in entries)
    return found


def counter_faults(text: str) -> Iterator[str]:
    for families, everything, one, cells in rows(text, "5.2"):
        name = families.strip("`")
        for layer, cell in ((None, everything), (1, one)):
            layout = CounterLayout(Sizes(5, 3, 4), name, layer)  # type: ignore[arg-type]
            S = layout.layers
            if shape(cell, S, 5, 3) != dict(layout.shapes):
                yield f"5.2: shapes of {families}: {cell}"
            counts = re.fullmatch(r"(\d*)S(?: for all steps, (\d+|one) for one)?", cells)
            if counts is None:
                yield f"5.2: cells of {families}"
                continue
            factor = int(counts[1] or 1)
            single = {"one": 1, None: factor}.get(counts[2]) or int(counts[2])
            if layout.cells != (factor * S if layer is None else single):
                yield f"5.2: cells of {families}"
    yield from index_faults(text)


def index_faults(text: str) -> Iterator[str]:
    """The formulas of indices, and the example below them."""
    layout = CounterLayout(Sizes(5, 3, 4), "paper")
    places = {row[0]: row[1].replace("′", "y") for row in rows(text, "5.3")}
    spelled = {
        name: re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula) for name, formula in places.items()
    }
    at = {"s": 2, "x": 3, "a": 1, "xy": 4, "X": 5, "A": 3, "r": 1}
    for family, coordinates in (
        ("transitions", (2, 3, 1, 4)),
        ("visits", (2, 3, 1)),
        ("rewards", (2, 3, 1)),
        ("joint", (2, 3, 1, 4, 1)),
    ):
        shapes = CounterLayout(layout.sizes, "joint" if family == "joint" else "paper").shapes
        place = 0
        for coordinate, length in zip(coordinates, shapes[family], strict=True):
            place = place * length + coordinate
        if evaluate(spelled.get(family, "-1"), **at) != place:
            yield f"5.3: place of {family}: {places.get(family)}"
    small = CounterLayout(Sizes(2, 2, 2), "joint")
    example = Episode(np.array([0, 1, 1]), np.array([1, 0]), np.array([0, 1]))
    first, second = small.encode(example).tolist()
    words = (
        f"Example: X = 2, A = 2, H = 2, `joint`, all steps. C = {small.counters}, w = "
        f"{small.width}, the dummy is `{small.dummy:02x}`. The episode x = (0, 1, 1), a = (1, 0), "
        f"r = (0, 1) gives (((0·2+0)·2+1)·2+1)·2+0 = {first} and (((1·2+1)·2+0)·2+1)·2+1 = "
        f"{second}."
    )
    if words not in plain(text):
        yield "5.3: the example"


# ---- the page as a whole -----------------------------------------------------------------------


def label_faults(text: str) -> Iterator[str]:
    found = {}
    for name, written, _ in rows(text, "3.2"):
        match = re.fullmatch(r'`"(.*)" ‖ 00`', written)
        found[name] = match[1].encode() + b"\0" if match else None
    if found != LABELS:
        yield "3.2: labels"


def setting_faults(text: str) -> Iterator[str]:
    written = {name for row in rows(text, "18") for name in re.findall(r"`(\w+)`", row[0])}
    with TemporaryDirectory() as folder:
        Owner().write_settings(Path(folder), "http://127.0.0.1:1")
        made = json.loads((Path(folder) / "settings.json").read_text())
    if written != set(made):
        yield f"18: settings {written ^ set(made)}"


def limit_faults(text: str) -> Iterator[str]:
    values = {name: int(value) for name, value in rows(text, "15")}
    fields = Settings.model_fields
    known = LIMITS | {name: fields[field].default for name, field in DEFAULTS.items()}
    for name in values.keys() | known.keys():
        if values.get(name) != known.get(name):
            yield f"15: {name}: {values.get(name)}, in the code {known.get(name)}"


def problem_faults(text: str) -> Iterator[str]:
    checks = rows(text, "11")
    if [row[0] for row in checks] != [str(i) for i in range(1, len(checks) + 1)]:
        yield "11: numbers of checks"
    for _, __, problem in checks:
        if problem.strip("`") not in errors.PROBLEMS:
            yield f"11: {problem}"
    refusals = {row[0].strip("`") for row in rows(text, "13.6")}
    if refusals != {*get_args(rules.Decision), *get_args(rules.Closed)} - {"grant"}:
        yield "13.6: refusals"
    if {row[0].strip("`") for row in rows(text, "13.7")} != set(get_args(rules.Outcome)):
        yield "13.7: outcomes"
    temporary = {str(int(s)) for s, _ in errors.PROBLEMS.values() if errors.is_temporary(s)}
    written = re.search(r"is none of ([\d, ]+) to ([\d]+)", plain(text))
    listed = set(re.findall(r"\d+", written[1])) if written else set()
    if not listed or listed | {"503"} != temporary or written is None or written[2] != "599":
        yield "13.3: temporary statuses"


def sentence_faults(text: str) -> Iterator[str]:
    page = plain(text)
    for sentence in SENTENCES:
        if sentence not in page:
            yield f"not on the page: {sentence}"


CHECKS: tuple[Callable[[str], Iterator[str]], ...] = (
    label_faults,
    type_faults,
    member_faults,
    size_faults,
    counter_faults,
    limit_faults,
    problem_faults,
    sentence_faults,
)


def faults(text: str) -> list[str]:
    found: list[str] = []
    for check in CHECKS:
        try:
            found += check(text)
        except (ValueError, KeyError, SyntaxError, NameError, IndexError) as error:
            found.append(f"{check.__name__}: {error!r}")
    return found


def test_the_page_says_what_the_code_does() -> None:
    assert not faults(PAGE)
    assert not list(setting_faults(PAGE))


FREE = re.compile(
    r"^\#.*$ | \[[^]]*\]\(\#[^)]*\) | ^\d+\.[ ] | ^[ ]{4}.*"
    r"| `d1 | -v0 | In[ ]rule[ ]\d+ | [ ]19[ ]and[ ]20"
    r"| \|[ ]2[56][ ]\| | expiry[ ]\(8\) | RFC[ ]\d+ | Ed25519 | X25519 | UTF-8"
    r"| SHA-?256 | AES-\d+ | /v1/ | `v1` | p_log2 | `I2\( | clinic-1 | 1970-01-01[ ]00:00"
    r"| \b00\b | \b[012]\b | \(2k | `\W?8[^`]*` | answer(,|[ ]is)[ ]20[01] | a[ ]\*?\*?200"
    r"| exceed[ ]64[ ]bits | users\W+1000 | `00[ ]01[ ]02[ ]...[ ]1f` | The[ ]key[ ]is[ ]32",
    re.MULTILINE | re.VERBOSE,
)
"""Numbers that the page may change freely: headings, links, names, arithmetic, examples."""

MEASURED = ("12.4", "12.5")
"""Sections whose numbers are measured, or are the choice of a node's author."""


def checked_numbers(text: str) -> Iterator[tuple[int, int]]:
    free = [match.span() for match in FREE.finditer(text)]
    parts = [section(text, number) for number in MEASURED]
    free += [(text.index(part), text.index(part) + len(part)) for part in parts]
    for match in re.finditer(r"\d[\d,]*", text):
        if not any(start <= match.start() < end for start, end in free):
            yield match.span()


def test_every_number_of_the_page_is_compared() -> None:
    missed = [
        PAGE[max(0, start - 60) : end + 20]
        for start, end in checked_numbers(PAGE)
        if not faults(PAGE[:start] + str(int(PAGE[start:end].replace(",", "")) + 1) + PAGE[end:])
    ]
    assert not missed
