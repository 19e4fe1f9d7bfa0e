"""How long the steps of a batch took."""

import time


class Laps:
    """A stopwatch."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last
