"""A statistical attack on Riffle's own privacy mechanism.

`world` fixes two neighbouring populations, `pipeline` runs the product's code on them, `evidence`
turns what a distinguisher saw into lower bounds on epsilon and beta that hold with a stated
confidence, `attack` puts them together. `paper_sums` and `one_envelope` aim the same attack at two
encodings that do not protect; `observer` guesses users' data from sizes, times and order alone.
"""
