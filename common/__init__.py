"""Code that two or more roles share: formats, mechanisms, accounting, process and server code.

Code that only one role uses belongs in that role's folder.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
