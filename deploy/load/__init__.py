"""Loads a network with nodes that really fetch, check, lease, run, encode, seal and upload.

Arrivals follow a schedule that no answer can slow down. So a stalled server appears as latency, not
as fewer requests (`generator`). Many nodes share one event loop (`fleet`), several processes share
the nodes, and manual runs keep a batch open (`feed`). A rule names the bottleneck (`summary`), and
`html_page` shows it. `benchmark` compares throughput with that of the cryptographic primitive.
"""
