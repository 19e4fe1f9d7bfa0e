"""Loads a network with nodes that really fetch, check, lease, run, encode, seal and upload.

`run` is the load test. `benchmark` compares Riffle's throughput with the cryptographic primitive's.
"""
