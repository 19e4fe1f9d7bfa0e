"""What Chromium tells assistive technology of a page, and where the Tab key goes on it."""

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

PROBES = (Path(__file__).parent / "probes.js").read_text()
Node = dict[str, Any]
MOST_STOPS = 500

TAGS = {
    *("a", "button", "input", "select", "textarea", "summary", "meter", "progress"),
    *("dialog", "section", "table"),
}
ROLES = {"region", "group", "img", "log"}
"""Elements that a reader is told of, and so must be told by name."""


def probe(page: Page, name: str) -> Any:
    """What a function of probes.js finds."""
    return page.evaluate(f"({PROBES.partition(chr(10))[2].strip()}).{name}()")


def nameless(page: Page) -> list[str]:
    """Tags, roles and classes of what has no name in the accessibility tree.

    Everything hidden is shown first, for good: a closed dialog is not in the tree.
    """
    probe(page, "reveal")
    session = page.context.new_cdp_session(page)
    root = session.send("DOM.getDocument", {"depth": -1})["root"]
    tree = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    names = {
        node["backendDOMNodeId"]: node.get("name", {}).get("value", "").strip()
        for node in tree
        if not node["ignored"] and "backendDOMNodeId" in node
    }
    asked = [node for node in _elements(root) if _is_told(node)]
    assert asked, "there is nothing to have a name"
    return [_described(node) for node in asked if not names.get(node["backendNodeId"])]


def _elements(node: Node) -> list[Node]:
    inside = [one for child in node.get("children", []) for one in _elements(child)]
    return [node, *inside] if node["nodeType"] == 1 else inside


def _is_told(node: Node) -> bool:
    return node["localName"] in TAGS or _attributes(node).get("role") in ROLES


def _attributes(node: Node) -> dict[str, str]:
    flat = node.get("attributes", [])
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _described(node: Node) -> str:
    return f"{node['localName']} {json.dumps(_attributes(node))}"


def press_tab_through(page: Page) -> int:
    """Press the Tab key from the start of a page that was just loaded to its end: its stops."""
    for stops in range(MOST_STOPS):
        page.keyboard.press("Tab")
        if not probe(page, "stop"):
            return stops
    raise AssertionError(f"the Tab key found no end after {MOST_STOPS} stops")
