"""Exact privacy accounting: the guarantee of given noise, and the least noise for a guarantee.

Code here is pure: it uses no clock, randomness, I/O or documents.

Read in this order: `binomial` (one counter's losses, and the cost of padding), `loss_curve` (all
counters), `account` (one batch), `composition` (several batches), `calibrate` (the least noise).
"""

from riffle.common.accounting.account import Account as Account
from riffle.common.accounting.account import BatchEvent as BatchEvent
from riffle.common.accounting.account import account as account
from riffle.common.accounting.calibrate import Calibration as Calibration
from riffle.common.accounting.calibrate import CalibrationName as CalibrationName
from riffle.common.accounting.calibrate import calibrate as calibrate
from riffle.common.accounting.calibrate import calibrate_central as calibrate_central
from riffle.common.accounting.calibrate import calibrate_local as calibrate_local
from riffle.common.accounting.calibrate import paper_tau as paper_tau
from riffle.common.accounting.composition import one_of_each_guarantee as one_of_each_guarantee
from riffle.common.accounting.composition import repeated_user_guarantee as repeated_user_guarantee
from riffle.common.accounting.composition import run_guarantee as run_guarantee
from riffle.common.accounting.least_noise import CalibrationError as CalibrationError
from riffle.common.accounting.least_noise import gaussian_variance as gaussian_variance
