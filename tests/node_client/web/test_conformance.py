"""The node in TypeScript passes what `riffle conformance` offers.

RIFFLE_WEB_CONFORMANCE=all offers everything, in a minute.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from riffle.deploy import offers
from riffle.deploy.conformance import Recorder, serving, session
from riffle.deploy.offers import FAULTS, Case
from riffle.deploy.owner import Owner
from tests.deploy.cli.calls import riffle

QUICK = [Case("lean", 1), Case("paper", support=True)]
QUICK += [Case(layer=1, support=True, fault=fault) for fault in FAULTS]


@pytest.mark.long
def test_the_node_makes_no_mistake(dist: Path, tmp_path: Path) -> None:
    if os.environ.get("RIFFLE_WEB_CONFORMANCE") == "all":
        command = ["conformance", "--out", str(tmp_path), "--format", "json", "--"]
        done = riffle(*command, "node", str(dist / "cli.js"))
        assert [each for each in json.loads(done.stdout)["findings"] if not each["ok"]] == []
        return
    owner = Owner()
    bad = list(offers.bad_offers(owner, [Case()]))
    recorder = Recorder(owner)
    with serving(recorder) as url:
        owner.write_settings(tmp_path, url)
        command = ["node", str(dist / "cli.js"), "--settings", str(tmp_path / "settings.json")]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as node:
            recorder.is_over = lambda: node.poll() is not None
            findings = list(session(recorder, QUICK, bad, 30.0, 120.0, 0.5))
            node.terminate()
    assert [finding for finding in findings if not finding.ok] == [], (tmp_path / "log").read_text()
    assert len(findings) == len(bad) + len(QUICK) + 1
    assert node.returncode == 0
