"""The command ``riffle``: options, messages and exit codes.

A module here reads a command's options, calls the package that does the work, and prints its
answer. Logic that a Python program could also call belongs in that package.
"""
