"""Reference pages of what can be chosen: learners, their options, environments; of what is refused.

Every built-in learner is a factory with a docstring; the options of SDP-PE and their meaning are
the fields and the docstring of `Constants`. What has no sentence there fails here.

The reference of both services' REST surfaces, made from their own OpenAPI documents.

Reference pages made from the code. ``make docs`` writes them, a test compares them.
"""

import inspect
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from riffle.common.protocol.errors import PROBLEMS, URN
from riffle.coordinator.app import create_app as coordinator_app
from riffle.coordinator.learners.registry import BUILT_IN
from riffle.coordinator.learning.sdp_pe.presets import PRESETS, Constants
from riffle.coordinator.learning.ucbvi import Bonus
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.cli.main import COMMANDS, build
from riffle.deploy.network.secrets import SHUFFLER_ID, init_network
from riffle.experiments.per_episode import PER_EPISODE
from riffle.node_client.environments.registry import BUILDERS
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.app import create_app as shuffler_app
from riffle.shuffler.settings import Settings as ShufflerSettings

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


Json = dict[str, Any]


def rest_page() -> str:
    """Every route of both services and every document they speak, as Markdown."""
    parts = [
        "# REST",
        "Made from the code by `make docs`. Each service answers its own OpenAPI document at "
        "`/openapi.json`. Errors are `application/problem+json`; their `type` ends in a stable "
        "name.",
    ]
    for name, app in apps().items():
        document = app.openapi()
        parts += [f"## {name}", _routes(document["paths"])]
        parts += [_schema(title, schema) for title, schema in sorted(_schemas(document).items())]
    return "\n\n".join(parts) + "\n"


def apps() -> dict[str, FastAPI]:
    """Both services over a throw-away network's settings; neither is started."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
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


def _routes(paths: dict[str, dict[str, Json]]) -> str:
    rows = [
        f"| `{method.upper()} {path}` | {_asked(route)} | {_answers(route)} "
        f"| {_line(route.get('description'))} |"
        for path, methods in paths.items()
        for method, route in methods.items()
    ]
    return "\n".join(["| route | takes | answers | meaning |", "|---|---|---|---|", *rows])


def _asked(route: Json) -> str:
    named = [
        f"`{parameter['name']}`"
        for parameter in route.get("parameters", [])
        if parameter["in"] != "path"
    ]
    content: dict[str, Json] = route.get("requestBody", {}).get("content", {})
    bodies = [_kind(body.get("schema", {})) or f"`{media}`" for media, body in content.items()]
    return ", ".join(named + bodies)


def _answers(route: Json) -> str:
    told = []
    for status, answer in route["responses"].items():
        if status == "default":
            continue
        content: dict[str, Json] = answer.get("content", {})
        bodies = [_kind(body.get("schema", {})) or f"`{media}`" for media, body in content.items()]
        told.append(" ".join([status, *bodies]))
    return ", ".join(told)


def _schemas(document: Json) -> dict[str, Json]:
    """Schemas by title: the components, and those that request bodies carry inline."""
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
    fields: dict[str, Json] = schema.get("properties", {})
    rows = [
        f"| `{name}` | {_kind(field)} | {'' if name in required else 'optional'} "
        f"| {_line(field.get('description'))} |"
        for name, field in fields.items()
    ]
    text = f"### {title}\n\n{_line(schema.get('description'))}".rstrip()
    if rows:
        text += "\n\n" + "\n".join(["| field | kind | | meaning |", "|---|---|---|---|", *rows])
    return text


def _kind(schema: Json) -> str:
    """A schema's kind in a word or two."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " or ".join(_kind(choice) for choice in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'any'}"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    return str(schema.get("title" if "properties" in schema else "type", ""))


def _line(text: object) -> str:
    return " ".join(str(text or "").split()).replace("|", "/")


SETTINGS: dict[str, type[BaseSettings]] = {
    "Shuffler": ShufflerSettings,
    "Coordinator": CoordinatorSettings,
    "Nodes": NodeSettings,
}


def settings_page() -> str:
    """Every setting of every role, as Markdown."""
    parts = [
        "# Settings",
        "Made from the code by `make docs`. Every role is configured by environment variables, or "
        "by a file with lines `NAME=value` of the same names (`..._SETTINGS_FILE`), over which the "
        "environment wins. A role checks all of them before it starts; `riffle doctor` does so too "
        "and says what is wrong.",
    ]
    for role, settings in SETTINGS.items():
        prefix = settings.model_config.get("env_prefix", "")
        rows = [_row(prefix, name, field) for name, field in settings.model_fields.items()]
        parts += [
            f"## {role}",
            "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """Every command with its usage, arguments, options and defaults, as Markdown."""
    parts = ["# Commands", "Made from the code by `make docs`."]
    for name, command in commands():
        parts += [f"## {name}", " ".join((command.help or "").split()), _usage(name, command)]
        for kind, rows in (
            ("argument", _arguments(command)),
            ("option", _options_of_reference(command)),
        ):
            if rows:
                head = [f"| {kind} | default | meaning |", "|---|---|---|"]
                parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


def commands() -> list[tuple[str, TyperCommand]]:
    """Every command that can be typed, with its name."""
    roots = (get_command(build([name])) for name in sorted(COMMANDS))
    return [leaf for root in roots for leaf in _leaves(root, "riffle")]


PAGES = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "rest.md": rest_page,
    "learners.md": learners_page,
    "problems.md": problems_page,
}


def write(folder: Path) -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (folder / name).write_text(page())


def _row(prefix: str, name: str, field: FieldInfo) -> str:
    if field.is_required():
        default = "must be given"
    elif field.default_factory is not None:
        default = "number of processors" if name == "workers" else "empty"
    else:
        default = "none" if field.default is None else f"`{field.default}`"
    return f"| `{prefix}{name.upper()}` | {default} | {field.description or ''} |"


def _leaves(command: object, name: str) -> list[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        children = sorted(command.commands.items())
        return [leaf for child, sub in children for leaf in _leaves(sub, f"{name} {child}")]
    return [(name, command)] if isinstance(command, TyperCommand) else []


def _usage(name: str, command: TyperCommand) -> str:
    names = [(_name(p), p.required) for p in command.params if isinstance(p, TyperArgument)]
    words = [word if required else f"[{word}]" for word, required in names]
    return f"`{' '.join([name, '[OPTIONS]', *words])}`"


def _arguments(command: TyperCommand) -> list[str]:
    return [_line_of_reference(_name(p), p) for p in command.params if isinstance(p, TyperArgument)]


def _name(argument: TyperArgument) -> str:
    return str(argument.name).upper()


def _options_of_reference(command: TyperCommand) -> list[str]:
    found = [p for p in command.params if isinstance(p, TyperOption) and "--help" not in p.opts]
    return [_line_of_reference(" / ".join(o.opts[-1:] + o.secondary_opts[-1:]), o) for o in found]


def _line_of_reference(name: str, parameter: TyperArgument | TyperOption) -> str:
    meaning = (parameter.help or "").replace("|", "/")
    return f"| `{name}` | {_default(parameter)} | {meaning} |"


def _default(parameter: TyperArgument | TyperOption) -> str:
    value = parameter.default
    if parameter.required:
        return "must be given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ("", (), []):
        return "none"
    return f"`{getattr(value, 'value', value)}`"


if __name__ == "__main__":
    write(Path("docs"))
