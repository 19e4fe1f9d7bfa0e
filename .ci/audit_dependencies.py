"""Checks that installed distributions are locked, hashed, and under accepted licences.

This script needs no network. To look up known vulnerabilities, which needs a network,
use `pip-audit --require-hashes -r requirements.lock`.
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
# psycopg is LGPL-3.0, and is used unchanged as a separate library.
ACCEPTED_BY_NAME = {"psycopg": "LGPL", "psycopg-binary": "LGPL"}


EXTRAS = r"(?:\[([^\]]*)\])?"


def locked(file: Path) -> dict[str, tuple[str, int]]:
    """Returns name -> (version, number of hashes), names as in `normal`; refuses other lines."""
    pins: dict[str, tuple[str, int]] = {}
    name = ""
    for line in file.read_text().splitlines():
        if pin := re.match(rf"([A-Za-z0-9._-]+){EXTRAS}==(\S+)", line):
            name = normal(pin[1])
            pins[name] = (pin[3], 0)
        elif "--hash=sha256:" in line:
            pins[name] = (pins[name][0], pins[name][1] + 1)
        elif line.strip() and not line.lstrip().startswith("#"):
            raise SystemExit(f"{file.name}: not a pinned name, nor a hash: {line!r}")
    return pins


def normal(name: str) -> str:
    """Returns a distribution's name in the form in which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(distribution: Distribution) -> str:
    """Returns everything that a distribution's metadata say about its licence."""
    metadata = distribution.metadata
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    first_line = (metadata.get("License") or "").split("\n")[0]
    return " ".join([metadata.get("License-Expression") or "", first_line, *classifiers]).strip()


def extras_not_locked(file: Path) -> list[str]:
    """Returns a line for each extra that a distribution needs and the lock does not name.

    For an unnamed extra, pip before 23.3 looks for the newest release, which has no hash.
    """
    pins = re.findall(rf"^([A-Za-z0-9._-]+){EXTRAS}==", file.read_text(), re.M)
    named = {(normal(name), normal(e.strip())) for name, extras in pins for e in extras.split(",")}
    pinned = {name for name, _ in named}
    needs = [need for d in distributions() for need in d.requires or [] if "extra ==" not in need]
    asked = (re.match(rf"([A-Za-z0-9._-]+)\s*{EXTRAS}", need) for need in needs)
    wanted = {
        (normal(a[1]), normal(e.strip())) for a in asked if a and a[2] for e in a[2].split(",")
    }
    return [
        f"{name}[{extra}]: needed, and locked without the extra"
        for name, extra in sorted(wanted - named)
        if name in pinned
    ]


def faults() -> list[str]:
    """Returns the faults, one line each."""
    runtime, everything = (locked(ROOT / f"requirements{x}.lock") for x in ("", "-dev"))
    lines = [
        f"{name}: no hash" for lock in (runtime, everything) for name in lock if not lock[name][1]
    ]
    installed = {normal(d.metadata["Name"]): d for d in distributions()}
    for name, distribution in installed.items():
        if name == OWN or name in INSTALLERS:
            continue
        if name not in everything:
            lines.append(f"{name}: installed, and not in the lock")
        elif distribution.version != everything[name][0]:
            lines.append(f"{name}: {distribution.version} installed, {everything[name][0]} locked")
        origin = distribution.read_text("direct_url.json")
        if origin:
            lines.append(f"{name}: installed from {json.loads(origin).get('url')}")
    lines += extras_not_locked(ROOT / "requirements-dev.lock")
    for name in runtime.keys() & installed.keys():
        stated = licence(installed[name])
        accepted = ACCEPTED | {ACCEPTED_BY_NAME.get(name, "MIT")}
        if not any(word in stated for word in accepted):
            lines.append(f"{name}: licence {stated or 'not stated'!r} is not on the list")
    return lines


if __name__ == "__main__":
    lines = faults()
    print("\n".join(lines) or "every distribution is locked, hashed, and under an accepted licence")
    sys.exit(1 if lines else 0)
