"""No peak is lost: which points of a long chart are drawn, by the browser's own code."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from riffle.deploy.network.loopback import LoopbackNetwork

POINTS, LIMIT = 2000, 1000
THINNED = "async ([lines, dots]) => (await import('/page/chart.js')).thinned(lines, dots)"
READ = """async ([series, columns]) => {
  const { chart } = await import("/page/chart.js");
  const one = chart("planted", "Planted", { x: "batch", series });
  document.getElementById("main").append(one.element);
  one.show(columns, "");
  await new Promise(requestAnimationFrame);
  const figure = one.element.querySelector(".figure");
  one.element.querySelector("output").hidden = true; // its text then costs no layout
  const told = [];
  for (let i = 0; i < Number(one.element.querySelector(".plot").dataset.points); i += 1) {
    figure.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", cancelable: true }));
    told.push(one.element.querySelector("output").textContent);
  }
  return told;
}"""
Line = list[float | None]


@pytest.fixture(scope="module")
def page(browser: Browser, network: LoopbackNetwork) -> Any:
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    found.goto(network.coordinator_url)
    yield found
    found.close()


def thinned(page: Page, lines: list[Line], dots: list[Line] | None = None) -> list[int]:
    kept: list[int] = page.evaluate(THINNED, [lines, dots or []])
    assert kept == sorted(set(kept))
    assert len(kept) <= LIMIT
    return kept


def noise(seed: int, points: int = POINTS) -> Line:
    found: Line = np.random.default_rng(seed).uniform(1, 2, points).tolist()
    return found


def sparse(points: int, every: int) -> Line:
    return [1.5 if i % every == every - 1 else None for i in range(points)]


@pytest.mark.parametrize("at", [1, 2, 777, 1000, 1003, POINTS - 2])
@pytest.mark.parametrize("peak", [9.0, -9.0])
@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_peak_of_any_line_is_kept(page: Page, at: int, peak: float, line: int) -> None:
    lines = [noise(seed) for seed in range(3)]
    lines[line][at] = peak
    kept = thinned(page, lines)
    assert at in kept
    assert kept[0] == 0
    assert kept[-1] == POINTS - 1
    assert max(b - a for a, b in pairwise(kept)) < 20


def test_all_dots_are_kept_unless_they_are_too_many(page: Page) -> None:
    dots = sparse(POINTS, 25)
    kept = set(thinned(page, [noise(1)], [dots]))
    assert kept.issuperset(i for i, value in enumerate(dots) if value is not None)
    many: Line = [1.5] * POINTS
    many[901] = 7.0
    assert 901 in thinned(page, [noise(1)], [many])


def test_an_unknown_value_does_not_count_as_zero(page: Page) -> None:
    """The least known value beside nulls is kept, though null compares as 0."""
    for at in (1000, 1001, 1002, 1003):
        line: Line = [None if i % 2 else 5.0 for i in range(POINTS)]
        line[at] = 3.0
        assert at in thinned(page, [line])
    assert thinned(page, [[None] * POINTS]) == [0, POINTS - 1]


def test_few_points_are_all_kept_and_many_are_not(page: Page) -> None:
    assert thinned(page, [noise(1, LIMIT)]) == list(range(LIMIT))
    for points in (LIMIT + 1, 1500, 100_000):
        assert len(thinned(page, [noise(1, points)])) > LIMIT / 2


def test_a_chart_draws_the_peak_of_its_last_line_and_all_its_dots(page: Page) -> None:
    names = ["p50", "p95", "p99"]
    p99, best = noise(3), sparse(POINTS, 25)
    p99[1234] = 77.0
    series: list[dict[str, Any]] = [{"name": name, "colour": "--c1"} for name in names]
    series.append({"name": "best", "colour": "--c2", "dots": True})
    columns = [list(range(POINTS)), noise(1), noise(2), p99, best]
    told = page.evaluate(READ, [series, columns])
    assert len(told) > LIMIT / 2
    assert [text for text in told if "p99 77" in text] != []
    assert sum("best 1.5" in text for text in told) == POINTS // 25
