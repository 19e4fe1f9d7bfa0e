"""The node, the only service that sees an episode.

An episode's data leaves the node only through the code of this folder and `common/`. A node process
stores and logs nothing about an episode, except that an app's node (`participant`) stores an
episode until it is over. docs/architecture.md follows a report through these modules.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
