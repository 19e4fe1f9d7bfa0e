"""Exact privacy accounting: the guarantee of given noise, and the least noise for a guarantee.

Code here computes from noise, padding and n, the number of reports. It uses no clock, randomness,
I/O or documents. `account` computes the guarantee of a batch, `calibrate` finds the least noise for
a guarantee, and the functions of `composition` compose batches.

Read in this order: `binomial` (one counter's losses, and the cost of padding), `loss_curve` (all
counters, both directions, rigorous bounds), `account` (one batch), `composition` (several batches),
`calibrate`.
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
