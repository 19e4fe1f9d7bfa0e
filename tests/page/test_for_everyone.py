"""The page for those who hear it, use it without a mouse, in the dark or on a phone."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.access import nameless, press_tab_through, probe
from tests.page.conftest import Open, Watch

Run = dict[str, Any]
UNNAMED = """() => {
  const main = document.getElementById("main");
  const add = (tag, text, attributes) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    main.append(made);
    return made;
  };
  add("select", "", { id: "planted-select" }).append(new Option("an option's text"));
  for (const role of ["region", "group", "img"])
    add("div", "content", { id: `planted-${role}`, role });
  add("dialog", "content", { id: "planted-dialog" });
  add("meter", "", { id: "planted-meter", value: 1 });
  add("input", "", { id: "planted-input" });
  add("button", "", { id: "planted-button" });
  add("section", "content", { id: "planted-section", "aria-labelledby": "nowhere" });
}"""


def complete(page: Page) -> None:
    """Opens all cards, and waits until everything of a finished run is drawn."""
    expect(page.locator("#speed")).to_be_attached()
    page.evaluate("for (const e of document.querySelectorAll('.card > details')) e.open = true")
    for part in ("#regret-chart canvas", ".policy-svg", "#times-table tbody tr"):
        expect(page.locator(part).first).to_be_visible()
    expect(page.locator("#batches-table tbody tr").first).to_contain_text("yes")


def drawn(page: Page, where: str) -> None:
    """Wait until what is there to see is drawn."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    if where == "list":
        for name in ("small", "by-hand"):
            expect(page.locator("table.runs tbody")).to_contain_text(name)
    if where == "run":
        complete(page)
    if where == "form":
        expect(page.get_by_role("button", name="Deploy", exact=True)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(opened: Open, small: Run, scheme: str) -> None:
    page = opened(small["id"], scheme=scheme)
    complete(page)
    ratios = probe(page, "contrast")
    assert len(ratios) > 100
    assert [one for one in ratios if one[0] < 4.5] == []


@pytest.mark.parametrize("where", ["list", "run", "form", "sign-in"])
def test_a_phone_shows_it_without_scrolling_sideways(
    opened: Open, small: Run, where: str, manual: Run
) -> None:
    page = opened({"run": small["id"], "form": manual["id"]}.get(where), width=360)
    drawn(page, where)
    if where == "sign-in":
        page.get_by_role("button", name="Forget token").click()
        expect(page.get_by_label("Operator's token")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize("where", ["list", "run", "form"])
def test_everything_has_a_name(opened: Open, small: Run, manual: Run, where: str) -> None:
    page = opened({"run": small["id"], "form": manual["id"]}.get(where))
    drawn(page, where)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    expect(page.get_by_role("main")).to_have_count(1)
    expect(page.get_by_role("banner")).to_have_count(1)
    assert probe(page, "dangling") == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("[tabindex]:not([tabindex='0']):not(main)").count() == 0
    assert nameless(page) == []


def test_elements_without_a_name_are_found(opened: Open) -> None:
    """Content is no name but where a role takes its name from it."""
    page = opened()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.evaluate(UNNAMED)
    found = [re.search(r"planted-(\w+)", one) for one in nameless(page)]
    assert [one and one[1] for one in found] == [
        *("select", "region", "group", "img", "dialog", "meter", "input", "button", "section"),
    ]


@pytest.mark.parametrize("where", ["list", "run", "form"])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_tab_key_passes_through_all_in_reading_order(
    opened: Open, small: Run, manual: Run, where: str, width: int
) -> None:
    page = opened({"run": small["id"], "form": manual["id"]}.get(where), width=width)
    drawn(page, where)
    page.reload()
    drawn(page, where)
    assert press_tab_through(page) > 5
    assert probe(page, "passed") == []
    assert probe(page, "backward") == []


def test_controls_appear_only_when_they_are_drawn(opened: Open, manual: Run) -> None:
    page = opened()
    page.add_init_script("window.requestAnimationFrame = () => 0")
    page.goto(f"{page.url.partition('#')[0]}#/runs/{manual['id']}")
    page.reload()
    expect(page.locator("#policy-of")).to_be_attached()
    expect(page.locator("#policy-of")).to_be_hidden()


@pytest.mark.parametrize(
    ("element", "style"),
    [
        ("header.top", "flex-direction: row-reverse"),
        (".cards", "direction: rtl"),
        (".files button:last-child", "order: -1"),
        ("#policy", "position: relative; top: 900px"),
    ],
)
def test_elements_out_of_reading_order_are_found(
    opened: Open, small: Run, element: str, style: str
) -> None:
    page = opened(small["id"])
    complete(page)
    page.reload()
    complete(page)
    page.locator(element).first.evaluate("(e, style) => (e.style.cssText = style)", style)
    press_tab_through(page)
    assert probe(page, "backward") != []


def test_elements_that_the_tab_key_skips_are_found(opened: Open, small: Run, manual: Run) -> None:
    page = opened()
    page.reload()
    drawn(page, "list")
    page.get_by_label("Find").evaluate("(e) => (e.tabIndex = -1)")
    press_tab_through(page)
    assert len(probe(page, "passed")) == 1


def test_the_browser_refuses_what_the_page_never_does(
    opened: Open, small: Run, watch: Watch
) -> None:
    watch.expected = ("Content Security Policy", "TrustedHTML", "TrustedScript", "asked for http")
    page = opened(small["id"])
    expect(page.locator("#run-state")).to_be_visible()
    assert probe(page, "refusals") == ["refused", "refused"]
    elsewhere = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert page.evaluate(elsewhere) == "refused"
