"""The node in TypeScript makes of the same random bytes the same reports as the node in Python.

It also parses the same descriptors: random valid ones, and the same with one character changed.
RIFFLE_WEB_EQUALITY sets their number.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.make_vectors import FAIR, FAMILIES, FLIPS, LAPLACE, Tape, written
from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.common.mechanism.parameters import Noise
from riffle.common.mechanism.workflow import encode
from riffle.common.protocol.descriptor import BatchDescriptor, parse
from riffle.common.protocol.errors import RemoteError
from riffle.node_client.sealing import SealKeys
from tests.node_client.web.conftest import WEB

Json = dict[str, Any]
NUMBER = int(os.environ.get("RIFFLE_WEB_EQUALITY", "80"))
TRUST = {"local": [FLIPS], "central": [LAPLACE, FAIR]}
CHARACTERS = '0123456789abcdef{}[],:."-+eE \\ntu\t\x00é'


@pytest.fixture(scope="module")
def script(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("script") / "equality.mjs"
    command = [WEB / "node_modules" / ".bin" / "esbuild", WEB / "test" / "equality.ts"]
    options = ["--bundle", "--format=esm", "--platform=node", "--log-level=warning"]
    options += [f"--inject:{WEB / 'src' / 'node' / 'webcrypto.ts'}"]  # for Node.js 18
    subprocess.run([*map(str, command), *options, f"--outfile={made}"], check=True)
    return made


def answers(script: Path, rows: list[Json]) -> list[str]:
    done = subprocess.run(
        ["node", str(script)], input=json.dumps(rows), capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(done.stdout)
    return found


def states(draw: random.Random, X: int, least: int = 1) -> list[int]:
    return sorted(draw.sample(range(X), draw.randint(least, X)))


def support(draw: random.Random, X: int, A: int, H: int) -> Json:
    tables = draw.choice((1, H))
    return {
        "start": states(draw, X),
        "next": [[[states(draw, X) for _ in range(A)] for _ in range(X)] for _ in range(tables)],
    }


def noise(draw: random.Random) -> Json:
    log2 = draw.choice((1, 3, 8, 32))
    numerator = draw.randint(1, max(1, (1 << log2) // draw.choice((2, 50))))
    return {"bits": draw.choice((1, 7, 256, 300, 700)), "p_numerator": numerator, "p_log2": log2}


def valid(draw: random.Random) -> str:
    X, A, H = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 4)
    trust = draw.choice(("shuffle", "shuffle", "local", "central"))
    layer, families = draw.choice((None, H - 1)), draw.choice(FAMILIES)
    changes: Json = {
        "states": X,
        "actions": A,
        "horizon": H,
        "layer": layer,
        "families": families,
        "support": draw.choice((None, support(draw, X, A, H))),
        "policies": [[[draw.randrange(A) for _ in range(X)] for _ in range(H)]],
        "weights": [1 << 32],
        "trust": trust,
        "noise": draw.choice(TRUST.get(trust, [noise(draw)])),
        "data_slots": 1,
        "noise_slots": 0,
    }
    if trust == "shuffle" and draw.random() < 0.5:
        summed = Noise(**changes["noise"])
        changes |= {"aggregation": "sums", "word_bits": sums.word_bits(200, summed)}
    elif trust == "shuffle":
        cells = CounterLayout(Sizes(X, A, H), families, layer).cells
        changes |= {"data_slots": cells, "noise_slots": draw.choice((0, 5, 40, 5_000))}
    return written(**changes)


def episode_of(draw: random.Random, batch: BatchDescriptor) -> Episode | None:
    """A random episode, which may be outside the support, or none."""
    X, A, H = batch.states, batch.actions, batch.horizon
    kept = batch.support
    x = [draw.choice(kept.start if kept else range(X))]
    actions = [draw.randrange(A) for _ in range(H)]
    for h, a in enumerate(actions):
        x.append(draw.choice(kept.next[h % len(kept.next)][x[h]][a] if kept else range(X)))
    if draw.random() < 0.1:
        x[-1] = draw.randrange(X)
    rewards = [draw.randrange(2) for _ in range(H)]
    episode = Episode(np.array(x), np.array(actions), np.array(rewards))
    return None if draw.random() < 0.1 else episode


def contents(text: str, episode: Episode | None, tape: Tape) -> bytes:
    """What Riffle's own node seals: plaintexts, or the words of a vector."""
    context = parse(text.encode())
    batch = context.descriptor
    try:
        if episode is not None:
            batch.layout.check(episode)
    except ValueError:
        episode = None
    noise = batch.batch_noise
    report = encode(
        batch.layout, noise, batch.padding, episode, tape.random, word_bits=batch.word_bits
    )
    if batch.word_bits:
        return report.astype(f"<u{batch.word_bits // 8}").tobytes()
    width = SealKeys.of(context, bytes(32)).symbols.width
    return b"".join(int(index).to_bytes(width, "big") for index in report)


def test_reports_are_equal(script: Path) -> None:
    draw, rows, expected = random.Random(19), list[Json](), list[str]()
    for i in range(NUMBER):
        text, tape = valid(draw), Tape(f"equality {i}")
        episode = episode_of(draw, parse(text.encode()).descriptor)
        expected.append(contents(text, episode, tape).hex())
        fields = episode and {
            name: getattr(episode, name).tolist() for name in ("states", "actions", "rewards")
        }
        drawn = Tape(f"equality {i}").read(tape.used).hex()
        rows.append({"descriptor": text, "episode": fields, "bytes": drawn})
    assert answers(script, rows) == expected
    assert sum(row["episode"] is not None for row in rows) > NUMBER / 2


def changed(draw: random.Random, text: str) -> str:
    at = draw.randrange(len(text))
    end = at + draw.choice((0, 1, 1, 2))
    return text[:at] + draw.choice((draw.choice(CHARACTERS), "", text[at:end] * 2)) + text[end:]


def is_refused(text: str) -> bool:
    try:
        parse(text.encode())
    except RemoteError as error:
        assert error.slug == "malformed"
        return True
    return False


def test_changed_descriptors_parse_alike(script: Path) -> None:
    draw = random.Random(20)
    texts = [changed(draw, valid(draw)) for _ in range(3 * NUMBER)]
    refused = {text for text in texts if is_refused(text)}
    found = answers(script, [{"descriptor": t, "episode": None, "bytes": ""} for t in texts])
    theirs = {text for text, answer in zip(texts, found, strict=True) if answer == "malformed"}
    assert theirs == refused
    assert 0.05 < len(refused) / len(texts) < 0.95
