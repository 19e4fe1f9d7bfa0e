"""Learners by name: built in, external, or manual. The algorithms are in `coordinator.learning`."""
