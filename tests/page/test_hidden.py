"""A tab that nobody sees asks for nothing."""

from typing import Any

import pytest

from tests.page.conftest import Open

MINUTE = 60_000
SEEN = """(seen) => {
  Object.defineProperty(document, "hidden", { value: !seen, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.mark.parametrize("where", ["list", "run"])
def test_a_hidden_tab_asks_for_nothing_and_takes_up_again_when_seen(
    opened: Open, manual: dict[str, Any], where: str
) -> None:
    """By the page's own clock, which is set forward; what was asked before is answered first."""
    page = opened(manual["id"] if where == "run" else None)
    page.clock.install()
    page.reload()
    page.get_by_role("heading", level=1).wait_for()
    polled = f"**/v1/runs/{manual['id']}" if where == "run" else "**/v1/runs"
    with page.expect_response(polled):
        page.clock.fast_forward(MINUTE)
    page.evaluate(SEEN, False)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    for _ in range(3):
        page.wait_for_timeout(200)
        page.clock.fast_forward(MINUTE)
    assert asked == []
    followed = "**/events" if where == "run" else polled
    with page.expect_request(polled), page.expect_request(followed):
        page.evaluate(SEEN, True)


def test_a_view_that_was_left_does_not_wait_to_be_seen(opened: Open) -> None:
    page = opened(None)
    page.evaluate(SEEN, False)
    ended = """async () => {
      const { visible } = await import("/page/link.js");
      const waits = new Promise((done) => setTimeout(() => done("it waits"), 1000));
      return Promise.race([visible(AbortSignal.abort()).then(() => "it ends"), waits]);
    }"""
    assert page.evaluate(ended) == "it ends"
