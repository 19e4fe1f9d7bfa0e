"""Checks a run's summary: every message counted, and a policy within 5 % of the optimum."""

import json
import sys
from pathlib import Path

summary = json.loads(Path(sys.argv[1]).read_text())
checks = {
    "every message forwarded was counted": summary["messages_forwarded"]
    == summary["messages_counted"]
    > 0,
    "every episode has its report": summary["episodes"] == summary["reports_accepted"] > 0,
    "epsilon at most 1": 0 < summary["epsilon"] <= 1,
    "policy within 5 % of the optimum": summary["policy_value"] >= 0.95 * summary["optimal_value"],
    "regret is that of a run": 0 <= summary["regret"] <= summary["episodes"],
}
for what, holds in checks.items():
    print(f"{'ok  ' if holds else 'FAIL'} {what}")
sys.exit(0 if all(checks.values()) else 1)
