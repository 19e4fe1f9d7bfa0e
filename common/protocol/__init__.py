"""What two roles must agree on, byte by byte: documents, frames, seals, errors, checks.

Nothing here listens or stores; the only I/O is reading a file of pins.
"""
