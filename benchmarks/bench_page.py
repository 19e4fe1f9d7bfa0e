"""Measures the operator's page under load: 50 runs of 2,000 deployments, 100,000 points in all.

    python -m benchmarks.bench_page

A coordinator serves a store of that size to a real Chromium with a cold profile that is signed in.
The benchmark watches the list of runs, and a run with a band over all 50, from before the
navigation until all is drawn. Then it watches that run grow by 20 deployments a second while the
reader scrolls. It prints the times of the first contentful paint and of the contents, the distance
between frames, and the tasks of the page's main thread above 50 ms. Other work of the machine
delays the page, so it also prints the CPU time of the longest tasks, with their longest steps.
"""

import json
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect, sync_playwright
from sqlalchemy import delete, insert, update

from riffle.coordinator.app import create_app, prepare_directory
from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.store import schema
from tests.coordinator.world import TOKEN, FakeShuffler, analyzer, registry, settings
from tests.page.conftest import ARGUMENTS
from tests.page.seed import SPEC, Seeded, descriptor, seed, seeded_id

N, RATE = 1000, 20
BAR_PAINT, BAR_FRAME = 1000, 50
"""Milliseconds."""
PATIENCE = 60_000
SIGNED_IN = f"sessionStorage.setItem('riffle-operator-token', '{TOKEN}');"
WATCH = """
const seen = (window.seen = { frames: [], marks: {}, tasks: [] });
const wanted = {
  "list of runs": "table.runs tbody tr:last-child progress",
  "head of the run": "#figures p:not(:empty)",
  "value chart": "#value-chart canvas",
};
let last = null;
requestAnimationFrame(function tick(now) {
  if (last !== null) seen.frames.push(now - last);
  last = now;
  for (const [name, at] of Object.entries(seen.marks)) if (at < 0) seen.marks[name] = now;
  for (const [name, selector] of Object.entries(wanted))
    if (!(name in seen.marks) && document.querySelector(selector)) seen.marks[name] = -1;
  requestAnimationFrame(tick);
});
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) seen.tasks.push(entry.duration);
}).observe({ type: "longtask", buffered: true });
"""
"""Records, from before a navigation on, the distances of frames, the first frame that shows each
content, and tasks of more than 50 ms; all in milliseconds."""
SCROLL = """(seconds) => new Promise((done) => {
  const end = performance.now() + 1000 * seconds;
  requestAnimationFrame(function tick(now) {
    const range = document.body.scrollHeight - innerHeight;
    window.scrollTo(0, range * (0.5 + 0.5 * Math.sin(now / 500)));
    if (now < end) requestAnimationFrame(tick);
    else done();
  });
})"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
FIRST = ("list of runs", "head of the run")
SHOWN = 3
TASK = "ThreadControllerImpl::RunTask"


@contextmanager
def coordinator(folder: Path) -> Iterator[tuple[str, FastAPI]]:
    """Runs a coordinator in a thread of this process; yields its address and its app."""
    app = create_app(
        settings(folder),
        shuffler=FakeShuffler(),
        registry=registry(),
        analyzer=analyzer(),
        clock=time.time,
    )
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
        finally:
            app.state.coordinator.signals.close()
            server.should_exit = True
            thread.join()


def grow(url: str, app: FastAPI, run: Seeded, stop: threading.Event) -> None:
    """Adds deployments to a run, and signals each change as the driver does."""
    engine = schema.open_store(url)
    index, event = run.deployments, 10 * run.deployments
    while not stop.wait(1 / RATE):
        with engine.begin() as connection:
            for table, rows in run.grown(range(index, index + 1), event):
                connection.execute(insert(table), rows)
        index, event = index + 1, event + 10
        app.state.coordinator.signals.fire(run.id)
    engine.dispose()


def reopen(url: str, run_id: str) -> None:
    """Makes a finished run one that goes on."""
    engine = schema.open_store(url)
    events = schema.events.c
    with engine.begin() as connection:
        running = {"state": "running", "ended_at": None}
        connection.execute(update(schema.runs).where(schema.runs.c.id == run_id).values(running))
        over = (events.run_id == run_id) & (events.kind == "run_finished")
        connection.execute(delete(schema.events).where(over))
    engine.dispose()


@dataclass(frozen=True)
class Look:
    """Measurements of the page in milliseconds: paints since the navigation began; frames; tasks of
    the page's main thread by their CPU time, the longest first, with their longest steps."""

    paint: float
    marks: dict[str, float]
    frames: FloatArray
    long_tasks: list[float]
    cpu: list[tuple[float, str]]

    @property
    def is_met(self) -> bool:
        """Returns whether contents and frames came in time. Frames last multiples of 1/60 s."""
        shown = max(self.paint, *(self.marks[name] for name in FIRST if name in self.marks), 0)
        return shown < BAR_PAINT and self.frames.max().round() <= BAR_FRAME

    def report(self, name: str) -> None:
        """Prints the measurements under a name."""
        marks = "".join(f", {mark} {at:.0f}" for mark, at in self.marks.items())
        p50, p99 = np.percentile(self.frames, [50, 99])
        late = int((self.frames.round() > BAR_FRAME).sum())
        print(
            f"{name}: first contentful paint {self.paint:.0f}{marks} ms\n"
            f"  {len(self.frames)} frames: p50 {p50:.0f}, p99 {p99:.0f}, longest "
            f"{self.frames.max():.0f} ms; {late} above {BAR_FRAME} ms; "
            f"{len(self.long_tasks)} tasks above {BAR_FRAME} ms"
        )
        for spent, inside in self.cpu[:SHOWN]:
            print(f"  CPU of a task: {spent:.0f} ms ({inside})")


