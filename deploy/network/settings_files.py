"""The settings of a network's roles: as a file in each role's folder, and as values.

Paths in a file start at the file's folder, so a role's folder works wherever it is copied to. A
role keeps its data beside its folder: ``shuffler-data``, ``coordinator-data``, ``nodes-data``.
"""

from pathlib import Path
from urllib.parse import urlsplit

from riffle.common.process.endpoint import check_urls, is_loopback_service, split_urls
from riffle.common.server.at_rest import replace_file
from riffle.deploy.network.certificates import LOOPBACK
from riffle.deploy.network.secrets import SHUFFLER_ID, SHUFFLER_URL_FILE, URL_FILE

SETTINGS_FILE = "settings"
SHUFFLER_URL = "https://localhost:8401"
COORDINATOR_URL = "https://localhost:8400"
EVERYWHERE = "0.0.0.0"  # noqa: S104  (off loopback a service needs TLS and a storage key)
OWNER = {
    "USERS_FILE": "users.json",
    "USERS_KEY_FILE": "users_key",
    "ENVIRONMENT": "RiverSwim-v0",
    "MAX_EPSILON": "1.0",
    "MAX_BETA": "1e-05",
    "MIN_DISHONEST_FRACTION": "0.05",
}
"""Settings for the nodes' owner to decide. The file's comment asks the owner to check them."""


def settings_of(role: str, shuffler_url: str, url: str, folder: Path) -> dict[str, str]:
    """Returns a role's settings, by name without prefix. The role's secrets are in ``folder``.

    ``role`` is ``shuffler``, ``coordinator`` or ``nodes``. ``url`` is a server's own address.
    """
    files = {
        "shuffler": ("coordinator_key", "coordinator_token_hash", "analyzer_keys"),
        "coordinator": ("shuffler_token",),
        "nodes": ("shuffler_key", "coordinator_key", "analyzer_keys"),
    }[role]
    settings = {"SHUFFLER_ID": SHUFFLER_ID}
    if role == "nodes":
        settings["STATE_DIR"] = str(folder / "../nodes-data")
        settings["CREDENTIALS_FILE"] = str(folder / "credentials.json")
    else:
        first = urlsplit(split_urls(url)[0])
        here = (first.hostname or "").replace("localhost", LOOPBACK)
        settings["HOST"] = here if is_loopback_service(url) else EVERYWHERE
        settings["PORT"] = str(first.port or 443)
        settings["DATA_DIR"] = str(folder / f"../{role}-data")
        settings["STORAGE_KEY_FILE"] = str(folder / f"../{role}-storage/key")
        files += ("signing_key", "operator_token_hash", "metrics_token_hash")
        if first.scheme == "https":
            settings["TLS_CERT_FILE"] = str(folder / "tls.pem")
            settings["TLS_KEY_FILE"] = str(folder / "tls.key")
    if role == "coordinator":
        settings["ANALYZER_KEYS_DIR"] = str(folder / "analyzer_keys")
    if role != "shuffler":
        settings["SHUFFLER_URL"] = shuffler_url
        if shuffler_url.startswith("https"):
            settings["CA_FILE"] = str(folder / "ca.pem")
    return settings | {f"{name.upper()}_FILE": str(folder / name) for name in files}


def read_addresses(
    folder: Path, shuffler_url: str | None, coordinator_url: str | None
) -> tuple[str, str]:
    """Returns both services' addresses: from the folder, the arguments or defaults, in this order.

    Raises ValueError if an address is malformed, or an argument differs from the folder's address.
    """
    addresses = []
    for option, name, given, default in (
        ("--shuffler-url", SHUFFLER_URL_FILE, shuffler_url, SHUFFLER_URL),
        ("--coordinator-url", URL_FILE, coordinator_url, COORDINATOR_URL),
    ):
        file = folder / "operator" / name
        known = file.read_text().strip() if file.exists() else None
        if given is not None and known not in (None, given):
            fix = "change it there and in the settings files, or choose another folder"
            raise ValueError(f"{option} is {given!r}, but {file} says {known!r}; {fix}")
        addresses.append(",".join(check_urls(option, known or given or default)))
    return addresses[0], addresses[1]


def write_settings(folder: Path, shuffler_url: str, coordinator_url: str) -> None:
    """Writes the address files and every role's settings file; leaves existing files alone."""
    contents = {
        f"operator/{SHUFFLER_URL_FILE}": shuffler_url,
        f"operator/{URL_FILE}": coordinator_url,
    }
    for role, prefix, url in (
        ("shuffler", "SHUFFLER", shuffler_url),
        ("coordinator", "COORDINATOR", coordinator_url),
        ("nodes", "NODE", ""),
    ):
        settings = settings_of(role, shuffler_url, url, Path())
        lines = ["# Paths start at this folder. docs/settings.md lists all settings."]
        lines += [f"RIFFLE_{prefix}_{name}={value}" for name, value in settings.items()]
        if role == "nodes":
            lines += ["# The nodes' owner decides these: what users do, and what protects them."]
            lines += [f"RIFFLE_NODE_{name}={value}" for name, value in OWNER.items()]
        contents[f"{role}/{SETTINGS_FILE}"] = "\n".join(lines) + "\n"
    for name, text in contents.items():
        if not (folder / name).exists():
            replace_file(folder / name, text.encode())
