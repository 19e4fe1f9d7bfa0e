"""The shuffler: the only service that nodes talk to.

The shuffler never sees a plaintext message, and the analyzer never sees who sent which message or
when. docs/architecture.md follows a report through the modules.

`rules` and `states` only decide; they change nothing. `store` keeps the durable state; all writes
go through `store.committer`. `lifecycle` orders the steps of a batch's life. `metrics` counts the
work and decides who may see the counts. `core` joins the parts, `callers` tells callers apart, and
`app` translates HTTP.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
