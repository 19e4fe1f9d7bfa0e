"""The node: the only service that sees an episode. Whoever asks what leaves a user's device reads
this folder and `common/`, and nothing else.

A node long-polls the shuffler for batches, checks the signed descriptor of each (`trust`), leases
slots for its users (`users`), runs one episode a user (`episode`, `environments/`), encodes it as L
messages (`report`), seals them (`sealing`), and uploads the sealed report until the shuffler has it
(`shuffler_api`, `pipeline`, `runner`). Nothing about an episode is stored or logged.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
