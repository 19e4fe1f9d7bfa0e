"""The coordinator's REST routes, their response models, and the code that makes these of records.

Routes translate only: they hold no state and decide nothing about runs.
"""
