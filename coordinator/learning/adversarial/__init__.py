"""Learners of paper 004: adversarial losses, loop-free layered MDPs. Others are elsewhere."""
