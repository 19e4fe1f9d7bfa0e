"""The coordinator's durable state: tables, records, queries, transactions. It makes no decision.

``store.py`` has every transaction, made of the parts in ``changes.py``; ``queries.py`` every read.
"""
