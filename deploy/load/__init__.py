"""Load on a network: nodes that really fetch, check, lease, run, encode, seal and upload.

Arrivals follow a schedule that no answer can slow down (`schedule`), so a stalled server shows as
latency and not as fewer questions. Many nodes share one event loop (`fleet`), several processes
share the nodes (`worker`), deployments by hand keep a batch open (`feed`), and what limits the
whole is named by a rule (`verdict`).
"""
