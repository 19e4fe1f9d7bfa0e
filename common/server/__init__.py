"""The parts of both servers: HTTP, limits, metrics, private keys and the database.

Nodes never import this package, and no rule of a single service belongs here.
"""
