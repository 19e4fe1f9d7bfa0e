"""What limits a load, by a stated rule. Pure.

Where a report's time goes says where the queue is; who is saturated says why. A process is
saturated when its threads ran or waited for a processor for `SATURATED` of the time and more: that
holds for a process with a busy neighbour too, which gets less of its processor but wants as much.
First that holds:

1. `CARRIED` of the due reports or more were accepted within `PROMPT_SECONDS` of their time:
   nothing was the limit. Where no batch filled, the coordinator had nothing to open: it is said.
2. The generator's event loops are saturated, or most time is lost before a report starts: the
   generator. What it measured of the server says nothing then.
3. Most time is lost in sealing: the generator too; real nodes bring processors of their own.
4. Most time is lost waiting for a batch, from a shuffler that is not saturated: the coordinator,
   which opens messages no faster than that; its opening processes, when they are saturated.
5. What is left is lost in requests: the shuffler. Its processor, when it is saturated; its own
   bounds, when it answered 429; else its disk.

When generator and services share the very same processors and these are busy, 2 to 5 name the
machine: more load would need more of it, on either side; the stage says where the queue was.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

CARRIED, SATURATED, BUSY = 0.98, 0.85, 0.95
PROMPT_SECONDS = 2.0

Limit = Literal["none", "generator", "coordinator", "shuffler", "machine"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Reports due, and those accepted promptly; batches that filled; seconds of the reports' time
    by stage (`tally.STAGES`); demand in processors.

    ``loops`` is the busiest generator process's, ``opening`` of one opening process on the mean.
    Services' demands are None when they run elsewhere. ``busy``: share of all processors' time.
    """

    due: int
    prompt: int
    filled: int
    stages: dict[str, float]
    loops: float
    sealing: float
    shuffler: float | None = None
    coordinator: float | None = None
    opening: float | None = None
    refused: int = 0
    same_cores: bool = False
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits, in which stage the time is lost, and why it is said."""

    limit: Limit
    stage: str
    why: str

    def summary(self) -> dict[str, Any]:
        """As the report has it."""
        return asdict(self)


def judge(seen: Evidence) -> Verdict:
    """The verdict by the rule above."""
    share = seen.prompt / seen.due if seen.due else 1.0
    if share >= CARRIED:
        why = f"{share:.1%} of the due reports were accepted within {PROMPT_SECONDS:g} s"
        idle = "" if seen.filled else "; no batch filled, so nothing is said of the coordinator"
        return Verdict("none", "", why + idle)
    verdict = _where(seen)
    if seen.same_cores and seen.busy >= BUSY:
        why = f"all processors were busy and shared ({seen.busy:.0%}); {verdict.why}"
        return Verdict("machine", verdict.stage, why)
    return verdict


def _where(seen: Evidence) -> Verdict:
    stage = max(seen.stages, key=lambda name: seen.stages[name])
    lost = f"{seen.stages[stage] / (sum(seen.stages.values()) or 1.0):.0%} of the time is {stage}"
    if seen.loops >= SATURATED:
        return Verdict("generator", stage, f"its event loops are saturated ({seen.loops:.2f})")
    if stage in ("lag", "episode"):
        return Verdict("generator", stage, f"reports start late; {lost}")
    if stage == "sealing":
        return Verdict("generator", stage, f"{lost}; sealers want {seen.sealing:.2f} each")
    if stage == "batch" and (seen.shuffler is None or seen.shuffler < SATURATED):
        return Verdict("coordinator", stage, f"no batch was open; {lost}; {_opening(seen)}")
    return Verdict("shuffler", stage, f"{lost}; {_shuffler(seen)}")


def _opening(seen: Evidence) -> str:
    if seen.opening is None or seen.coordinator is None:
        return "it runs elsewhere"
    if seen.opening >= SATURATED:
        return f"opening processes are saturated ({seen.opening:.2f} each)"
    return f"it wants {seen.coordinator:.2f} processors, each opening process {seen.opening:.2f}"


def _shuffler(seen: Evidence) -> str:
    if seen.shuffler is None:
        return "it runs elsewhere"
    if seen.shuffler >= SATURATED:
        return f"its processor: it wants {seen.shuffler:.2f}"
    if seen.refused:
        return f"its own bounds: {seen.refused} answers were 429"
    return f"its disk: it wants only {seen.shuffler:.2f} processors"
