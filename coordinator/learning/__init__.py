"""Learners: deployments out, private counts in; one file an algorithm."""
