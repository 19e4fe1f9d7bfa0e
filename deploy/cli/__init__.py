"""The command `riffle`."""
