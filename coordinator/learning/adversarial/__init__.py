"""Learners of document 004: adversarial losses on loop-free layered MDPs. One file, one part."""
