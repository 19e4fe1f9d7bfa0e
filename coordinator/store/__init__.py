"""The coordinator's durable state: tables, records, queries, transactions. It makes no decision.

``transactions.py`` has every transaction, made of the parts in ``writes.py``; ``queries.py`` has
every read.
"""
