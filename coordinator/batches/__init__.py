"""The code about one batch: issue, keys, opening, counts, spend, and the client of the shuffler.

Nothing here uses the store or a run's state.
"""
