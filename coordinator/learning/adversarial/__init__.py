"""Learners of 004: adversarial losses on loop-free layered MDPs; nothing of SDP-PE or UCBVI."""
