"""Every decoder under hostile input: it answers, or refuses with its own documented error.

A few thousand inputs each by default; ``RIFFLE_FUZZ_INPUTS=100000`` for a campaign, whose memory
and slowest input are printed with ``-s``.
"""

import os
import time
import tracemalloc
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from riffle.common.protocol.descriptor import SignedDescriptor, first_fault
from riffle.common.protocol.errors import MAX_DETAIL_LENGTH, RiffleError
from tests.fuzz.cases import cases
from tests.fuzz.mutator import mutate

INPUTS = int(os.environ.get("RIFFLE_FUZZ_INPUTS", "600"))
MOST_GROWTH = 8 << 20
with TemporaryDirectory() as _folder:
    NAMES = list(cases(Path(_folder)))


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_answers_or_refuses(name: str, tmp_path: Path) -> None:
    case = cases(tmp_path)[name]
    for valid in case.valid:
        case.decode(valid)
    refused, slowest = 0, 0.0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(INPUTS):
            rng = np.random.default_rng([number, zlib.crc32(name.encode())])
            data = mutate(rng, case.valid[number % len(case.valid)])
            began = time.perf_counter()
            try:
                case.decode(data)
            except case.refusals as error:
                refused += 1
                if isinstance(error, RiffleError):
                    assert "\n" not in error.detail and len(error.detail) <= MAX_DETAIL_LENGTH, (
                        number
                    )
            except Exception as error:
                raise AssertionError(f"input {number}: {error!r} for {data[:200]!r}") from error
            slowest = max(slowest, time.perf_counter() - began)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"{name}: {INPUTS} inputs, {refused} refused, slowest {slowest:.3f} s, kept {grown} B")
    assert refused or not case.refusals
    assert grown < MOST_GROWTH


def test_first_faults_are_one_line() -> None:
    with pytest.raises(ValueError, match="descriptor") as caught:
        SignedDescriptor.model_validate_json(b"{}")
    assert "\n" not in first_fault(caught.value)  # type: ignore[arg-type]
