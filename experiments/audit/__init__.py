"""A statistical attack on Riffle's own privacy mechanism: ``riffle audit``.

`run` is the audit. `attack` tells neighbouring populations (`world`) apart, `broken` attacks
encodings that do not protect users, and `observer` guesses data from sizes, times and order.
"""
