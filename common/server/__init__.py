"""What both servers are built from: HTTP, limits, metrics and the database. Nodes never import
it.
"""
