"""Common to all tests."""

import os

import hypothesis

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see deploy/__init__.py

# Machines are noisy: a slow example is no failure. Examples are the same on every run of CI.
hypothesis.settings.register_profile("riffle", deadline=None, derandomize=True)
hypothesis.settings.load_profile("riffle")
