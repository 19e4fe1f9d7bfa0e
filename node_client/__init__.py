"""The node, the only service that sees an episode.

An episode's data leaves the node only through the code of this folder and `common/`.

A node long-polls the shuffler for batches (`runner`, `shuffler_client`), checks each signed
descriptor (`trust`), and leases slots for its users (`users`). For each user, the node runs one
episode and encodes the episode as L messages (`episode`, `environments/`). The node seals these
messages as a report (`sealing`), and sends the report until the shuffler has stored it
(`pipeline`). A node stores and logs nothing about an episode. An app that drives the episodes
itself (`participant`) stores each episode while the episode lasts.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
