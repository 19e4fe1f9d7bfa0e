"""The summary and its HTML page, from samples that are made up here."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from riffle.deploy.cli.load import report_rows
from riffle.deploy.load.fleet import Tally
from riffle.deploy.load.generator import Sample
from riffle.deploy.load.html_page import card, certainty, headline, next_step, to_html
from riffle.deploy.load.summary import Summary, capacity, rates, summarize
from riffle.deploy.network.processes import Usage

PARAMETERS: dict[str, Any] = {
    "nodes": 50,
    "seconds": 4.0,
    "rate": 10.0,
    "generator_cores": [0],
    "service_cores": [1],
    "openers": 2,
    "processes": 1,
    "aggregation": "messages",
    "reports_a_batch": 300,
}


def sample(at: float) -> Sample:
    """Ten reports a second are started, five accepted; a third process grows by 2 MiB a second."""
    tally = Tally(started=int(10 * at), accepted=int(5 * at), messages=int(50 * at))
    tally.answers["lease 429"] = int(at)
    for _ in range(int(5 * at)):
        tally.due.record(5.0)
    tally.stages["upload"].record(10 * at + 1)
    use = {
        "shuffler": Usage(at, main=0.9 * at, waited=0.1 * at, rss=int((50 + 2 * at) * 2**20)),
        "coordinator": Usage(at, main=0.1 * at, pool=0.4 * at, rss=2**20),
        "generator 1": Usage(at, main=0.5 * at, pool=0.2 * at, rss=2**20),
    }
    return Sample(at, tally, use, {0: (at / 2, at), 1: (at, at), 2: (0, at)})


def summary() -> dict[str, Any]:
    return summarize(PARAMETERS, [sample(float(at)) for at in range(7)], [], 1)


def test_rates_and_use_are_those_until_the_last_arrival() -> None:
    result = summary()
    assert result["seconds"] == 4
    assert result["accepted_a_second"] == 5
    assert result["messages_a_second"] == 50
    assert result["processes"]["shuffler"]["used_or_waited_for"] == pytest.approx(1.0)
    assert result["processes"]["shuffler"]["used"] == pytest.approx(0.9)
    assert result["evidence"]["opening"] == pytest.approx(0.2)
    assert result["evidence"]["busy"] == pytest.approx(0.75)
    assert result["evidence"]["others"] == 0, "the parts used 2.1 processors of 1.5 that were busy"
    assert result["evidence"]["refused"] == 6
    assert [row["started_a_second"] for row in result["series"]] == [10] * 6


def test_a_pool_that_ended_before_the_last_sample_still_counts() -> None:
    """The last sample of a load is taken when the sealing processes have ended."""
    *samples, last = (sample(float(at)) for at in range(4))
    gone = last.use | {"generator 1": replace(last.use["generator 1"], pool=0.0)}
    found = summarize(PARAMETERS, [*samples, replace(last, use=gone)], [], 1)["processes"]
    assert found["generator 1"]["workers_used"] == pytest.approx(0.2)
    assert found["shuffler"]["used"] == pytest.approx(0.9)


def test_growth_of_memory_is_a_slope() -> None:
    result = summarize(PARAMETERS, [sample(10.0 * at) for at in range(7)], [], 1)["memory"]
    assert result["shuffler"]["growth_a_minute"] == pytest.approx(120, rel=1e-3)
    assert result["coordinator"]["growth_a_minute"] == pytest.approx(0)
    assert summary()["memory"]["shuffler"]["growth_a_minute"] is None, "less than a minute"
    few = summarize(PARAMETERS, [sample(30.0 * at) for at in range(3)], [], 1)
    assert few["memory"]["shuffler"]["growth_a_minute"] is None, "two points after settling"


def test_the_summary_has_the_verdict() -> None:
    assert summary()["verdict"]["limit"] == "shuffler"


def test_batches_that_filled_are_counted() -> None:
    states = ("issued", "open", "sealed", "counted", "rejected", "abandoned")
    batches = [{"state": state} for state in states]
    samples = [sample(float(at)) for at in range(7)]
    assert summarize(PARAMETERS, samples, batches, 1)["evidence"]["filled"] == 3
    assert summary()["evidence"]["filled"] == 0


def test_messages_that_waited_when_the_load_ended_are_a_share() -> None:
    states = {"open": 5, "sealed": 100, "counted": 250, "rejected": 50, "abandoned": 7}
    ended = [{"state": state, "messages": count} for state, count in states.items()]
    found = summarize(PARAMETERS, [sample(0.0), sample(4.0)], [], 1, ended=ended)
    assert found["opening"] == {"opened": 300, "to_open": 100}
    text = "75% of the messages of full batches during the load; 100 were still to be opened at its"
    assert card(found)["Opened"].startswith(text)


def test_the_terminal_shows_what_the_page_shows_in_its_order() -> None:
    found = capacity([summary() | {"parameters": PARAMETERS}])
    found["reports"]["rejected"] = {"late": 2}
    names = [name for name, _ in report_rows(found)]
    page = re.sub(r"<details><summary>as a table.*?</details>", "", to_html(found))
    places = [page.find(f">{name.partition(': ')[0]}") for name in names[6:]]
    assert names[:6] == ["Answer", "How sure", "Opened", "Next", "Load", "Why"]
    assert places[0] > 0
    assert places == sorted(places)
    assert "Rates tried, a second: 10" in names
    assert "Reports: accepted a second" in names
    assert "Latency, ms: from send, p99" in names


def test_the_page_loads_nothing_and_shows_the_verdict() -> None:
    result = summary() | {"interrupted": True}
    result["reports"]["rejected"] = {"<b>": 1}
    text = to_html(result)
    HTMLParser().feed(text)
    assert not re.search(r"(src|href)=|url\(|<script|@import", text)
    assert "The limit is the shuffler" in text
    labels = re.findall(r"<dt>([^<]*)<dd>", text)
    assert labels == ["Answer", "How sure", "Opened", "Next"]
    assert "<dd>No batch filled." in text
    assert "p99: too few reports, 10 a second (at least 100)" in text
    result["parameters"] = PARAMETERS | {"rate": 100.0}
    assert "p99</span>" in to_html(result)
    assert "too few" not in to_html(result)
    assert "<dd>Give it a faster processor" in text
    assert "it was interrupted" in text
    assert "&lt;b&gt;" in text
    assert text.count("<svg class=chart") == 5
    assert len(re.findall(r"points=\"[\d., ]+\"", text)) == 13 == text.count("<svg class=key")
    assert ".axis { fill: none" in text, "else every chart has a grey triangle"
    assert not re.search(r"<table></table>|<h2>[^<]*</h2>(<h2>|</body>)", text), "empty sections"
    assert "Rejected reports" not in to_html(summary())


def test_a_chart_has_ticks_up_to_its_largest_value() -> None:
    axis = re.compile(r"<text class=end x=54 y=[\d.]+>([\d.,]+)</text>")
    ticks = axis.findall(to_html(summary()).partition("Latency of")[0])
    assert ticks == ["0", "2", "4", "6", "8", "10"]
    large = summary()
    large["series"][-1]["p50 ms"] = 40_000
    assert ">10,000</text>" in to_html(large)


def test_what_other_programs_use_is_drawn_where_all_parts_run_here() -> None:
    both = {name: use for name, use in sample(4.0).use.items() if name != "generator 1"}
    now, before = (replace(sample(at), use=both) for at in (4.0, 3.0))
    before = replace(before, use={name: sample(3.0).use[name] for name in both})
    assert rates(now, before)["other programs processors"] == pytest.approx(1.5 - 0.9 - 0.5)
    assert rates(now, before, [0])["other programs processors"] == 0, "0.5 of core 0"
    elsewhere = [replace(each, use={}) for each in (now, before)]
    assert "other programs processors" not in rates(elsewhere[0], elsewhere[1])
    gone = summary()
    for row in gone["series"]:
        del row["other programs processors"]
    assert "other programs" not in to_html(gone)


def test_latency_over_time_is_that_of_each_interval() -> None:
    rows = summary()["series"]
    assert [row["p50 ms"] for row in rows] == [pytest.approx(5000, rel=0.05)] * 6
    idle = rates(replace(sample(4.0), at=5.0), sample(4.0))
    assert "p50 ms" not in idle, "no report was accepted"


def counted(started: int, filled: int = 1) -> Summary:
    evidence: Summary = summary()["evidence"]
    return evidence | {"started": started, "filled": filled}


def test_a_capacity_shows_the_least_load_that_was_not_carried() -> None:
    steps = [
        summary() | {"parameters": PARAMETERS | {"rate": rate}, "evidence": counted(18 * rate // 5)}
        for rate in (10, 20, 40, 28)
    ]
    for step in steps[:2]:
        step["verdict"] = {"limit": "none", "stage": "", "why": ""}
    found = capacity(steps)
    assert found["parameters"]["rate"] == 28
    assert found["capacity"]["carried_a_second"] == 18, (
        "the started reports, not the rate asked for"
    )
    assert list(found["capacity"]["steps"]) == ["10", "20", "28", "40"]
    limits = [step["result"] for step in found["capacity"]["steps"].values()]
    assert limits == ["carried", "carried", "not carried: shuffler", "not carried: shuffler"]
    text = to_html(found)
    assert (
        "The network carries 18 reports a second, but not 25. Then the limit is the shuffler"
        in text
    )
    assert "Rates tried" in text
    assert "<h2>Reports a second, at 28 a second (not carried)</h2>" in text
    for limit, stage in (("load generator", "lag"), ("machine", "sealing")):
        steps[3]["verdict"] = {"limit": limit.split()[-1], "stage": stage, "why": ""}
        text = to_html(capacity(steps))
        assert f"carries at least 18 reports a second. The {limit} was the limit: the" in text
    assert found["capacity"]["steps"]["28"]["accepted within 2 s, %"] <= 100
    assert capacity(steps[:2])["verdict"]["limit"] == "none"
    assert "at least 18 reports" in to_html(capacity(steps[:2]))


def test_a_capacity_says_how_often_a_rate_was_tried() -> None:
    bad, good = ({"limit": limit, "stage": "", "why": ""} for limit in ("shuffler", "none"))

    def searched(*verdicts: Summary) -> Summary:
        rates = (10, *(20 for _ in verdicts))
        return capacity(
            [
                summary() | {"parameters": PARAMETERS | {"rate": rate}, "verdict": verdict}
                for rate, verdict in zip(rates, (good, *verdicts), strict=True)
            ]
        )

    confirmed, unlucky = searched(bad, bad), searched(bad, good)
    for found, result in ((confirmed, "not carried: shuffler"), (unlucky, "carried")):
        row = found["capacity"]["steps"]["20"]
        assert (row["result"], row["tries"]) == (result, 2)
        assert "each rate was tried once (20 a second twice), for 4 s" in certainty(found)
    assert "only at the second try" not in certainty(confirmed)
    assert certainty(unlucky).startswith("not very sure")
    assert "a second was carried only at the second try" in certainty(unlucky)


def test_an_interrupted_second_try_does_not_carry_a_rate() -> None:
    steps = [summary() | {"parameters": PARAMETERS | {"rate": rate}} for rate in (10, 20, 20)]
    for step, limit in zip(steps, ("none", "shuffler", "none"), strict=True):
        step["verdict"] = {"limit": limit, "stage": "", "why": ""}
    found = capacity([*steps[:2], steps[2] | {"interrupted": True}])
    assert found["interrupted"]
    row = found["capacity"]["steps"]["20"]
    assert (row["result"], row["tries"]) == ("not carried: shuffler", 1)


def test_a_capacity_says_if_no_batch_filled() -> None:
    steps = [summary() | {"evidence": counted(60, filled=0)}]
    steps[0]["verdict"] = {"limit": "none", "stage": "", "why": ""}
    found = capacity(steps)
    assert "so the coordinator was not tried" in certainty(found)
    assert certainty(found).startswith("not very sure: ")
    del found["capacity"]
    assert "no batch filled" in certainty(found)
    found["evidence"] = found["evidence"] | {"filled": 1}
    assert certainty(found).startswith("fairly sure: ")
    found = capacity(steps)
    carried = found["capacity"]["carried_a_second"]
    assert carried == 15
    assert next_step(found).startswith(
        "repeat with --duration 40 --batch 300, so that batches fill. Then"
    )
    steps[0]["parameters"] = PARAMETERS | {"seconds": 30.0}
    assert next_step(capacity(steps)).startswith("repeat with --duration 300 "), "2 a second"
    steps[0]["evidence"]["started"] = 0
    search = next_step(steps[0])
    assert search.startswith("find the limit with riffle load --find-capacity --nodes 50 --rate 10")
    assert " --duration 60 --batch 300 --generator-cores 0 --service-cores 1 " in search
    more = {"aggregation": "sums", "processes": 2, "openers": 3, "generator_cores": [1]}
    steps[0]["parameters"] = PARAMETERS | more
    assert " --batch 300 --aggregation sums --processes 2 --workers 3 --out " in next_step(steps[0])


@pytest.mark.parametrize(("limit", "stage"), [("generator", "lag"), ("machine", "sealing")])
def test_a_load_that_the_generator_could_not_send_tells_nothing_of_the_network(
    limit: str, stage: str
) -> None:
    found = summary() | {"verdict": {"limit": limit, "stage": stage, "why": ""}}
    assert headline(found).startswith("It is not known if the network carries 15 reports a second")
    assert headline(found).endswith("was the limit: the services may carry more")


def test_a_result_says_how_sure_it_is_and_what_to_do_first() -> None:
    found = summary()
    assert certainty(found) == "fairly sure: this rate (60 reports) was tried once, for 4 s"
    assert next_step(found).startswith("give it a faster processor")
    found["evidence"]["others"] = 0.25
    assert certainty(found).endswith("; other programs used 0.25 of 2 processors")
    assert next_step(found).startswith("repeat on an idle machine. Then give it a faster")
    found["verdict"]["limit"], found["evidence"]["filled"] = "none", 1
    assert "--find-capacity --nodes 50 --rate 10 --duration 4 " in next_step(found)
    assert next_step(found).startswith("find the limit"), "it was carried in spite of them"
    assert "<code>--find-capacity</code> " in to_html(found)
    steps = [summary() | {"parameters": PARAMETERS | {"rate": rate}} for rate in (10, 20)]
    assert certainty(capacity(steps)) == "fairly sure: each rate was tried once, for 4 s"
    for share in steps[0]["reports"]["latency_from_due_ms"]:
        steps[0]["reports"]["latency_from_due_ms"][share] *= 3
    assert "the trials disagree" in certainty(capacity(steps))
    steps = [summary() | {"parameters": PARAMETERS | {"rate": rate}} for rate in (10, 20)]
    steps[1]["evidence"]["prompt"] += steps[1]["evidence"]["started"] // 5
    assert "the trials disagree" in certainty(capacity(steps)), "the higher rate did better"
    assert f"<dt>How sure<dd>N{certainty(found)[1:]}." in to_html(found)


def test_a_chart_leaves_out_a_last_interval_that_is_too_short_for_a_rate() -> None:
    ends = [0.0, 1.0, 2.0, 3.0, 3.4]
    result = summarize(PARAMETERS, [sample(at) for at in ends], [], 1)
    assert [row["at"] for row in result["series"]] == ends[1:], "summary.json has all"
    assert "<td>3.0<" in to_html(result)
    assert "<td>3.4<" not in to_html(result)


def test_the_work_of_the_shuffler_is_a_share_of_the_time_of_requests() -> None:
    samples = [sample(float(at)) for at in range(7)]
    found = summarize(PARAMETERS, samples, [], 1, answered=30.5)["evidence"]
    assert found["answering"] == pytest.approx(0.5)
    assert summary()["evidence"]["answering"] is None


@pytest.mark.parametrize(("seconds", "rows"), [(5, 5), (21, 11), (400, 20)])
def test_every_chart_has_its_numbers(seconds: int, rows: int) -> None:
    samples = [sample(float(at)) for at in range(seconds + 1)]
    text = to_html(summarize(PARAMETERS, samples, [], 1))
    tables = re.findall(r"<svg class=chart.*?<details>.*?<table>(.*?)</table></details>", text)
    assert [table.count("<tr>") - 1 for table in tables] == [rows] * 5
    reports, _, _, processors, memory = (
        [row.split("<td class=n>") for row in re.split("<tr><td>", table)] for table in tables
    )
    assert reports[-1] == [f"{seconds}.0", "10", "5", "0"]
    assert memory[-1][1] == f"{50 + 2 * seconds:,.4g}"
    assert processors[-1][1:] == ["0.9", "0.5", "0.7", "0"]
