"""When reports arrive: an open loop. Pure.

Times are fixed before the first request. A generator that waits for an answer before it asks again
omits, while the server stalls, just the requests that would have waited (coordinated omission);
here every report is due at its time, and its latency counts from there.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Arrivals = Literal["poisson", "constant"]
Times = npt.NDArray[np.float64]


def schedule(kind: Arrivals, rate: float, seconds: float, rng: np.random.Generator) -> Times:
    """Seconds from the start at which reports are due, ascending, all below ``seconds``.

    ``constant``: every 1/rate. ``poisson``: independent exponential gaps of mean 1/rate, as of many
    people who do not know of each other.
    """
    if kind == "constant":
        return np.arange(int(np.ceil(rate * seconds)), dtype=np.float64) / rate
    # Enough gaps for all but one schedule in 10^15: the mean and eight deviations.
    mean = rate * seconds
    times = np.cumsum(rng.exponential(1 / rate, int(mean + 8 * np.sqrt(mean) + 8)))
    return times[times < seconds]
