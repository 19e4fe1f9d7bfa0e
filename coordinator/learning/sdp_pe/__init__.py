"""SDP-PE (paper 000) and its conference variant (paper 003). Other algorithms are elsewhere."""
