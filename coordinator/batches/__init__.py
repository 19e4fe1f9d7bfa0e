"""One batch: its issue, its keys, its opening, its counts, its spend, and the shuffler's client.

Nothing here knows the store or a run's state.
"""
