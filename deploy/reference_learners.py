"""Reference pages of what can be chosen: learners, their options, environments; of what is refused.

Every built-in learner is a factory with a docstring; the options of SDP-PE and their meaning are
the fields and the docstring of `Constants`. What has no sentence there fails here.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict

from riffle.common.errors import PROBLEMS, URN
from riffle.coordinator.learning.presets import PRESETS, Constants
from riffle.coordinator.learning.ucbvi import Bonus
from riffle.coordinator.registry import BUILT_IN
from riffle.experiments.per_episode import PER_EPISODE
from riffle.node_client.environments.registry import BUILDERS

WHOM = {None: "nobody is protected", "central": "a central agent adds noise", "local": "users do"}


def learners_page() -> str:
    """Learners with their options, and environments with their parameters, as Markdown."""
    return "\n\n".join([
        "# Learners and environments",
        "Made from the code by `make docs`. How to bring others: [Bring your own](own.md).",
        "## Learners",
        "On the services and in the simulator, `--learner NAME`:",
        _table(("learner", "is"), [(f"`{n}`", _first(f)) for n, f in sorted(BUILT_IN.items())]),
        "In the simulator only, as they plan anew before every episode (`004`'s are figures of "
        "`riffle figures`):",
        _table(("learner", "trust"), [(f"`{n}`", WHOM[t]) for n, t in PER_EPISODE.items()]),
        "## Options of SDP-PE",
        "`--option NAME=VALUE` replaces a constant of the preset that `--constants` names; all of "
        "SDP-PE's kin have the same. What each is worth: [ablation](ablation.md).",
        _table(("option", *(f"`{name}`" for name in PRESETS), "meaning"), _options()),
        "## Options of UCBVI",
        "`ucbvi`, `ucbvi-jdp`, `ucbvi-ldp`. " + _paragraph(Bonus, 1),
        _table(
            ("option", "default"),
            [(f"`{n}`", f"`{v}`") for n, v in asdict(Bonus()).items() if n != "name"],
        ),
        "## Environments",
        "`--env ID`, `--param NAME=VALUE`. X, A and H follow from the parameters.",
        _table(("environment", "is", "parameters"), _environments()),
    ]) + "\n"  # fmt: skip


def problems_page() -> str:
    """Every problem type, as Markdown."""
    rows = [
        (f"`{slug}`", str(int(status)), title) for slug, (status, title) in sorted(PROBLEMS.items())
    ]
    return "\n\n".join([
        "# Problems",
        "Made from the code by `make docs`. A refusal is an `application/problem+json` document "
        f"(RFC 9457) whose `type` is `{URN}` and one of these names; `detail` says what was wrong, "
        "which value, and what to do.",
        _table(("name", "status", "title"), rows),
    ]) + "\n"  # fmt: skip


def _options() -> list[tuple[str, ...]]:
    presets = [preset.as_dict() for preset in PRESETS.values()]
    meanings = option_meanings()
    return [
        (f"`{name}`", *(f"`{_short(preset[name])}`" for preset in presets), meanings[name])
        for name in presets[0]
        if name != "name"
    ]


def option_meanings() -> dict[str, str]:
    """Option -> meaning, from the lines ``option: meaning`` of the docstring of `Constants`."""
    text = inspect.getdoc(Constants) or ""
    found = re.findall(r"^(\w+): (.*(?:\n {4}.*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()).replace("|", "/") for name, meaning in found}


def _environments() -> list[tuple[str, ...]]:
    return [
        (f"`{name}`", _first(builder), _parameters(builder))
        for name, builder in sorted(BUILDERS.items())
    ]


def _parameters(function: Callable[..., object]) -> str:
    given = inspect.signature(function).parameters.values()
    return ", ".join(
        f"`{p.name}`" if p.default is p.empty else f"`{p.name}={p.default}`" for p in given
    )


def _paragraph(documented: object, which: int) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[which].split())


def _first(documented: object) -> str:
    return _paragraph(documented, 0)


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    rule = "|" + "---|" * len(head)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(r)} |" for r in rows)])
