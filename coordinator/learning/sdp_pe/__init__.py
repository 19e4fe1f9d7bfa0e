"""SDP-PE (000, Algorithms 1-3) and its conference variant (003). Other algorithms are elsewhere."""
