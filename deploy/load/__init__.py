"""Loads a network with nodes that really fetch, check, lease, run, encode, seal and upload.

Arrivals follow a schedule that no answer can slow down, so a stalled server shows as latency and
not as fewer requests (`generator`). Many nodes share one event loop (`fleet`), several processes
share the nodes, and manual runs keep a batch open (`feed`). A rule names the bottleneck
(`summary`), and `html_page` shows it. `benchmark` compares throughput with the cryptographic
primitive's.
"""
