"""Learners, one file an algorithm, and the pure parts that they share; no I/O, no clock."""
