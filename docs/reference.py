"""Makes reference pages in docs/ from the code. ``make docs`` writes them; a test compares them.

The page of learners and environments is made from docstrings, the pages of settings and commands
from the descriptions in their definitions, the page of REST from both services' OpenAPI documents,
and the page of problems from the table `PROBLEMS`.
"""

import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from riffle.common.protocol.errors import MEDIA_TYPE, PROBLEMS, URN
from riffle.common.server.service import ANY_CALLER, ANY_TOKEN
from riffle.coordinator.app import create_app as coordinator_app
from riffle.coordinator.learners.registry import BUILT_IN
from riffle.coordinator.learning import ucbvi_shuffle
from riffle.coordinator.learning.sdp_pe.constants import CONSTANTS, Constants
from riffle.coordinator.learning.ucbvi_parameters import Bonus
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.cli.main import COMMANDS, build
from riffle.deploy.network.secrets import SHUFFLER_ID, init_network
from riffle.experiments.per_episode import PER_EPISODE
from riffle.node_client.environments.registry import BUILDERS
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.app import create_app as shuffler_app
from riffle.shuffler.settings import Settings as ShufflerSettings

Json = dict[str, Any]

PROTECTION = {
    None: "nobody is protected",
    "central": "a central agent adds noise",
    "local": "users add noise",
}
SETTINGS: dict[str, type[BaseSettings]] = {
    "Shuffler": ShufflerSettings,
    "Coordinator": CoordinatorSettings,
    "Nodes": NodeSettings,
}


