"""Gives the vectors of docs/vectors to the functions that node, shuffler and coordinator use.

`check` raises AssertionError, or the error of such a function, at the first vector that fails.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from docs import make_vectors as vectors
from riffle.common.accounting import BatchEvent, account
from riffle.common.mechanism import shuffle_model, sums, workflow
from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes, Support
from riffle.common.mechanism.parameters import Guarantee, Noise, Padding
from riffle.common.mechanism.randomness import bernoulli, draw_counts, word
from riffle.common.protocol import descriptor as d
from riffle.common.protocol import hpke, signatures
from riffle.common.protocol.errors import LocalError, RemoteError, read_refusal
from riffle.common.protocol.verification import read_pins
from riffle.common.protocol.wire import LeaseRequest, frame, split_frames
from riffle.node_client.environments.tabular import Declaration
from riffle.node_client.episode import reward_mean
from riffle.node_client.sealing import SealKeys, seal_reports
from riffle.node_client.trust import Demands, accept
from riffle.node_client.users import opaque_id
from riffle.shuffler.permutation import Keystream

Json = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "docs" / "vectors"


def read(name: str) -> Json:
    found: Json = json.loads((FOLDER / name).read_text(encoding="ascii"))
    return found


def support_of(value: Json | None) -> Support | None:
    if value is None:
        return None
    tables = [tuple(tuple(map(tuple, row)) for row in table) for table in value["next"]]
    return Support(tuple(value["start"]), tuple(tables))


def episode_of(value: Json | None) -> Episode | None:
    if value is None or value["states"] is None:
        return None
    return Episode(*(np.array(value[name]) for name in ("states", "actions", "rewards")))


def demands_of(owner: Json) -> Demands:
    pins = owner["analyzer_keys"]
    return Demands(
        coordinator_key=bytes.fromhex(owner["coordinator_key"]),
        shuffler_key=bytes.fromhex(owner["shuffler_key"]),
        shuffler_id=owner["shuffler_id"],
        required=Guarantee(owner["epsilon"], owner["beta"], owner["dishonest_fraction"]),
        environment=owner["environment"],
        sizes=Sizes(owner["states"], owner["actions"], owner["horizon"]),
        reward_range=(owner["reward_low"], owner["reward_high"]),
        declaration=Declaration(support_of(owner["support"]), owner["homogeneous"]),
        trust_models=tuple(owner["trust_models"]),
        aggregations=tuple(owner["aggregations"]),
        max_owner_share=owner["max_owner_share"],
        analyzer_keys=None if pins is None else frozenset(pins),
        max_seconds=owner["max_seconds"],
        shortest_epoch=owner["shortest_epoch"],
        max_episode_seconds=owner["max_episode_seconds"],
        test_entry=owner["test_entry"],
        loopback=owner["loopback"],
    )


def envelope_of(vector: Json) -> d.SignedDescriptor:
    names = d.SignedDescriptor.model_fields
    return d.SignedDescriptor.model_validate({name: vector[name] for name in names})


def contexts() -> dict[str, d.Context]:
    rows = read("descriptors.json")["vectors"]
    return {row["name"]: d.parse(row["descriptor"].encode()) for row in rows}


def private(name: str) -> bytes:
    return bytes.fromhex(read("descriptors.json")["keys"][name]["private"])


# ---- one function a file ------------------------------------------------------------------------


def check_hpke() -> None:
    found = read("hpke.json")
    rfc = found["rfc9180"]
    one = {name: bytes.fromhex(value) for name, value in rfc.items() if name != "source"}
    steps = vectors.hpke_steps(one["skEm"], one["pkRm"], one["info"])
    assert {n: v for n, v in steps.items() if n != "dh"}.items() <= one.items()
    again = vectors.seal(one["skEm"], one["pkRm"], one["info"], one["pt"], one["aad"])
    assert again == one["enc"] + one["ct"]
    for vector in found["vectors"]:
        check_seal(vector)


def check_seal(vector: Json) -> None:
    key, info = bytes.fromhex(vector["private"]), bytes.fromhex(vector["info"])
    sealed = bytes.fromhex(vector["seal"])
    if not vector["opens"]:
        with pytest.raises(hpke.OpenError):
            hpke.open_sealed(key, info, sealed)
        return
    text = bytes.fromhex(vector["plaintext"])
    assert hpke.open_sealed(key, info, sealed) == text
    assert len(sealed) == hpke.OVERHEAD + len(text)
    public = bytes.fromhex(vector["public"])
    assert hpke.KeyPair.from_private(key).public == public
    assert hpke.open_sealed(key, info, hpke.seal(public, info, text)) == text
    steps = vectors.hpke_steps(bytes.fromhex(vector["ephemeral"]), public, info)
    assert {name: value.hex() for name, value in steps.items()}.items() <= vector.items()


def check_descriptors() -> None:
    found = read("descriptors.json")
    coordinator, shuffler = private("coordinator"), private("shuffler")
    for row in found["batch_ids"]:
        assert signatures.batch_id(row["run_id"], row["deployment"]) == row["batch_id"]
    for row in found["key_ids"]:
        assert signatures.key_id(bytes.fromhex(row["public"])) == row["key_id"]
    for row in found["owner_slots"]:
        share, n = row["owner_share"], row["n"]
        gamma = {"epsilon": 1.0, "beta": 0.1, "dishonest_fraction": 0.999}
        text = vectors.written(owner_share=share, n=n, guarantee=gamma)
        assert d.parse(text.encode()).descriptor.owner_slots == row["owner_slots"]
    for row in found["vectors"]:
        data, context = row["descriptor"].encode(), d.parse(row["descriptor"].encode())
        batch, layout = context.descriptor, context.descriptor.layout
        assert context.digest.hex() == row["digest"]
        assert signatures.sign_deposit(coordinator, data) == row["coordinator_signature"]
        key = bytes.fromhex(row["batch_key"])
        assert signatures.countersign(shuffler, context.digest, key) == row["shuffler_signature"]
        sizes = (layout.counters, layout.width, layout.cells, batch.padding.messages)
        names = ("counters", "width", "cells", "messages")
        assert sizes == tuple(row[name] for name in names)
        more = (batch.message_bytes, batch.report_bytes, batch.owner_slots)
        assert more == tuple(row[n] for n in ("message_bytes", "report_bytes", "owner_slots"))
        owner = found["owner"] | row.get("owner", {})
        accept(envelope_of(row), batch.batch_id, demands_of(owner), found["now"])


def check_parsing() -> None:
    for row in read("parsing.json")["vectors"]:
        text = row["descriptor"]
        for mark, part in row.get("repeat", {}).items():
            text = text.replace(mark, part["text"] * part["times"])
        if row["problem"] is None:
            d.parse(text.encode())
            continue
        with pytest.raises(RemoteError) as caught:
            d.parse(text.encode())
        assert caught.value.slug == row["problem"], row["name"]


def check_refusals() -> None:
    found = read("refusals.json")
    for row in found["vectors"]:
        demands = demands_of(found["owner"] | row["owner"])
        if row["problem"] is None:
            accept(envelope_of(row), row["asked"], demands, found["now"])
            continue
        with pytest.raises(RemoteError) as caught:
            accept(envelope_of(row), row["asked"], demands, found["now"])
        assert caught.value.slug == row["problem"], row["name"]


def check_counters() -> None:
    found = read("counters.json")
    for row in found["widths"]:
        layout = CounterLayout(Sizes(row["states"], row["actions"], row["horizon"]), "joint")
        assert (layout.counters, layout.width) == (row["counters"], row["width"])
    for row in found["vectors"]:
        sizes = Sizes(row["states"], row["actions"], row["horizon"])
        layout = CounterLayout(sizes, row["families"], row["layer"], support_of(row["support"]))
        counted = (layout.counters, layout.width, layout.cells)
        assert counted == (row["counters"], row["width"], row["cells"])
        for each in row["episodes"]:
            episode = episode_of(each)
            assert episode is not None
            if each["indices"] is None:
                with pytest.raises(ValueError, match="outside"):
                    layout.encode(episode)
            else:
                assert layout.encode(episode).tolist() == each["indices"]


def check_draws() -> None:
    found, batches = read("draws.json"), contexts()
    mixture = d.parse(vectors.written().encode()).descriptor.mixture
    for row in found["policies"]:
        assert mixture.weights.tolist() == row["weights"]
        drawn: Any = vectors.Bytes(row["word"].to_bytes(4, "little"))
        assert np.array_equal(mixture.pick(word(drawn)), mixture.policies[row["policy"]])
    for row in found["rewards"]:
        mean = reward_mean(row["reward"], (row["reward_low"], row["reward_high"]))
        drawn = vectors.Bytes(bytes.fromhex(row["word_le"]))
        assert bernoulli(drawn, mean) == row["bit"]
    for row in found["flips"]:
        batch = batches[row["descriptor"]].descriptor
        drawn = vectors.Bytes(bytes.fromhex(row["words_le"]))
        noise, padding = batch.batch_noise, batch.padding
        made = workflow.encode(batch.layout, noise, padding, episode_of(row), drawn)
        assert bytes(made.tolist()).hex() == row["plaintext"]
    for row in found["overflow"]:
        drawn = vectors.Bytes(bytes.fromhex(row["keys_le"]))
        padding, arrays = Padding(row["data_slots"], row["noise_slots"]), ("data", "noise")
        data, ones = (np.array(row[name], dtype=np.int64) for name in arrays)
        made = shuffle_model.pad(data, ones, padding, row["dummy"], drawn)
        assert made.tolist() == row["indices"]
    for row in found["noise"]:
        drawn = vectors.Bytes(bytes.fromhex(row["bytes"]))
        bits = Noise(row["bits"], row["p_numerator"], row["p_log2"])
        assert draw_counts(row["counters"], bits, drawn).tolist() == row["ones"]
        assert drawn.used == len(drawn.data)


def check_reports() -> None:
    batches = contexts()
    for row in read("reports.json")["vectors"]:
        check_report(row, batches[row["descriptor"]])


def check_report(row: Json, context: d.Context) -> None:
    """Makes the report as a node does, and opens it and a node's own as the other roles do."""
    batch, layout = context.descriptor, context.descriptor.layout
    report = bytes.fromhex(row["report"])
    framed = frame(row["lease"], report)
    assert framed.hex().startswith(row["frame"])
    leases, reports = split_frames(framed * 2, batch.report_bytes)
    assert leases == [row["lease"]] * 2
    assert bytes(reports[1]) == report
    tape = vectors.Tape(f"report {row['name']}")
    noise, padding, episode = batch.batch_noise, batch.padding, episode_of(row["episode"])
    made = workflow.encode(layout, noise, padding, episode, tape.random, batch.word_bits)
    data = [] if episode is None else layout.encode(episode).tolist()
    assert data == row["data"]
    keys = SealKeys.of(context, hpke.KeyPair.from_private(private("batch")).public)
    if batch.word_bits:
        vector = np.bincount(data, minlength=layout.counters) + np.array(row["noise"])
        assert made.tolist() == row["vector"] == vector.tolist()
        check_masked(row, context, report)
        check_masked(row, context, seal_reports(keys, made[None]))
        return
    for each in (report, seal_reports(keys, made[None])):
        symbols = check_opened(row, context, each)
        assert symbols.ravel().tolist() == made.tolist()
    count, failed = workflow.count(batch.trust, layout, symbols)
    assert failed.size == 0
    ones = np.bincount(data, minlength=layout.counters)
    if batch.trust == "shuffle":
        ones = ones + np.array(row["noise"])
        assert count[-1] >= batch.padding.messages - ones.sum()
        kept = row.get("kept", np.repeat(np.arange(layout.counters), row["noise"]).tolist())
        assert [*data, *kept] == symbols.ravel()[: len(data) + len(kept)].tolist()
        assert (count[:-1] <= ones).all()
    elif batch.trust == "central":
        assert count.tolist() == [*ones.tolist(), 1]
    else:
        bits = int(row["plaintexts"][0], 16).bit_count()
        assert (count[:-1].sum(), count[-1]) == (bits, 1)
        assert count[0] == int(row["plaintexts"][0][0], 16) >> 3


