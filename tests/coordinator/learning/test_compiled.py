"""Loops that numba compiles also run without numba, and give the same answers to rounding."""

import subprocess
import sys

import pytest

from riffle.experiments.adversarial import run
from riffle.experiments.adversaries import Algorithm, Case

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from riffle.experiments.adversarial import run
from riffle.experiments.adversaries import Case
print(run(Case({name!r}, 20, 1.0, 1e-5, "central", "exact", 3)).regret)
"""


@pytest.mark.parametrize("name", ["uc-o-reps", "uob-lbps"])
def test_a_run_without_numba_has_the_same_regret(name: Algorithm) -> None:
    command = [sys.executable, "-P", "-W", "error", "-c", WITHOUT_NUMBA.format(name=name)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = run(Case(name, 20, 1.0, 1e-5, "central", "exact", 3)).regret
    assert float(printed) == pytest.approx(expected, abs=1e-9)
