"""The page in a real browser, against live processes: every element of it, once at least."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from riffle.deploy.network.loopback import LoopbackNetwork
from riffle.deploy.operator import Operator
from tests.page.conftest import LONG, RUNS, SMALL, Open, Watch
from tests.page.seed import seeded_id

Run = dict[str, Any]
CHARTS = ("regret", "truth", "rate")
FLAT = ("value",)
"""A chart of the small run that has too few points for a picture."""


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def cells(table: Locator) -> list[list[str]]:
    return [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]


# -- who may look ---------------------------------------------------------------------------------


def test_a_wrong_token_is_said_and_the_right_one_is_kept_in_this_tab_only(
    opened: Open, network: LoopbackNetwork, watch: Watch, small: Run
) -> None:
    watch.expected = ("401",)
    page = opened(token="guessed")
    expect(page.locator("main").get_by_role("alert")).to_contain_text("refused this token")
    expect(page.get_by_label("Operator's token")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_label("Operator's token").fill(network.operator_token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    kept = page.evaluate("[...Object.values(sessionStorage), localStorage.length, document.cookie]")
    assert kept == [network.operator_token, 0, ""]
    assert network.operator_token not in page.url
    page.reload()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    page.get_by_role("button", name="Forget token").click()
    expect(page.get_by_label("Operator's token")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


# -- the list -------------------------------------------------------------------------------------


def test_runs_are_listed_found_and_opened_by_keyboard(
    opened: Open, operator: Operator, small: Run
) -> None:
    page = opened()
    rows = page.locator("table.runs tbody tr")
    known = operator.runs()
    expect(rows).to_have_count(len(known))
    expect(rows.first).to_contain_text(known[-1]["name"])
    expect(page.locator("main")).to_be_focused()
    page.reload()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Find")).to_be_focused()
    page.keyboard.type("riverswim small")
    expect(rows).to_have_count(1)
    expect(page.get_by_text(f"1 of {len(known)} runs")).to_be_visible()
    known_run = operator.run(small["id"])
    worth, radius = known_run["value_estimate"], known_run["radius"]
    settled = radius < worth
    answer, sure, step = rows.first.locator("td").all_inner_texts()[1:]
    assert answer.startswith("Learned: a policy" if settled else "A guess: a policy")
    if settled:
        how = "Quite sure" if radius < worth / 2 else "Sure of a wide range only"
        proviso = "if the shuffler neither lost nor added reports, which its page checks."
        assert sure == f"{how}: probability 95 %, {proviso}"
    bound = re.search(r"(?:within|up to) ([\d.]+) an episode", answer)
    assert bound and float(bound[1]) == pytest.approx(radius, rel=0.1)
    assert step.startswith("Open the run" if settled else "Start a new run with more episodes")
    page.keyboard.press("Tab")  # the table's frame scrolls by arrow keys
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="small")).to_be_visible()
    expect(page.locator("main")).to_be_focused()
    assert page.title() == "small \u00b7 Riffle"
    page.go_back()
    page.get_by_label("Find").fill("nothing like this")
    expect(page.get_by_text("No run matches.")).to_be_visible()


# -- a run ----------------------------------------------------------------------------------------


def test_a_run_shows_what_the_services_say(opened: Open, operator: Operator, small: Run) -> None:
    page = opened(small["id"])
    result, truth = operator.result(small["id"]), operator.true_values(small["id"])
    expect(page.locator("#figures")).to_contain_text("600 of 600 counted (100 %)")
    expect(page.locator("#speed")).to_contain_text(f"{result['messages_counted']:,} messages")
    spent = f"Spent by each user who reported: \u03b5 = {result['epsilon']:.4g}."
    expect(page.locator("#figures")).to_contain_text(spent)
    sentence = page.locator("#regret-chart-text")
    expect(sentence).to_contain_text(re.compile(r"regret \d"))
    shown = re.search(r"regret ([\d.,]+) of", sentence.inner_text())
    assert shown
    assert float(shown[1].replace(",", "")) == pytest.approx(truth["regret"][-1], rel=1e-3)
    expect(page.locator("#run-state")).to_have_text("finished")
    expect(page.locator(".about")).to_contain_text("sdp-pe \u00b7 trust model shuffle \u00b7")
    promise = f"Promised to every user: at most \u03b5 = {SMALL['epsilon']:g} "
    expect(page.locator("#figures")).to_contain_text(promise)
    expect(page.locator("#answer").get_by_role("alert")).to_be_hidden()
    expect(card(page, "Regret and true value (simulated)")).to_contain_text("read by no learner")
    expect(card(page, "Throughput")).to_contain_text("messages/s.")
    expect(card(page, "Throughput")).to_contain_text("acknowledging")


def as_shown(number: float) -> str:
    """Returns a number in three digits as the page shows it: with an exponent below 0.001."""
    if number == 0 or abs(number) >= 1e-3:
        return f"{number:.3g}"
    digits, exponent = f"{number:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def test_the_answer_leads_with_its_radius_and_the_next_step(
    opened: Open, operator: Operator, small: Run
) -> None:
    """The answer is the last stage's, not the newest batch's estimate."""
    page, last = opened(small["id"]), operator.stages(small["id"])[-1]
    best, radius = last["best_value"], last["radius"]
    card = page.locator("#answer")
    estimate, highest = best, operator.true_values(small["id"])["optimal_value"]
    settled = radius < (best := min(best, highest))
    assert card.locator("dt").all_inner_texts() == ["Answer", "How sure", "Next"]
    kind = "Learned: a policy that earns" if settled else "A guess: a policy that may earn"
    expect(card.get_by_role("heading")).to_contain_text(kind)
    grade = "Quite sure" if radius < best / 2 else "Sure of a wide range only"
    grade = grade if settled else "Not sure"
    expect(card.locator("#sure")).to_contain_text(f"{grade}: with probability 95 %")
    text = f"{card.get_by_role('heading').inner_text()} {card.locator('#sure').inner_text()}"
    if cut := settled and estimate > highest:
        assert f"between {as_shown(best - radius)} and {as_shown(best)} an episode" in text
    else:
        bound = re.search(r"over ([\d.]+) more", text)
        assert bound and float(bound[1]) == pytest.approx(radius, rel=0.1)
    shown = as_shown(best)
    worth = f"The {shown} is an estimate" if settled else f"seems to earn, {shown}."
    worth = f"The best policy earns {shown}" if cut else worth
    expect(card.locator("#sure")).to_contain_text(worth)
    step = "Use the policy" if settled else "Start a new run with more episodes"
    expect(card.locator("#next")).to_contain_text(step)
    with page.expect_download() as started:
        page.get_by_role("button", name="Download the policy").click()
    assert json.loads(started.value.path().read_text()) == last["policy"]


def test_events_during_the_drawing_of_cards_are_shown_too(
    opened: Open, operator: Operator, small: Run
) -> None:
    """On a slow page the head is drawn before the result arrives, and no event follows."""
    page, told, results = opened(), list[Route](), list[Route]()
    path, slow = f"**/v1/runs/{small['id']}", "(frame) => setTimeout(() => before(frame), 200)"
    page.evaluate(f"((before) => {{ requestAnimationFrame = {slow} }})(requestAnimationFrame)")

    def once(route: Route) -> None:
        told.append(route)
        if len(told) == 1:
            route.continue_()

    def keep(route: Route) -> None:
        results.append(route)

    page.route(path, once)
    page.route(f"{path}/conservation?*", lambda _: None)
    page.route(f"{path}/result", keep)
    page.evaluate(f"location.hash = '#/runs/{small['id']}'")
    expect(page.locator("#run-state")).to_have_text("finished")
    for route in list(results):
        route.continue_()
    counted = operator.result(small["id"])["messages_counted"]
    expect(page.locator("#speed")).to_contain_text(f"{counted:,} messages opened")


def test_stages_policy_and_batches_of_a_run(opened: Open, operator: Operator, small: Run) -> None:
    page = opened(small["id"])
    stages = operator.stages(small["id"])
    table = card(page, "Stages").locator("#stages-table")
    expect(table.locator("tbody tr")).to_have_count(len(stages))
    assert [row[3] for row in cells(table)] == [f"{one['active_after']:,}" for one in stages[::-1]]
    expect(card(page, "Stages")).to_contain_text("policies are left")
    picture = page.get_by_role("img", name="best policy")
    actions = [str(action) for row in stages[-1]["policy"] for action in row]
    expect(picture.locator("text.action")).to_have_text(actions)
    books = operator.conservation(small["id"])["batches"]
    expect(page.locator("#batches-table tbody tr")).to_have_count(len(books))
    expect(page.locator("#batches")).to_contain_text(f"{len(books)} batches checked, none out")
    rows = cells(page.locator("#batches-table"))[::-1]
    for row, book in zip(rows, books, strict=True):
        assert row[4] == f"{book['shuffler']['accepted']:,}"
        assert row[5] == f"{book['shuffler']['forwarded']:,}"
        assert row[6:8] == [f"{book['opened']:,}", "0"]
        assert row[9:] == ["plausible", "yes"]


def test_a_deployments_policy_is_shown_beside_the_one_before(
    opened: Open, operator: Operator, small: Run
) -> None:
    page = opened(small["id"])
    rows = operator.deployments(small["id"])
    likeliest = [
        row["mixture"]["policies"][row["mixture"]["weights"].index(max(row["mixture"]["weights"]))]
        for row in rows
    ]
    last = len(rows) - 1
    page.get_by_label("Policy of").select_option(f"deployment {last}")
    expect(page.locator("#policy-picture-text")).to_contain_text(f"Deployment {last}")
    pairs = [
        (new, old)
        for now, before in zip(likeliest[-1], likeliest[-2], strict=True)
        for new, old in zip(now, before, strict=True)
    ]
    changed = sum(new != old for new, old in pairs)
    sentence = page.locator("#policy-picture-text")
    expect(sentence).to_contain_text(f"{changed} of {len(pairs)} choices changed")
    expect(page.locator(".policy-svg .corner")).to_have_count(changed)
    expect(page.locator(".policy-svg .changed")).to_have_count(changed)


def test_a_stages_policy_marks_what_changed_since_the_last_stage(
    opened: Open, operator: Operator
) -> None:
    run = seeded_id(0, "long")
    page = opened(run)
    events = operator.events(run, follow=False)
    stages = [one["data"]["policy"] for one in events if one["kind"] == "stage_finished"]
    now, before = stages[-1], stages[-2]
    changed = {
        (h, x): (action, before[h][x])
        for h, row in enumerate(now)
        for x, action in enumerate(row)
        if action != before[h][x]
    }
    picture = page.locator(".policy-svg")
    expect(picture.locator(".changed")).to_have_count(len(changed))
    expect(picture.locator(".corner")).to_have_count(len(changed))
    expect(page.locator("#policy-picture-text")).to_contain_text(
        f"{len(changed)} of {len(now) * len(now[0])} choices changed since the one before"
    )
    titles = [text for text in picture.locator("title").all_text_contents() if ", was " in text]
    assert sorted(titles) == sorted(
        f"step {h}, state {x}: action {action}, was {old}"
        for (h, x), (action, old) in changed.items()
    )
    assert 0 < len(changed) < len(now) * len(now[0])
    page.get_by_label("Policy of").select_option("stage 1")
    expect(page.locator("#policy-picture-text")).to_contain_text("none before it to compare with")
    expect(picture.locator(".changed")).to_have_count(0)


def test_every_chart_has_a_sentence_and_a_table_and_is_read_by_arrow_keys(
    opened: Open, operator: Operator, small: Run
) -> None:
    """The numbers themselves are in test_charts.py."""
    page = opened(small["id"])
    for name in (*CHARTS, *FLAT):  # by name: charts appear one after another
        chart = page.locator(f"#{name}-chart")
        expect(chart.locator("canvas")).to_be_visible(visible=name in CHARTS)
        chart.get_by_text("Data table").click()
        expect(chart.locator("tbody tr").first).to_be_visible()
        figure = chart.locator(".figure")
        described = figure.get_attribute("aria-describedby")
        assert described == f"{name}-chart-text"
        assert page.locator(f"#{described}").inner_text()
    truth = operator.true_values(small["id"])
    page.locator("#regret-chart .figure").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#regret-chart output")).to_contain_text(
        f"episodes executed {truth['episodes'][0]:,.0f} "
    )
    page.keyboard.press("ArrowRight")
    expect(page.locator("#regret-chart output")).to_contain_text(
        f"episodes executed {truth['episodes'][1]:,.0f} "
    )


def test_tables_are_downloaded(
    opened: Open, operator: Operator, small: Run, tmp_path: Path
) -> None:
    page = opened(small["id"])
    buttons = page.get_by_role("group", name="Download CSV")
    for name in ("stages", "ledger", "deployments", "conservation"):
        with page.expect_download() as started:
            buttons.get_by_role("button", name=name).click()
        assert started.value.suggested_filename == f"{small['id'][:8]}-{name}.csv"
        started.value.save_as(tmp_path / "found.csv")
        rows = list(csv.DictReader(io.StringIO((tmp_path / "found.csv").read_text())))
        found: Any = getattr(operator, name)(small["id"])
        expected = found if isinstance(found, list) else found.get("entries", found.get("batches"))
        key = "L_b" if name == "stages" else "n"
        assert [row[key] for row in rows] == [str(one[key]) for one in expected]


def test_a_phone_shows_the_answer_and_folds_the_rest(opened: Open, small: Run) -> None:
    page = opened(small["id"], width=400)
    expect(page.locator("#answer")).to_be_in_viewport(ratio=0.9)
    expect(page.locator(".policy-svg")).to_be_visible()
    regret = page.locator("#regret-chart canvas")
    expect(page.locator("#truth")).to_be_visible()
    expect(regret).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollHeight") < 2000
    page.get_by_text("Regret and true value (simulated)").click()
    expect(regret).to_be_visible()
    page.get_by_text("Batches", exact=True).click()
    table = page.locator("#batches-table .scroll")
    expect(table.locator("tbody tr").first).to_be_visible()
    assert table.evaluate("(e) => e.scrollWidth - e.clientWidth") <= 0


# -- by hand --------------------------------------------------------------------------------------


def test_a_policy_is_deployed_by_hand_and_seen_counted(
    opened: Open, operator: Operator, manual: Run, watch: Watch
) -> None:
    watch.expected = ("409",)
    page = opened(manual["id"])
    form = card(page, "Deploy by hand")
    expect(card(page, "Batches")).to_contain_text("Nothing is deployed yet.")
    expect(card(page, "Stages")).to_contain_text("A run by hand has no stages.")
    expect(card(page, "Regret and true value (simulated)")).to_contain_text("No true values")
    form.get_by_label("Episodes, n").fill("501")
    form.get_by_role("button", name="Deploy").click()
    expect(form.get_by_role("status")).to_contain_text("Not deployed: 0 of 500 episodes")
    expect(page.locator("#next")).to_have_text(
        "Deploy a policy under Deploy by hand. 500 episodes are left."
    )
    expect(page.locator("#answer-title")).to_have_text("None yet")
    expect(page.locator("#sure")).to_have_text("Not known yet, because no batch is counted.")
    form.get_by_role("button", name="All 1").click()
    form.get_by_label("action at step 1 in state 2").select_option("0")
    form.get_by_label("Episodes, n").fill("120")
    page.keyboard.press("Enter")
    expect(form.get_by_role("status")).to_contain_text("Deployment 0 is issued: 120 episodes")
    row = page.locator("#batches-table tbody tr").first
    expect(row).to_contain_text("counted")  # by itself: nothing is reloaded
    expect(page.locator("#news")).to_contain_text("Batch 0 counted: 120 reports.")
    expect(row.locator("td").last).to_have_text("yes")
    expect(page.locator("#figures")).to_contain_text("120 of 500 counted")
    title = page.locator("#answer-title")
    expect(title).to_contain_text("a policy that earns about")
    expect(page.get_by_label("Policy of")).to_contain_text("deployment 0 (best so far)")
    detail = operator.deployment(manual["id"], 0)
    assert detail["mixture"]["policies"] == [[[1, 1, 1], [1, 1, 0]]]
    estimate, shown = detail["value_estimate"], re.search(r"about ([\d.]+) an", title.inner_text())
    assert shown and float(shown[1]) == pytest.approx(estimate["value"], rel=0.01)
    high = re.search(r"between [\d.]+ and ([\d.]+)\.", page.locator("#sure").inner_text())
    assert high
    assert float(high[1]) == pytest.approx(estimate["value"] + estimate["radius"], rel=0.1)
    operator.stop(manual["id"])


def test_a_run_is_stopped_after_a_question(opened: Open, operator: Operator, manual: Run) -> None:
    page = opened(manual["id"])
    stop = page.get_by_role("button", name="Stop run")
    stop.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Stop by-hand?")
    expect(dialog).to_contain_text("cannot go on")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(stop).to_be_focused()
    assert operator.run(manual["id"])["state"] == "running"
    stop.click()
    dialog.get_by_role("button", name="Stop it").click()
    expect(page.locator("#run-state")).to_have_text("stopped")
    expect(stop).to_be_hidden()
    expect(page.locator("#deploy")).to_be_hidden()
    assert operator.run(manual["id"])["state"] == "stopped"


# -- long runs ------------------------------------------------------------------------------------


def test_a_long_run_is_thinned_and_paged_and_has_an_uncounted_set(
    opened: Open, network: LoopbackNetwork
) -> None:
    page = opened(seeded_id(0, "long"))
    expect(page.locator("#value-chart-text")).to_contain_text(f"After {LONG * 1000:,} episodes")
    for plot in page.locator(".plot[data-points]").all():
        assert int(plot.get_attribute("data-points") or 0) <= 1000
    assert page.locator("tbody tr").count() <= 120
    expect(page.locator("#batches-table")).to_contain_text(f"15 of {LONG:,}")
    page.locator("#batches-table").get_by_role("button", name="Older").click()
    expect(page.locator("#batches-table tbody th").first).to_have_text(str(LONG - 16))
    expect(page.locator("#batches-table tbody tr").first).to_contain_text("not known")
    expect(page.locator("#batches")).to_contain_text("without the shuffler\u2019s record")
    doubt = page.locator("#answer").get_by_role("alert")
    expect(doubt).to_contain_text("only if the shuffler neither lost nor added reports")
    expect(doubt).to_contain_text(f"all 60 batches that were looked at (of {LONG:,})")
    expect(page.locator("#sure")).to_contain_text("In doubt, as the box says")
    expect(page.locator("#next")).to_contain_text("Ask the shuffler\u2019s operator")
    expect(card(page, "Stages")).to_contain_text("its size is not counted")
    expect(page.locator("#stages-table tbody tr").first).to_be_visible()
    assert cells(page.locator("#stages-table"))[0][3] == "not counted"


def test_like_runs_give_a_band(opened: Open) -> None:
    page = opened(seeded_id(3))
    said = card(page, "Regret and true value (simulated)")
    expect(said).to_contain_text(f"95 % Student t interval of the mean over {RUNS} runs")
    expect(said.get_by_text("mean over runs").first).to_be_visible()
    page.locator("#regret-chart").get_by_text("Data table").click()
    assert all("\u2013" not in row for row in cells(page.locator("#regret-chart-table")))


def test_suspicious_counts_are_marked(opened: Open, operator: Operator) -> None:
    """In the batch's row, and above all else of the run; a run without any shows no such line."""
    run = seeded_id(0, "doubtful")
    assert operator.result(run)["suspicious_batches"] == 1
    page = opened(run)
    expect(page.get_by_role("alert").filter(has_text="very unlikely")).to_contain_text(
        "1 batch of 3 with counts that are very unlikely from honest reports"
    )
    table = page.locator("#batches-table")
    expect(table.locator("tbody tr")).to_have_count(3)
    assert [row[9] for row in cells(table)] == [
        "SUSPICIOUS: total off by -9.75 sd",
        "\u2013",
        "plausible",
    ]
    page = opened(seeded_id(0))
    expect(page.locator("#batches-table tbody tr").first).to_be_visible()
    expect(page.get_by_text("very unlikely from honest reports")).to_be_hidden()


