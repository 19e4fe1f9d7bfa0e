"""Code that every process needs: settings, addresses, logs, traces, workers, users' own code.

Server code does not belong here: nodes and the command line import this package.
"""
