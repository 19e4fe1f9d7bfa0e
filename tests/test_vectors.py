"""The vectors of docs/vectors: made again they are the same, and Riffle's functions pass them."""

import json
from itertools import product

import pytest

from docs import make_vectors as vectors
from riffle.common.protocol.errors import PROBLEMS
from tests.test_protocol import PAGE, rows
from tests.vectors import CHECKS, FOLDER, read

MOST_BYTES = 420_000


@pytest.mark.parametrize("name", vectors.FILES)
def test_a_file_made_again_is_the_same(name: str) -> None:
    made = vectors.text_of(vectors.FILES[name]())
    assert made == (FOLDER / name).read_text(), "say `python -m docs.make_vectors`"


@pytest.mark.parametrize("name", CHECKS)
def test_riffle_passes(name: str) -> None:
    CHECKS[name]()


def test_the_files_are_small_and_on_the_page() -> None:
    files = {file.name for file in FOLDER.iterdir()}
    assert files == set(vectors.FILES) == set(CHECKS)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES
    assert {row[0].strip("`") for row in rows(PAGE, "16")} == files


def test_every_family_scope_trust_model_aggregation_and_support_has_a_whole_report() -> None:
    reports = {row["name"] for row in read("reports.json")["vectors"]}
    parts = product(
        ("messages", "sums", "local", "central"),
        ("joint", "lean", "paper"),
        ("all", "one"),
        ("any", "declared"),
    )
    assert {" ".join(part) for part in parts} <= reports


def test_every_check_of_the_page_has_a_refusal() -> None:
    page = {row[0]: row[2].strip("`") for row in rows(PAGE, "11")}
    tried = {(str(r["check"]), r["problem"]) for r in read("refusals.json")["vectors"]}
    large = {("1", r["problem"]) for r in read("parsing.json")["vectors"]}
    assert set(page.items()) <= tried | large
    assert {problem for _, problem in tried | large} - {None} <= set(PROBLEMS)


def test_a_third_of_the_descriptors_or_more_are_refused() -> None:
    files = ("descriptors.json", "parsing.json", "refusals.json")
    problems = [row.get("problem") for name in files for row in read(name)["vectors"]]
    assert 3 * sum(problem is not None for problem in problems) >= len(problems)


def test_names_are_unique() -> None:
    for file in FOLDER.iterdir():
        names = [
            row["name"] for row in json.loads(file.read_text()).get("vectors", ()) if "name" in row
        ]
        assert file.name == "accountant.json" or len(set(names)) == len(names), file.name