def look(
    browser: Browser,
    address: str,
    act: Callable[[Page], None],
    prepare: Callable[[Page], None] | None = None,
) -> Look:
    """Opens an address in a cold profile that is signed in. Measures from before the navigation, or
    from the end of ``prepare``."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.add_init_script(SIGNED_IN + WATCH)
    if prepare:
        page.goto(address)
        prepare(page)
        page.evaluate("Object.assign(window.seen, { frames: [], tasks: [] })")
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
    if not prepare:
        page.goto(address)
    act(page)
    seen, paint = page.evaluate("window.seen"), page.evaluate(PAINT)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    context.close()
    return Look(
        paint, seen["marks"], np.array(seen["frames"]), seen["tasks"], cpu_times(events, address)
    )


def cpu_times(events: list[dict[str, Any]], address: str) -> list[tuple[float, str]]:
    """Returns CPU milliseconds and longest steps of the page's tasks, the longest task first.

    The page's main thread is the busiest one in a process that asks ``address``, if there is any.
    """
    threads = {
        (one["pid"], one["tid"])
        for one in events
        if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    timed = [one for one in events if one.get("ph") == "X" and "tdur" in one]
    timed = [one for one in timed if (one["pid"], one["tid"]) in threads]
    asking = {
        one["pid"]
        for one in events
        if one["name"] == "ResourceSendRequest" and one["args"]["data"]["url"].startswith(address)
    }
    busiest = Counter[int]()
    for one in timed:
        if one["pid"] in asking or not asking:
            busiest[one["pid"]] += one["tdur"] * (one["name"] == TASK)
    page = busiest.most_common(1)[0][0]
    tasks = sorted(
        (one for one in timed if one["pid"] == page and one["name"] == TASK),
        key=lambda one: -float(one["tdur"]),
    )[:SHOWN]
    return [(one["tdur"] / 1000, steps(one, timed)) for one in tasks]


def steps(task: dict[str, Any], timed: list[dict[str, Any]]) -> str:
    """Returns the longest steps of a task, by name."""
    end = task["ts"] + task["dur"]
    inside = [
        one
        for one in timed
        if one["pid"] == task["pid"] and task["ts"] <= one["ts"] < end and one is not task
    ]
    longest = sorted(inside, key=lambda one: -float(one["tdur"]))[:SHOWN]
    return ", ".join(f"{one['name']} {one['tdur'] / 1000:.0f}" for one in longest)


@dataclass(frozen=True)
class Load:
    """The amount of content; the seconds for which the run grows; the seconds for which a page is
    watched once it is complete."""

    runs: int = 50
    deployments: int = 2000
    growing: float = 8.0
    after: float = 4.0

    def listed(self, page: Page) -> None:
        """Waits until all runs are listed, and for the page's next request after that."""
        expect(page.locator("table.runs tbody tr")).to_have_count(self.runs, timeout=PATIENCE)
        page.wait_for_timeout(1000 * self.after)

    def complete(self, page: Page) -> None:
        """Waits until all of the run is drawn, and for the page's next request after that."""
        counted = f"After {self.deployments * N:,}"
        expect(page.locator("#value-chart-text")).to_contain_text(counted, timeout=PATIENCE)
        expect(page.locator("#truth")).to_contain_text(f"over {self.runs} runs", timeout=PATIENCE)
        page.wait_for_timeout(1000 * self.after)


def measure(browser: Browser, load: Load, folder: Path) -> dict[str, Look]:
    """Fills a store, serves it, and returns the measurements of each page by name."""
    prepare_directory(folder)
    url = f"sqlite:///{folder / 'coordinator.sqlite'}"
    seed(url, load.runs, load.deployments, N)
    run = seeded_id(0)
    reopen(url, run)
    spec = RunSpec.model_validate({**SPEC, "name": "nightly", "episodes": N * load.deployments})
    one = Seeded(spec, 0, load.deployments, N, descriptor(spec, N), enumerated=True)
    with coordinator(folder) as (address, app):

        def live(page: Page) -> None:
            stop = threading.Event()
            thread = threading.Thread(target=grow, args=(url, app, one, stop))
            thread.start()
            try:
                page.evaluate(SCROLL, load.growing)
            finally:
                stop.set()
                thread.join()

        view = f"{address}/#/runs/{run}"
        return {
            f"list of {load.runs} runs": look(browser, address, load.listed),
            f"run of {load.deployments:,} deployments": look(browser, view, load.complete),
            f"that run, growing by {RATE} deployments a second, scrolled": look(
                browser, view, live, load.complete
            ),
        }


def main() -> None:
    """Prints the measurements of the whole load, and whether the bars are met."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        looks = measure(browser, Load(), Path(folder) / "store")
        browser.close()
    for name, found in looks.items():
        found.report(name)
    if not all(found.is_met for found in looks.values()):
        missed = f"contents within {BAR_PAINT} ms, every frame within {BAR_FRAME} ms"
        raise SystemExit(f"a bar is missed: {missed}")


if __name__ == "__main__":
    main()
