"""Starts and operates Riffle: command line, loopback network, load tests, containers.

Code that a service, a node or an experiment needs does not belong here.
"""

import os

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")

# Riffle's matrices are small and its processes share cores, so BLAS threads only wait for each
# other (measured: up to 20 times slower under load). Set the variable before NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
