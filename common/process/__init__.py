"""Code that every process needs: settings, addresses, logs, traces, workers, and users' code.

Server code does not belong here: nodes and the command line import this package.
"""
