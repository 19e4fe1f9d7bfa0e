"""A request that a service has taken up, and not answered yet, when the test goes on."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

PATIENCE_SECONDS = 60


def taken_up(client: httpx.Client, path: str, **query: str | int) -> Future[httpx.Response]:
    """The answer that is to come, from a service on this machine, to a GET.

    The request is sent before another one connects, and a service takes connections, and what they
    say, in the order in which they come: who is answered later has seen the request taken up.
    """
    sent = threading.Event()

    def trace(event: str, _: object) -> None:
        if event == "http11.receive_response_headers.started":
            sent.set()

    thread = ThreadPoolExecutor(1)
    answer = thread.submit(client.get, path, params=query, extensions={"trace": trace})
    thread.shutdown(wait=False)
    assert sent.wait(PATIENCE_SECONDS)
    httpx.get(client.base_url, timeout=PATIENCE_SECONDS)
    return answer
