"""Reference pages made from the code. ``make docs`` writes them, a test compares them."""

from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.cli.main import build
from riffle.deploy.reference_learners import learners_page, problems_page
from riffle.deploy.reference_rest import rest_page
from riffle.node_client.settings import Settings as NodeSettings
from riffle.shuffler.settings import Settings as ShufflerSettings

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
        for kind, rows in (("argument", _arguments(command)), ("option", _options(command))):
            if rows:
                head = [f"| {kind} | default | meaning |", "|---|---|---|"]
                parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


def commands() -> list[tuple[str, TyperCommand]]:
    """Every command that can be typed, with its name."""
    return _leaves(get_command(build([])), "riffle")


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
    return [_line(_name(p), p) for p in command.params if isinstance(p, TyperArgument)]


def _name(argument: TyperArgument) -> str:
    return str(argument.name).upper()


def _options(command: TyperCommand) -> list[str]:
    found = [p for p in command.params if isinstance(p, TyperOption) and "--help" not in p.opts]
    return [_line(" / ".join(o.opts[-1:] + o.secondary_opts[-1:]), o) for o in found]


def _line(name: str, parameter: TyperArgument | TyperOption) -> str:
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
