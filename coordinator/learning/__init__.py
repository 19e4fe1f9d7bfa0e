"""Learners, one file for each algorithm, and the pure code that they share: no I/O, no clock."""
