"""The page's files and headers, and its downloads. How it looks and works: `tests.page`."""

import csv
import io
import re

import pytest

from riffle.coordinator.api.operations import FOLDER, HEADERS, TYPES, _files
from riffle.coordinator.store.transactions import Store
from tests.coordinator.calls import Api, problem
from tests.coordinator.world import RUN


def test_the_page_is_confined(api: Api) -> None:
    answer = api.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert answer.headers["X-Content-Type-Options"] == "nosniff", "no other file is a script"
    policy = dict(
        part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; ")
    )
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert {"base-uri", "form-action", "frame-ancestors"} <= policy.keys(), "have no default"
    assert set(policy.values()) == {"'none'", "'self'"}, "talks to others than the coordinator"


def test_every_file_is_served_and_nothing_else(api: Api) -> None:
    for name, path in _files().items():
        answer = api.client.get(f"/page/{name}")
        assert answer.content == path.read_bytes()
        known = api.client.get(f"/page/{name}", headers={"If-None-Match": answer.headers["ETag"]})
        for each in (answer, known):
            assert {header: each.headers[header] for header in HEADERS} == HEADERS, name
    unserved = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in TYPES]
    assert not unserved
    for name in ("../pages.py", "%2e%2e/pages.py", "nothing.js", "", "vendor"):
        assert problem(api.client.get(f"/page/{name}"))[:2] == (404, "not-found")


def test_a_known_file_is_not_sent_again(api: Api) -> None:
    tag = api.client.get("/").headers["ETag"]
    again = api.client.get("/", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_the_document_holds_nothing_inline_and_nothing_from_elsewhere() -> None:
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?:", text)
    assert all(
        tag.endswith("></script>") for tag in re.findall(r"<script[^>]*>[^<]*</script>", text)
    )


def test_the_document_names_every_module_so_that_none_is_found_late() -> None:
    text = (FOLDER / "index.html").read_text()
    named = re.findall(r'<link rel="modulepreload" href="/page/([^"]+)">', text)
    modules = {name for name in _files() if name.endswith(".js")}
    assert sorted([*named, "main.js"]) == sorted(modules)


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("stages", 1, {"stage", "active_after", "radius"}),
        ("ledger", 2, {"epsilon_upper", "beta", "opened", "failed"}),
        ("deployments", 2, {"index", "n", "state", "timings_opening"}),
        ("conservation", 2, {"n", "opened", "shuffler_messages_forwarded", "balanced"}),
    ],
)
def test_rows_are_downloaded_as_csv(api: Api, name: str, rows: int, columns: set[str]) -> None:
    api.finish()
    answer = api.call("GET", f"/{RUN}/{name}.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == f'attachment; filename="{RUN[:8]}-{name}.csv"'
    result = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(result) == rows
    assert columns <= set(result[0])
    assert not any(text.startswith(("[", "{")) for row in result for text in row.values())
    assert problem(api.client.get(f"/v1/runs/{RUN}/{name}.csv"))[:2] == (401, "unauthorized")
    assert problem(api.call("GET", f"/{'0' * 32}/{name}.csv"))[:2] == (404, "unknown-run")


def test_a_batch_counted_between_two_reads_waits_for_the_next_answer(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.finish()
    whole = Store.deployments
    monkeypatch.setattr(Store, "deployments", lambda store, run: whole(store, run)[:1])
    assert len(api.get(f"/{RUN}/ledger")["entries"]) == 1
    assert api.get(f"/{RUN}/result")["reports"] == 20
