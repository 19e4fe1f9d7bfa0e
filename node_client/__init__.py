"""The node, the only service that sees an episode.

An episode's data leaves the node only through the code of this folder and `common/`.

A node long-polls the shuffler for batches (`runner`, `shuffler_client`), checks each signed
descriptor (`trust`), and leases slots for its users (`users`). It runs one episode for each user
and encodes it as L messages (`episode`, `environments/`), seals them (`sealing`), and uploads the
sealed report until the shuffler has it (`pipeline`). A node stores and logs nothing about an
episode. An app that drives the episodes itself (`participant`) stores each episode while it lasts.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
