"""The coordinator's REST routes, their models, and what turns records into answers."""
