"""Learners of paper 004: adversarial losses, loop-free layered MDPs. No other learners."""
