"""One batch: how it is issued, opened, counted and paid for, and the shuffler that holds it."""
