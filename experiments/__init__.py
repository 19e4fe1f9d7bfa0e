"""Exact population-level simulation and regret, for the papers' figures."""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
