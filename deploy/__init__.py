"""Starting Riffle: the command line, a network on loopback, containers."""

import os

# Riffle's matrices are small and its processes share cores: BLAS threads only spin against each
# other (measured: up to 20 times slower under load). Must be set before NumPy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
