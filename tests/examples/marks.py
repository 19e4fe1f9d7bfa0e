"""Where in mistakes.py a mistake is, as marked there."""

from pathlib import Path

MISTAKES = Path(__file__).with_name("mistakes.py")


def line_after(start: str) -> str:
    """The file, and the line marked after the first line that starts so."""
    lines = MISTAKES.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    marked = (i for i in range(first, len(lines)) if "the line that is told" in lines[i])
    return f"(mistakes.py, line {next(marked) + 1})"
