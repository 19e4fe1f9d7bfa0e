"""Puts a network under load: its nodes really fetch, check, lease, run, encode, seal and upload.

`run` is the load test. `benchmark` compares the throughput of Riffle and of cryptography alone.
"""
