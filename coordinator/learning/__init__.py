"""Learners, one file for each algorithm, and the code that they share; no I/O, no clock."""
