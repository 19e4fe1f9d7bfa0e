"""Privatizers: private running sums of what users contribute. One file, one mechanism."""
