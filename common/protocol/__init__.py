"""Documents, frames, seals, errors and checks that two roles must agree on byte by byte.

No code here listens on a port or stores data. The only I/O is reading a file of pinned keys.
"""
