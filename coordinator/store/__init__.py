"""The coordinator's durable state: tables, records, queries, transactions; it decides nothing.

``transactions.py`` has every transaction that writes, made of parts in ``writes.py``.
``queries.py`` has every read.
"""
