"""Documents, frames, seals, errors and checks that two roles must agree on byte by byte.

Nothing here listens or stores; the only I/O is reading a file of pins.
"""
