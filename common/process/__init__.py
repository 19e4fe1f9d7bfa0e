"""Code that every process needs: settings, addresses, logs, traces, workers, and users' code.

Server code does not belong here, because nodes and the command line import this package.
"""
