"""The privacy mechanisms: counters, noise, and every role's half of each trust model.

`parameters` holds the numbers of a noise. `shuffle_model`, `local_model` and `central_model` draw
it: one trust model a file. All of it is pure: no I/O, no clock, and randomness is an argument.
Seals, documents and the accounting of privacy are elsewhere.
"""
