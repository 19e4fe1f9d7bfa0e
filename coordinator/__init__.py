"""The coordinator: issues batches for deployments, counts them, and keeps the ledger."""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
