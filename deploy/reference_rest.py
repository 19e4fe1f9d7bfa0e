"""The reference of both services' REST surfaces, made from their own OpenAPI documents."""

import tempfile
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from riffle.coordinator.app import create_app as coordinator_app
from riffle.coordinator.settings import Settings as CoordinatorSettings
from riffle.deploy.network import SHUFFLER_ID, init_network
from riffle.shuffler.app import create_app as shuffler_app
from riffle.shuffler.settings import Settings as ShufflerSettings

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
