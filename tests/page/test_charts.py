"""Every chart's data table against the services' own answers, column by column."""

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from riffle.deploy.operator import Operator
from tests.page.conftest import Open
from tests.page.test_page import cells

Run = dict[str, Any]
Rows = list[list[float | None]]
BAND = ["mean over runs", "mean, low", "mean, high"]
HEADERS = {
    "value": [
        *("episodes counted", "private estimate", "estimate \u2212 radius", "estimate + radius"),
        *("stage's best", "true value (supplied)"),
    ],
    "regret": ["episodes executed", "regret of this run", *BAND, "ceiling, V* K"],
    "truth": ["episodes executed", "value in this run", *BAND, "optimal value V*"],
    "rate": ["batch", "messages/s"],
}


@pytest.fixture(scope="module")
def answers(operator: Operator, small: Run) -> dict[str, Rows]:
    """What the tables of the run's charts must say, by chart."""
    run = small["id"]
    truth = operator.true_values(run)
    stages = operator.stages(run)
    rows = operator.deployments(run)
    value = values(operator, run, rows, truth, stages)
    said = list(zip(truth["episodes"], truth["regret"], truth["value"], strict=True))
    none = [None] * len(BAND)
    return {
        "value": value,
        "regret": [[x, regret, *none, x * truth["optimal_value"]] for x, regret, _ in said],
        "truth": [[x, true, *none, truth["optimal_value"]] for x, _, true in said],
        "rate": rates(operator, run),
    }


def values(operator: Operator, run: str, rows: list[Run], truth: Run, stages: list[Run]) -> Rows:
    """Estimates by episodes counted, of deployments with rewards or at a stage's end."""
    exact = dict(zip(truth["deployments"], truth["value"], strict=True))
    best = {one["deployment"]: one["best_value"] for one in stages}
    found: Rows = []
    counted = 0
    for row in rows:
        index, counted = row["index"], counted + row["n"]
        known = operator.deployment(run, index)["value_estimate"]
        if known is None and index not in best:
            continue
        value = [None] * 3
        if known:
            middle, radius = known["value"], known["radius"]
            value = [middle, middle - radius, middle + radius]
        found.append([counted, *value, best.get(index), exact.get(index)])
    return found


def rates(operator: Operator, run: str) -> Rows:
    """Messages of each batch over the seconds from its issue to its count."""
    events = list(operator.events(run, follow=False))
    issued = {
        one["data"]["index"]: one["data"]["at"]
        for one in events
        if one["kind"] == "deployment_issued"
    }
    counted = [one["data"] for one in events if one["kind"] == "batch_counted"]
    return [[one["index"], one["messages"] / (one["at"] - issued[one["index"]])] for one in counted]


def numbers(table: Locator) -> Rows:
    """The numbers of a table, oldest row first."""
    return [
        [None if text == "\u2013" else float(text.replace(",", "")) for text in row]
        for row in cells(table)[::-1]
    ]


def opened_table(page: Page, name: str) -> Locator:
    chart = page.locator(f"#{name}-chart")
    chart.get_by_text("Data table").click()
    expect(chart.locator("tbody tr").first).to_be_visible()
    return page.locator(f"#{name}-chart-table")


@pytest.mark.parametrize("name", HEADERS)
def test_a_charts_table_says_what_the_services_say(
    opened: Open, small: Run, answers: dict[str, Rows], name: str
) -> None:
    page = opened(small["id"])
    table = opened_table(page, name)
    expected = answers[name]
    assert expected
    expect(table.locator("tbody tr")).to_have_count(len(expected))
    assert table.locator("thead th").all_inner_texts() == HEADERS[name]
    if name == "value":  # the true values come after the events
        expect(table.locator("tbody td").last).not_to_have_text("\u2013")
    for found, row in zip(numbers(table), expected, strict=True):
        known = [None if value is None else pytest.approx(value, rel=1e-3) for value in row]
        assert found == known


def test_no_two_columns_of_the_answers_are_alike(answers: dict[str, Rows]) -> None:
    """So columns that are exchanged, or wrong, cannot pass, but for a band that is not there."""
    for name in HEADERS:
        known = [column for column in zip(*answers[name], strict=True) if set(column) != {None}]
        assert len(set(known)) == len(known), name
