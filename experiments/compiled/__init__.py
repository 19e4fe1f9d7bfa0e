"""Compiled twins of slow learners, one for one, tested to be equal; they need numba."""