def test_the_list_says_that_counts_are_suspicious(opened: Open) -> None:
    """The seeded runs have no value yet, so the page is answered as if each of them had one."""

    def answer(route: Route) -> None:
        found = route.fetch().json()
        for run in found["runs"]:
            run |= {"value_estimate": 1.0, "radius": 0.1}
        route.fulfill(json=found)

    page = opened()
    page.route("**/v1/runs", answer)
    row = page.locator("table.runs tbody tr", has=page.get_by_role("link", name="doubtful"))
    expect(row).to_contain_text("In doubt: a policy within 0.1 an episode of the best")
    expect(row).to_contain_text("In doubt: 1 batch has suspicious counts.")
    expect(row).to_contain_text("its page says what to do about the suspicious counts.")
    page.unroute_all(behavior="wait")


def test_suspicious_counts_are_announced(opened: Open) -> None:
    page = opened(seeded_id(0))
    spoken = "async (event) => (await import('/page/state.js')).spoken(event)"
    for mark, counted, reason in (
        ({"suspicious": True}, ", suspicious", "its counts are suspicious"),
        ({"suspicious": False}, "", "too many dishonest reports"),
        ({}, "", "too many dishonest reports"),
    ):
        event = {"kind": "batch_counted", "data": {"index": 4, "n": 100} | mark}
        assert page.evaluate(spoken, event) == f"Batch 4 counted: 100 reports{counted}."
        event["kind"] = "batch_rejected"
        assert page.evaluate(spoken, event) == f"Batch 4 rejected: {reason}."


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_run_that_is_not_there(opened: Open, watch: Watch) -> None:
    watch.expected = ("404",)
    page = opened("0" * 32)
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def test_a_coordinator_that_is_away_is_said_and_waited_for(
    opened: Open, network: LoopbackNetwork, watch: Watch, manual: Run, operator: Operator
) -> None:
    watch.expected = ("ERR_", "Failed to fetch", "503")
    page = opened(manual["id"])
    heading = page.get_by_role("heading", level=1, name="by-hand")
    expect(heading).to_be_visible()
    network.processes["coordinator"].terminate()
    network.processes["coordinator"].wait(30)
    expect(page.locator("#alert")).to_contain_text("trying again by itself")
    expect(page.locator("#connection")).to_have_text("Not connected")
    expect(heading).to_be_visible()
    network.start("coordinator")
    network.wait_ready("coordinator")
    expect(page.locator("#alert")).to_be_empty()
    expect(page.locator("#connection")).to_have_text("Connected")
    operator.stop(manual["id"])
    expect(page.locator("#run-state")).to_have_text("stopped")