def check_opened(row: Json, context: d.Context, report: bytes) -> np.ndarray[Any, Any]:
    """Opens both seals of a report; returns the symbols of its messages."""
    inner = hpke.open_sealed(private("batch"), context.report_info, report)
    size = context.descriptor.message_bytes
    messages = [inner[start : start + size] for start in range(0, len(inner), size)]
    texts = list(hpke.open_each(private("analyzer"), context.message_info, messages))
    assert [None if text is None else text.hex() for text in texts] == row["plaintexts"]
    return context.descriptor.symbols.read(b"".join(text or b"" for text in texts))


def check_masked(row: Json, context: d.Context, report: bytes) -> None:
    """Opens a report of sums and takes its mask away."""
    inner = hpke.open_sealed(private("batch"), context.report_info, report)
    C, bits = context.descriptor.layout.counters, context.descriptor.word_bits or 0
    total = sums.empty_sum(C, bits)
    key = sums.add(total, inner)
    masks = sums.add_masks(private("analyzer"), context.mask_info, key, C, bits)
    assert (total - masks).tolist() == row["vector"]


def check_analyzer() -> None:
    found, batches = read("analyzer.json"), contexts()
    for row in found["permutations"]:
        key = Keystream(bytes.fromhex(row["key"]))
        assert shuffle_model.permutation(row["size"], key).tolist() == row["order"]
    row = found["opened"]
    keys = bytes.fromhex(row["private"]), bytes.fromhex(row["info"])
    made = hpke.open_histogram(*keys, bytes.fromhex(row["messages"]), row["width"], row["counters"])
    assert (made[0].tolist(), made[1]) == (row["histogram"], row["failed"])
    for row in found["debias"]:
        noise = batches[row["descriptor"]].descriptor.batch_noise
        unbiased = workflow.debias(noise, row["n"], np.array([*row["counts"], row["last"]]))
        np.testing.assert_allclose(unbiased, row["unbiased"], rtol=1e-8)
    row = found["sum"]
    C, points = len(row["counts"]), bytes.fromhex(row["keys"])
    masks = sums.add_masks(bytes.fromhex(row["private"]), bytes.fromhex(row["info"]), points, C, 16)
    total, _ = sums.split_release(bytes.fromhex(row["sum"]) + points, C, 16)
    assert (total - masks).tolist() == row["counts"]
    assert batches[row["descriptor"]].mask_info.hex() == row["info"]


