"""A statistical attack on Riffle's own privacy mechanism: ``riffle audit``.

`world` fixes two neighbouring populations, and `pipeline` runs the product's code on them. `attack`
turns a distinguisher's scores into lower bounds on epsilon and beta that hold with a stated
confidence. `broken` runs the same attack on two encodings that do not protect users. `observer`
guesses users' data from sizes, times and order. `run` is the audit.
"""
