"""The node in TypeScript, as `make web` built it.

Without Node.js, or before it is built, these tests are skipped, unless RIFFLE_REQUIRE_NODE is set.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.page.conftest import browser as browser  # noqa: PLC0414  (a fixture)

WEB = Path(__file__).parents[3] / "node_client" / "web"


@pytest.fixture(scope="package")
def dist() -> Path:
    """The folder of what was built."""
    folder = WEB / "dist"
    if shutil.which("node") is None or not (folder / "cli.js").exists():
        fault = "needs Node.js, and `make web`"
        assert not os.environ.get("RIFFLE_REQUIRE_NODE"), fault
        pytest.skip(fault)
    return folder
