"""Mutations of valid inputs: of bytes, and of JSON documents by their structure.

An input is a function of (decoder, number) alone, so a failure names what reproduces it.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator
Mutation = Callable[[Rng, bytes], bytes]

DEEP = "[" * 100_000
ODD_NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, 5e-324,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
ODD_TEXTS = (
    "",
    " ",
    "\x00",
    "a" * 10_000,
    "\ud800",
    "é",
    "../..",
    "%00",
    "null",
    "0x10",
    "1" * 5_000,
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": {}}, [[[[[[1]]]]]])


def mutate(rng: Rng, valid: bytes) -> bytes:
    """One to four mutations of a valid input."""
    data = valid
    for _ in range(int(rng.integers(1, 5))):
        data = _pick(rng, (_of_document, _of_bytes))(rng, data)
    return data


def _of_document(rng: Rng, data: bytes) -> bytes:
    """A change to a value of a JSON document; of its bytes when it is none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _of_bytes(rng, data)
    places = list(_places(document))
    if not places:
        return _of_bytes(rng, data)
    parent, key = places[int(rng.integers(len(places)))]
    _pick(rng, (_replace, _drop, _add, _repeat, _nudge))(rng, parent, key)
    return json.dumps(document, ensure_ascii=bool(rng.integers(2))).encode("utf-8", "surrogatepass")


def _places(value: Any) -> Any:
    """Every (container, key) of a document."""
    if not isinstance(value, dict | list):
        return
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(entries):
        yield value, key
        yield from _places(child)


def _replace(rng: Rng, parent: Any, key: Any) -> None:
    parent[key] = _pick(rng, _pick(rng, (ODD_NUMBERS, ODD_TEXTS, OTHERS)))


def _drop(_rng: Rng, parent: Any, key: Any) -> None:
    del parent[key]


def _add(rng: Rng, parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        parent[_pick(rng, ODD_TEXTS)] = parent[key]
    else:
        parent.insert(key, _pick(rng, OTHERS))


def _repeat(rng: Rng, parent: Any, key: Any) -> None:
    if isinstance(parent, list):
        parent.extend([parent[key]] * int(rng.integers(1, 50)))
    else:
        parent[key] = [parent[key]] * int(rng.integers(1, 50))


def _nudge(rng: Rng, parent: Any, key: Any) -> None:
    value = parent[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        parent[key] = str(value)[: int(rng.integers(0, 70))]
    else:
        parent[key] = value + _pick(rng, (-1, 1, value, -2 * value))


def _of_bytes(rng: Rng, data: bytes) -> bytes:
    change: Mutation = _pick(rng, (_flip, _cut, _insert, _double, _nothing, _deep))
    return change(rng, data)


def _flip(rng: Rng, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        if changed:
            changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
    return bytes(changed)


def _cut(rng: Rng, data: bytes) -> bytes:
    first, last = sorted(int(i) for i in rng.integers(0, len(data) + 1, 2))
    return data[:first] + data[last:]


def _insert(rng: Rng, data: bytes) -> bytes:
    at = int(rng.integers(len(data) + 1))
    return data[:at] + rng.bytes(int(rng.integers(1, 64))) + data[at:]


def _double(_rng: Rng, data: bytes) -> bytes:
    return data + data


def _nothing(_rng: Rng, _data: bytes) -> bytes:
    return b""


def _deep(rng: Rng, data: bytes) -> bytes:
    """Nested far deeper than a stack; rare, because parsing it takes a while."""
    return DEEP.encode() if rng.integers(50) == 0 else data[::-1]


def _pick(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]
