"""Starting Riffle: the command line, a network on loopback, containers."""

import os

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")

# Riffle's matrices are small and its processes share cores: BLAS threads only spin against each
# other (measured: up to 20 times slower under load). Must be set before NumPy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
