"""Simulations without a network, the papers' figures, and the audit of the privacy mechanism.

No service imports this package.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
