"""What two or more roles of Riffle must agree on: words, formats, mechanism, accounting."""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
