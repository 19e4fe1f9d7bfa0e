"""What is installed is what the lock names, hashed, from nowhere else, under licences we accept.

Works without a network. Known vulnerabilities are looked up by whoever has one, with
`pip-audit --require-hashes -r requirements.lock`.
"""

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = "riffle-rl"
INSTALLERS = {"pip"}
ACCEPTED = {"Apache", "BSD", "MIT", "PSF", "Python", "ISC", "MPL", "0BSD", "HPND", "Unlicense"}
# psycopg is LGPL-3.0: used as it is, as a library of its own.
ACCEPTED_BY_NAME = {"psycopg": "LGPL", "psycopg-binary": "LGPL"}


def locked(file: Path) -> dict[str, tuple[str, int]]:
    """Version and number of hashes by normal name; refuses what is not pinned by name."""
    found: dict[str, tuple[str, int]] = {}
    name = ""
    for line in file.read_text().splitlines():
        if pin := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line):
            name = normal(pin[1])
            found[name] = (pin[2], 0)
        elif "--hash=sha256:" in line:
            found[name] = (found[name][0], found[name][1] + 1)
        elif line.strip() and not line.lstrip().startswith("#"):
            raise SystemExit(f"{file.name}: not a pinned name, nor a hash: {line!r}")
    return found


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(distribution: Distribution) -> str:
    """Everything that a distribution says of its licence."""
    told = distribution.metadata
    classifiers = [c for c in told.get_all("Classifier") or [] if c.startswith("License")]
    first_line = (told.get("License") or "").split("\n")[0]
    return " ".join([told.get("License-Expression") or "", first_line, *classifiers]).strip()


def faults() -> list[str]:
    """Everything that is wrong, one line each."""
    runtime, everything = (locked(ROOT / f"requirements{x}.lock") for x in ("", "-dev"))
    found = [
        f"{name}: no hash" for lock in (runtime, everything) for name in lock if not lock[name][1]
    ]
    installed = {normal(d.metadata["Name"]): d for d in distributions()}
    for name, distribution in installed.items():
        if name == OWN or name in INSTALLERS:
            continue
        if name not in everything:
            found.append(f"{name}: installed, and not in the lock")
        elif distribution.version != everything[name][0]:
            found.append(f"{name}: {distribution.version} installed, {everything[name][0]} locked")
        origin = distribution.read_text("direct_url.json")
        if origin:
            found.append(f"{name}: installed from {json.loads(origin).get('url')}")
    for name in runtime.keys() & installed.keys():
        told = licence(installed[name])
        accepted = ACCEPTED | {ACCEPTED_BY_NAME.get(name, "MIT")}
        if not any(word in told for word in accepted):
            found.append(f"{name}: licence {told or 'not stated'!r} is not on the list")
    return found


if __name__ == "__main__":
    wrong = faults()
    print("\n".join(wrong) or "every distribution is locked, hashed, and under an accepted licence")
    sys.exit(1 if wrong else 0)
