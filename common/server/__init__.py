"""Parts that both servers share: HTTP, limits, metrics, private keys and the database.

Nodes never import this package. Rules of a single service do not belong here.
"""
