"""``riffle conformance`` finds and names each mistake of a client."""

import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

from riffle.deploy import offers
from riffle.deploy.conformance import Limits, Recorder, serving, session, write_settings
from riffle.deploy.offers import Case
from riffle.deploy.report_check import Finding
from tests.deploy.wrong_client import WrongClient

SMALL = Case("joint", 1, support=True)
WHOLE = Case()


def findings(
    folder: Path, mistake: str, cases: Sequence[Case], bad: bool = False, only: str = ""
) -> list[Finding]:
    keys, limits = (
        offers.Keys(),
        Limits(grace=0.3, idle=1.0 if "retry" in mistake or "again" in mistake else 10.0, all=60.0),
    )
    trust, aggregations = (("shuffle", "local", "central"), ("messages", "sums"))
    if bad:
        trust, aggregations = ("shuffle",), ("messages",)
    faulty = list(offers.bad_offers(keys, cases[0], trust, aggregations)) if bad else []
    users = [secrets.token_hex(16) for _ in range(3 * 40 * len(cases))]
    recorder, over = Recorder(keys, "token", users), threading.Event()
    with serving(recorder) as url:
        settings = write_settings(folder, url, recorder, trust, aggregations)
        client = WrongClient(settings, sorted(users), mistake)

        def run() -> None:
            while not over.is_set():
                if not client.turn():
                    over.wait(0.02)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            return list(session(recorder, cases, faulty, limits))
        finally:
            over.set()
            thread.join()
