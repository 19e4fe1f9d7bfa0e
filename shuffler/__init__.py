"""The shuffler: the only service that nodes talk to.

It takes reports of a batch until it holds exactly n distinct ones, removes their outer seals,
permutes all their messages and hands them to the analyzer. It never sees a plaintext message, and
the analyzer never sees who sent which message or when.

``states`` and ``rules`` decide and do nothing else; ``schema``, ``store``, ``leasing``, ``uploads``
and ``nodes`` keep the durable state, reached through ``access``, all writes of which go through
``committer``; ``vault`` holds what is destroyed at erasure and ``endings`` destroys it; ``permute``
is the shuffle itself; ``core`` joins them and ``app`` translates HTTP.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
