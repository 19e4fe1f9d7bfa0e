"""Exact privacy accounting: what guarantee a batch's noise gives, and the least noise for one.

Here belongs what is a function of noise, padding and n alone: no clock, no randomness, no I/O, no
wire format. `account` computes the guarantee of a batch, `calibrate` finds the least noise for a
guarantee, `run_guarantee` and `repeated_user_guarantee` compose batches.

Read in this order: `binomial` (one counter's losses, and what padding costs), `bounds` (all
counters, both directions, rigorous bounds), `account`, `calibrate`.
"""

from riffle.common.accounting.account import (
    NEIGHBOURS,
    Account,
    BatchEvent,
    LedgerEntry,
    account,
    repeated_user_guarantee,
    run_guarantee,
)
from riffle.common.accounting.calibrate import (
    Calibration,
    CalibrationName,
    calibrate,
    calibrate_central,
    calibrate_local,
    paper_tau,
)
from riffle.common.accounting.search import CalibrationError, gaussian_variance

__all__ = [
    "NEIGHBOURS",
    "Account",
    "BatchEvent",
    "Calibration",
    "CalibrationError",
    "CalibrationName",
    "LedgerEntry",
    "account",
    "calibrate",
    "calibrate_central",
    "calibrate_local",
    "gaussian_variance",
    "paper_tau",
    "repeated_user_guarantee",
    "run_guarantee",
]
