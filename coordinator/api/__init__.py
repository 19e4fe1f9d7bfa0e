"""The coordinator's REST routes, their response models, and the turning of records into them.

Routes translate only: they hold no state and decide nothing about runs.
"""