def check_accountant() -> None:
    for row in read("accountant.json")["vectors"]:
        result = account(event_of(row), row["beta"])
        for bound, value in (("lower", result.epsilon_lower), ("upper", result.epsilon_upper)):
            written = np.inf if row[bound] is None else row[bound]
            assert value == pytest.approx(written, rel=1.1e-6), row["name"]
        assert event_of(row).overflow == pytest.approx(row["overflow"], rel=2e-6)


def event_of(row: Json) -> BatchEvent:
    noise = d.NoiseDocument.model_validate(row["noise"]).noise()
    padding = Padding(row["cells"], row["noise_slots"])
    rest = {name: row[name] for name in ("cells", "counters", "word_bits")}
    return BatchEvent(noise, padding, row["n"], row["gamma"], **rest)


def check_wire() -> None:
    found = read("wire.json")
    assert asyncio.run(vectors.requests()) == found["requests"]
    now = datetime.now(UTC)
    for row in found["answers"]:
        after = row.get("retry_after")
        error = read_refusal("the shuffler", row["status"], row["body"].encode(), after, now)
        if "final" in row:
            assert isinstance(error, RemoteError)
            assert error.slug == row["final"]
        else:
            assert isinstance(error, LocalError)
            assert (error.retry_after or 0) == row["wait"]
    for row in found["lease_requests"]:
        users = {"users": [f"{i:032x}" for i in range(row["users"])]}
        with nullcontext() if row["valid"] else pytest.raises(ValidationError):
            LeaseRequest.model_validate_json(json.dumps(users))
    for row in found["user_ids"]:
        assert opaque_id(bytes.fromhex(row["key"]), row["name"]) == row["id"]
    with TemporaryDirectory() as folder:
        for row in found["pins"]:
            file = Path(folder) / "pins"
            file.write_text(row["text"], encoding="utf-8", newline="")
            if row["keys"] is None:
                with pytest.raises(LocalError):
                    read_pins(file)
            else:
                assert read_pins(file) == frozenset(row["keys"])


CHECKS: dict[str, Callable[[], None]] = {
    "hpke.json": check_hpke,
    "counters.json": check_counters,
    "draws.json": check_draws,
    "wire.json": check_wire,
    "analyzer.json": check_analyzer,
    "descriptors.json": check_descriptors,
    "parsing.json": check_parsing,
    "reports.json": check_reports,
    "refusals.json": check_refusals,
    "accountant.json": check_accountant,
}
