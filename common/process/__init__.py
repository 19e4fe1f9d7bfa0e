"""Code that every process needs: settings, addresses, logs, traces, workers, and external code.

Server code does not belong here, because nodes and the command line import this package.
"""
