"""The node, the only service that sees an episode. Only this folder and `common/` send its data.

A node long-polls the shuffler for batches (`runner`, `shuffler_client`), checks each signed
descriptor (`trust`), leases slots for its users (`users`), runs one episode a user and encodes it
as L messages (`episode`, `environments/`), seals them (`sealing`), and uploads the sealed report
until the shuffler has it (`pipeline`). Nothing about an episode is stored or logged. An app that
drives the episodes itself (`participant`) stores them while they last (`episodes`).
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
