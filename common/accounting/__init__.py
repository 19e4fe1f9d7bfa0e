"""Exact privacy accounting of binomial noise in the shuffle model.

`account` says what a batch gives its users, `calibrate` finds the least noise that gives what was
asked, `events` composes batches. Everything is pure: no clock, no randomness, no I/O.

Read in this order: `losses` (one counter), `composition` (all of them, both directions, all errors
bounded), `overflow` (what padding costs), `account`, `calibrate`, `trusted` (the other workflows).
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
