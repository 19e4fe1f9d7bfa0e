"""What a learner returns as JSON, for the store and for events. Pure."""

import json
import math
from dataclasses import asdict

import numpy as np

from riffle.coordinator.learning.learner import LearnerSummary, StageResult


def to_json(value: StageResult | LearnerSummary) -> str:
    """A learner's result as JSON, arrays as nested lists; see `json_float`."""
    fields = asdict(value).items()
    plain = {k: json_float(v) if isinstance(v, float) else v for k, v in fields}
    return json.dumps(plain, default=_plain)


def json_float(value: float) -> float | str:
    """A number as JSON can say it: "Infinity", "-Infinity" and "NaN" are strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
