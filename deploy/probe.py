"""One GET without a token: does a service answer, and what?

Proxy variables of the environment are ignored, here and by every client of Riffle's: a request goes
where the caller pointed it, and a bearer token to nobody else.
"""

from pathlib import Path

import httpx

from riffle.common.endpoint import trusted
from riffle.common.errors import LocalError

SECONDS = 5.0


def get(url: str, ca_file: Path | None = None) -> httpx.Response:
    """The answer to GET ``url``; https is checked against ``ca_file`` or the system's authorities.

    Raises:
        httpx.HTTPError: nothing answers.
        LocalError: ``invalid-spec``, it is no address.
    """
    with httpx.Client(verify=trusted(ca_file), trust_env=False, timeout=SECONDS) as client:
        try:
            return client.get(url)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            detail = f"{url!r} is no address: it must be http://host:port or https://host:port"
            raise LocalError("invalid-spec", detail) from error
