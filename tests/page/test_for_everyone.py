"""The page for those who hear it, use it without a mouse, in the dark or on a phone."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import Open, Watch

PROBES = (Path(__file__).parent / "probes.js").read_text()
Run = dict[str, Any]


def probe(page: Page, name: str) -> Any:
    return page.evaluate(f"({PROBES.partition(chr(10))[2].strip()}).{name}()")


def complete(page: Page) -> None:
    """Wait until everything of a finished run is drawn."""
    for part in ("#regret-chart canvas", ".policy-svg", "#times-table tbody tr"):
        expect(page.locator(part).first).to_be_visible()
    expect(page.locator("#batches-table tbody tr").first).to_contain_text("yes")


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
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    if where == "run":
        complete(page)
    if where == "sign-in":
        page.get_by_role("button", name="Forget token").click()
        expect(page.get_by_label("Operator's token")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize("where", ["list", "run", "form"])
def test_everything_has_a_name(opened: Open, small: Run, manual: Run, where: str) -> None:
    page = opened({"run": small["id"], "form": manual["id"]}.get(where))
    if where == "run":
        complete(page)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    expect(page.get_by_role("main")).to_have_count(1)
    expect(page.get_by_role("banner")).to_have_count(1)
    assert probe(page, "nameless") == []
    assert probe(page, "dangling") == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("[tabindex]:not([tabindex='0']):not(main)").count() == 0


def test_the_tab_key_passes_through_a_run(opened: Open, small: Run) -> None:
    """In reading order, and the focus is always on something that is seen."""
    page = opened(small["id"])
    complete(page)
    page.locator("main").focus()
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        at = page.evaluate(
            "[document.activeElement.checkVisibility(), document.activeElement.textContent,"
            " document.activeElement.getBoundingClientRect().top + scrollY]"
        )
        assert at[0]
        seen.append(at)
    texts = [text for _, text, _ in seen]
    assert texts.index("All runs") < texts.index("stages") < texts.index("conservation")
    assert any("Data table" in text for text in texts)


def test_the_browser_refuses_what_the_page_never_does(
    opened: Open, small: Run, watch: Watch
) -> None:
    watch.expected = ("Content Security Policy", "TrustedHTML", "TrustedScript", "asked for http")
    page = opened(small["id"])
    expect(page.locator("#run-state")).to_be_visible()
    assert probe(page, "refusals") == ["refused", "refused"]
    elsewhere = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert page.evaluate(elsewhere) == "refused"
