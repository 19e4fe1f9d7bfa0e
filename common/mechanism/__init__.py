"""The privacy mechanisms: counters, noise, and each role's part in each trust model.

`parameters` holds the parameters of noise. `shuffle_model`, `local_model` and `central_model` draw
the noise, one file per trust model. All code is pure: no I/O, no clock, and randomness is an
argument. Seals, documents and the accounting of privacy are elsewhere.
"""
