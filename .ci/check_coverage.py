"""Fails if the tests cover too little of the code, or if coverage did not see all of the code."""

import json
import sys
from pathlib import Path

LEAST_STATEMENTS = 15_000
LEAST_PERCENT = 96.2  # statements and branches; compiled loops are excluded

totals = json.loads(Path(sys.argv[1]).read_text())["totals"]
statements, percent = totals["num_statements"], totals["percent_covered"]
print(f"{statements} statements, {percent:.2f} % covered")
if statements < LEAST_STATEMENTS:
    sys.exit(f"coverage saw fewer than {LEAST_STATEMENTS} statements: is its source list right?")
if percent < LEAST_PERCENT:
    sys.exit(f"coverage fell below {LEAST_PERCENT} %: test what you added")
