"""The coordinator's REST routes, their response models, and the code that fills the models.

Routes only translate requests. They hold no state and decide nothing about runs.
"""
