"""Environments of users' episodes: finite states, finite actions, a fixed horizon."""
