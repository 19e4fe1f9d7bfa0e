"""A statistical attack on Riffle's own privacy mechanism: ``riffle audit``.

`run` is the audit. `attack` is on two neighbouring populations (`world`), `broken` is on encodings
that do not protect users, and `observer` is on sizes, times and order.
"""