def _page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = " | ".join(head).replace("|  |", "| |")
    rule = "|" + "---|" * (names.count("|") + 1)
    return "\n".join([f"| {names} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split()).replace("|", "/")


def _paragraph(documented: object, which: int = 0) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[which].split())


def _learner(factory: Callable[..., object]) -> str:
    """Returns a learner's description: the docstring of its factory, or of a class in a partial."""
    documented = factory.args[0] if isinstance(factory, partial) else factory
    return _paragraph(documented).removeprefix("Makes ")


# ---- learners, environments, problems --------------------------------------------------------


def learners_page() -> str:
    """Returns learners with their options, and environments with their parameters, as Markdown."""
    shuffled = asdict(ucbvi_shuffle.Options())
    bonus = {name: value for name, value in asdict(Bonus()).items() if name != "name"}
    return _page(
        "# Learners and environments",
        "Made from the code by `make docs`. [Your own parts](own.md) says how to bring others.",
        "## Learners",
        "On the services and in the simulator, `--learner NAME`:",
        _table(
            ("learner", "is"),
            ((f"`{name}`", _learner(factory)) for name, factory in sorted(BUILT_IN.items())),
        ),
        "In the simulator only, because they plan before every episode:",
        _table(("learner", "trust"), ((f"`{n}`", PROTECTION[t]) for n, t in PER_EPISODE.items())),
        "Also in the simulator only, `uc-o-reps` and `uob-lbps` of `004` learn from losses that an "
        "adversary fixes beforehand ([figures](figures.md)). Their environment is `LayeredMDP-v0`, "
        "drawn anew for each seed, or any environment with a known MDP. `simulate` unrolls that "
        "MDP in time: the same state at two steps becomes two states. With such an MDP the mean of "
        "a loss is one minus the reward, unless `--option adversary` names an adversary. Other "
        "options: `privacy`, `scale` (of the confidence set), `eta` (the learning rate), and, for "
        "`uob-lbps`, `estimator` (`correct` or `paper`: [corrections](corrections.md)).",
        "For every learner that works in batches, `--option support=false` and `--option "
        "homogeneous=false` ignore what the environment declares "
        "([privacy](privacy.md#the-mechanism)). `--option homogeneous=true` declares that all "
        "steps of the environment are alike.",
        "## Options of SDP-PE",
        "`--option NAME=VALUE` replaces one constant of the set that `--constants` names. All "
        "variants of SDP-PE have these options; the [ablation](ablation.md) measures them. "
        "Letters, lines and equations are those of `000`; modules such as `evidence` are below "
        "`coordinator/learning/`. A stage of `000` has two parts. Its crude batches explore to "
        "give a first, crude model. Its fine batch explores with the help of this model.",
        _table(("option", *(f"`{name}`" for name in CONSTANTS), "meaning"), _sdp_pe_options()),
        "## Options of batched UCBVI",
        "The learner `ucbvi-shuffle` has these options, which "
        "`coordinator/learning/ucbvi_shuffle.py` explains:",
        _table(("option", "default"), ((f"`{n}`", f"`{v}`") for n, v in shuffled.items())),
        "## Options of UCBVI",
        "The learners are `ucbvi`, `ucbvi-jdp` and `ucbvi-ldp`. " + _paragraph(Bonus, 1),
        _table(("option", "default"), ((f"`{n}`", f"`{v}`") for n, v in bonus.items())),
        "## Environments",
        "`--env ID`, `--param NAME=VALUE`. X, A and H follow from the parameters.",
        _table(
            ("environment", "is", "parameters"),
            ((f"`{n}`", _paragraph(b), _parameters(b)) for n, b in sorted(BUILDERS.items())),
        ),
    )


def _sdp_pe_options() -> Iterator[tuple[str, ...]]:
    sets = [asdict(each) for each in CONSTANTS.values()]
    meanings = option_meanings()
    for name in sets[0]:
        if name != "name":
            values = (each[name] for each in sets)
            shown = (f"`{round(v, 4) if isinstance(v, float) else v}`" for v in values)
            yield (f"`{name}`", *shown, meanings[name])


def option_meanings() -> dict[str, str]:
    """Returns option -> meaning, from lines ``option: meaning`` in `Constants`' docstring."""
    text = inspect.getdoc(Constants) or ""
    lines = re.findall(r"^(\w+): (.*(?:\n {4}.*)*)", text, re.MULTILINE)
    return {name: _one_line(meaning) for name, meaning in lines}


def _parameters(function: Callable[..., object]) -> str:
    return ", ".join(
        f"`{p.name}`" if p.default is p.empty else f"`{p.name}={p.default}`"
        for p in inspect.signature(function).parameters.values()
    )


def problems_page() -> str:
    """Returns every problem type as Markdown."""
    problems = sorted(PROBLEMS.items())
    return _page(
        "# Problems",
        "Made from the code by `make docs`. A refusal is an `application/problem+json` document "
        f"(RFC 9457) whose `type` is `{URN}` followed by one of these names; `detail` says what "
        "was wrong, which value, and what to do.",
        _table(
            ("name", "status", "title"),
            ((f"`{slug}`", str(int(status)), title) for slug, (status, title) in problems),
        ),
    )


# ---- REST ------------------------------------------------------------------------------------


def rest_page() -> str:
    """Returns every route of both services, and every document they exchange, as Markdown."""
    parts = [
        "# REST",
        "Made from the code by `make docs`. Each service answers its own OpenAPI document at "
        "`/openapi.json`. Errors are `application/problem+json`; their `type` ends in a stable "
        "name. Every route may also answer "
        + ", ".join(f"`{slug}`" for slug in ANY_CALLER)
        + ". Every route that takes a token may also answer `unauthorized` and `unavailable`.",
    ]
    for name, app in apps().items():
        document = app.openapi()
        rows = (
            (
                f"`{method.upper()} {path}`",
                _inputs(route),
                _answers(route),
                " or ".join(name for each in route.get("security", []) for name in each),
                " ".join(f"`{slug}`" for slug in _own_problems(route)),
                _one_line(route.get("description")),
            )
            for path, methods in document["paths"].items()
            for method, route in methods.items()
        )
        parts += [
            f"## {name}",
            _table(("route", "takes", "answers", "token of", "problems", "meaning"), rows),
        ]
        parts += [_schema(title, schema) for title, schema in sorted(_schemas(document).items())]
    return _page(*parts)


def problems_of(route: Json) -> list[str]:
    """Returns the slugs of a route's problems, from the route's OpenAPI description."""
    schema = route["responses"]["default"]["content"][MEDIA_TYPE]["schema"]
    return [each.removeprefix(URN) for each in schema["properties"]["type"]["enum"]]


def _own_problems(route: Json) -> list[str]:
    always = ANY_TOKEN if "security" in route else ANY_CALLER
    return [slug for slug in problems_of(route) if slug not in always]


def apps() -> dict[str, FastAPI]:
    """Returns both services, not started, with the settings of a temporary network."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        init_network(folder)
        coordinator, shuffler = folder / "coordinator", folder / "shuffler"
        return {
            "Coordinator": coordinator_app(
                CoordinatorSettings(
                    data_dir=coordinator,
                    storage_key_file=folder / "coordinator-storage" / "key",
                    signing_key_file=coordinator / "signing_key",
                    analyzer_keys_dir=coordinator / "analyzer_keys",
                    shuffler_url="http://127.0.0.1:8401",
                    shuffler_id=SHUFFLER_ID,
                    shuffler_token_file=coordinator / "shuffler_token",
                    operator_token_hash_file=coordinator / "operator_token_hash",
                )
            ),
            "Shuffler": shuffler_app(
                ShufflerSettings(
                    data_dir=shuffler,
                    shuffler_id=SHUFFLER_ID,
                    storage_key_file=folder / "shuffler-storage" / "key",
                    signing_key_file=shuffler / "signing_key",
                    coordinator_key_file=shuffler / "coordinator_key",
                    coordinator_token_hash_file=shuffler / "coordinator_token_hash",
                    operator_token_hash_file=shuffler / "operator_token_hash",
                )
            ),
        }


def _inputs(route: Json) -> str:
    parameters = [p for p in route.get("parameters", []) if p["in"] != "path"]
    return ", ".join([f"`{p['name']}`" for p in parameters] + _bodies(route.get("requestBody", {})))


def _answers(route: Json) -> str:
    return ", ".join(
        " ".join([status, *_bodies(answer)])
        for status, answer in route["responses"].items()
        if status != "default"
    )


def _bodies(message: Json) -> list[str]:
    content: dict[str, Json] = message.get("content", {})
    return [_kind(body.get("schema", {})) or f"`{media}`" for media, body in content.items()]


def _schemas(document: Json) -> dict[str, Json]:
    """Returns schemas by title: those of components, and those inside of request bodies."""
    schemas: dict[str, Json] = dict(document.get("components", {}).get("schemas", {}))
    for methods in document["paths"].values():
        for route in methods.values():
            for body in route.get("requestBody", {}).get("content", {}).values():
                inline = body.get("schema", {})
                if "properties" in inline:
                    schemas |= {inline["title"]: inline, **inline.get("$defs", {})}
    return {title: schema for title, schema in schemas.items() if "properties" in schema}


def _schema(title: str, schema: Json) -> str:
    required = set(schema.get("required", []))
    rows = (
        (
            f"`{name}`",
            _kind(field),
            "" if name in required else "optional",
            _one_line(field.get("description")),
        )
        for name, field in schema["properties"].items()
    )
    text = f"### {title}\n\n{_one_line(schema.get('description'))}".rstrip()
    return f"{text}\n\n{_table(('field', 'kind', '', 'meaning'), rows)}"


def _kind(schema: Json) -> str:
    """Returns a schema's kind in a word or two."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " or ".join(_kind(choice) for choice in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'any'}"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    return str(schema.get("title" if "properties" in schema else "type", ""))


# ---- settings and commands -------------------------------------------------------------------


def settings_page() -> str:
    """Returns every setting of every role as Markdown."""
    parts = [
        "# Settings",
        "Made from the code by `make docs`. Every role is configured by environment variables, or "
        "by a file with lines `NAME=value` of the same names (`..._SETTINGS_FILE`). The "
        "environment wins over the file. A role checks all settings before it starts; `riffle "
        "doctor` does so too and says what is wrong.",
    ]
    for role, settings in SETTINGS.items():
        prefix = settings.model_config.get("env_prefix", "")
        rows = (
            (f"`{prefix}{name.upper()}`", _setting_default(name, field), field.description or "")
            for name, field in settings.model_fields.items()
        )
        parts += [f"## {role}", _table(("variable", "default", "meaning"), rows)]
    return _page(*parts)


def _setting_default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    if field.default_factory is not None:
        return "number of processors" if name == "workers" else "empty"
    return "none" if field.default is None else f"`{field.default}`"


def commands_page() -> str:
    """Returns every command with its usage, arguments, options and defaults, as Markdown."""
    parts = ["# Commands", "Made from the code by `make docs`."]
    for name, command in commands():
        arguments = [p for p in command.params if isinstance(p, TyperArgument)]
        options = [p for p in command.params if isinstance(p, TyperOption) and p.name != "help"]
        words = {str(p.name).upper(): p for p in arguments}
        usage = [word if p.required else f"[{word}]" for word, p in words.items()]
        parts += [f"## {name}", " ".join((command.help or "").split())]
        parts += [f"`{' '.join([name, '[OPTIONS]', *usage])}`"]
        names = [" / ".join(o.opts[-1:] + o.secondary_opts[-1:]) for o in options]
        for kind, rows in (
            ("argument", [_parameter_row(word, p) for word, p in words.items()]),
            ("option", [_parameter_row(*pair) for pair in zip(names, options, strict=True)]),
        ):
            parts += [_table((kind, "default", "meaning"), rows)] if rows else []
    return _page(*parts)


def commands() -> list[tuple[str, TyperCommand]]:
    """Returns every command that can be typed, as pairs of name and command."""
    roots = (get_command(build([name])) for name in sorted(COMMANDS))
    return [leaf for root in roots for leaf in _leaves(root, "riffle")]


def _leaves(command: object, name: str) -> list[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        children = sorted(command.commands.items())
        return [leaf for child, sub in children for leaf in _leaves(sub, f"{name} {child}")]
    return [(name, command)] if isinstance(command, TyperCommand) else []


def _parameter_row(name: str, parameter: TyperArgument | TyperOption) -> tuple[str, str, str]:
    return f"`{name}`", _default(parameter), (parameter.help or "").replace("|", "/")


def _default(parameter: TyperArgument | TyperOption) -> str:
    value = parameter.default
    if parameter.required:
        return "must be given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ("", (), []):
        return "none"
    return f"`{getattr(value, 'value', value)}`"


PAGES = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "rest.md": rest_page,
    "learners.md": learners_page,
    "problems.md": problems_page,
}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (Path("docs") / file).write_text(page())
