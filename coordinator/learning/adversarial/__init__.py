"""Learners of paper 004, for adversarial losses in loop-free layered MDPs, and nothing else."""
