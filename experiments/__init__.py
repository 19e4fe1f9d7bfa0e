"""Exact population-level simulation and regret, for the papers' figures."""
