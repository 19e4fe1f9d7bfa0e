"""Learners of 004: adversarial losses on loop-free layered MDPs. SDP-PE and UCBVI are elsewhere."""
