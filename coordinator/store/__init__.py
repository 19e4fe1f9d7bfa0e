"""The coordinator's durable state: its tables, records, queries and transactions.

``transactions.py`` has every transaction that writes, made of parts in ``writes.py``.
``queries.py`` has every read.
"""
