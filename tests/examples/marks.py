"""The places of mistakes in mistakes.py, which marks them."""

from pathlib import Path

MISTAKES = Path(__file__).with_name("mistakes.py")


def line_after(start: str) -> str:
    """Returns the place of the first mark after the first line that begins with ``start``."""
    lines = MISTAKES.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    marked = (i for i in range(first, len(lines)) if "the reported line" in lines[i])
    return f"(mistakes.py, line {next(marked) + 1})"
