"""A changed constant of the protocol or a mechanism makes a vector fail.

Each test imports Riffle once more, with one statement added to a module's source, and gives the
vectors to that copy. Every module-level name of the two packages is in `CHANGES` or in `FREE`.
``RIFFLE_VECTOR_CHANGES=1`` tries all values of a constant, not only the first.
"""

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
EVERY = bool(os.environ.get("RIFFLE_VECTOR_CHANGES"))
PACKAGES = ("common/mechanism", "common/protocol")

BYTES = '{0}.replace(b"v1", b"v2")'
TWICE, MORE, LESS = "2 * {0}", "{0} + 1", "{0} - 1"
CHANGES: dict[str, dict[str, tuple[str, ...]]] = {
    "common.mechanism.counters": {
        "MAX_COUNTERS": (TWICE, LESS),
        "Families": ("Literal['paper', 'lean', 'joined']",),
    },
    "common.mechanism.parameters": {
        "MAX_P_LOG2": (MORE, LESS),
        "MAX_DRAWS": (TWICE, LESS),
        "Trust": ("Literal['shuffle', 'local', 'centre']",),
        "Aggregation": ("Literal['messages', 'sum']",),
    },
    "common.mechanism.policy": {"TOTAL_WEIGHT": (MORE, LESS)},
    "common.mechanism.randomness": {
        "BLOCK": ("{0} // 2", TWICE),
        "DRAWS_AT_ONCE": ("1",),
        "FIRST_BITS": ("8",),
        "MORE_BITS": ("32",),
    },
    "common.mechanism.sums": {
        "KEY_BYTES": (MORE, LESS),
        "AES_KEY_BYTES": ("32", "24"),
        "DEVIATIONS": (MORE, LESS),
    },
    "common.protocol.descriptor": {
        **{f"LABEL_{name}": (BYTES, "{0}[:-1]") for name in ("DIGEST", "MASK")},
        **{
            f"MAX_{name}": (MORE, LESS)
            for name in ("STATES", "ACTIONS", "HORIZON", "POLICIES", "MESSAGES", "EXACT")
        },
        "MAX_DESCRIPTOR_BYTES": (MORE, LESS),
        "MAX_EPISODE_SECONDS": (MORE, LESS),
        "MAX_EPOCH_SECONDS": (MORE, LESS),
        "HEX16": ("'[0-9a-fA-F]{{32}}'", "'[0-9a-f]{{31}}'"),
        "Hex16": ("Annotated[str, StringConstraints(pattern='^[0-9a-fA-F]{{32}}$')]",),
        "Hex32": ("Annotated[str, StringConstraints(pattern='^[0-9a-fA-F]{{64}}$')]",),
        "Name": (
            "Annotated[str, StringConstraints(pattern='^[A-Za-z0-9._:/-]{{1,101}}$')]",
            "Annotated[str, StringConstraints(pattern='^[A-Za-z0-9._:/-]{{1,99}}$')]",
        ),
        "NoiseKind": ("Literal['bernoulli', 'flips', 'laplace', 'binary']",),
        "KINDS": (
            "{{**{0}, 'local': ('flips', 'bernoulli')}}",
            "{{**{0}, 'central': ('laplace',)}}",
        ),
    },
    "common.protocol.signatures": {
        f"LABEL_{name}": (BYTES, "{0}[:-1]")
        for name in ("DEPOSIT", "COUNTERSIGN", "KEY_ID", "BATCH_ID")
    },
    "common.protocol.errors": {
        "URN": ("{0}.upper()",),
        "LONGEST_WAIT_SECONDS": (MORE, LESS),
        "PROBLEMS": tuple(
            f"{{{{**{{0}}, '{slug}': (HTTPStatus.IM_A_TEAPOT, '')}}}}"
            for slug in ("malformed", "late", "reused-key")
        ),
    },
    "common.protocol.hpke": {
        "KEY_BYTES": (MORE, LESS),
        "TAG_BYTES": (MORE, LESS),
        "OVERHEAD": (MORE, LESS),
        "LABEL_MESSAGE": (BYTES, "{0}[:-1]"),
        "LABEL_REPORT": (BYTES, "{0}[:-1]"),
        "_SUITE": (
            "hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)",
            "hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA512, hpke.AEAD.AES_128_GCM)",
        ),
    },
    "common.protocol.verification": {"_KEY": ("re.compile('[0-9a-fA-F]{{64}}')",)},
    "common.protocol.wire": {
        "LEASE_BYTES": (MORE, LESS),
        "MAX_USERS_A_LEASE": (MORE, LESS),
        "OCTETS": ("'application/riffle'",),
        "BATCH_KEY_HEADER": ("'Riffle-Key'",),
        "DeclineReason": ("Literal['no-people', 'too-slow']",),
    },
    "node_client.users": {"LABEL_USER": (BYTES, "{0}[:-1]")},
}
"""New values by module and constant; {0} is the constant."""

LIKELY = {
    **dict.fromkeys(("MAX_USERS", "LABEL_USER", "URN", "LONGEST", "PROBLEMS"), "wire.json"),
    **dict.fromkeys(("OCTETS", "BATCH_KEY", "Decline", "_KEY"), "wire.json"),
    **dict.fromkeys(("MAX_", "HEX16", "Hex", "Name", "KINDS", "DEVIATIONS"), "parsing.json"),
    **dict.fromkeys(("BLOCK", "DRAWS_AT", "FIRST_BITS", "MORE_BITS"), "draws.json"),
    **dict.fromkeys(("LABEL_M", "LABEL_R", "_SUITE", "TAG", "AES", "LEASE"), "reports.json"),
}
"""Files that probably notice a change of a name that begins so; they are tried first."""

FREE = {
    "types of Python only": "Ints Successors CentralNoise BatchNoise Policies Randomness Vector "
    "Words Octets Report Policy",
    "bounds of array entries; `Mixture` checks the values": "Weight Action",
    "out of reach: a descriptor bounds both by 2**32": "MAX_BITS MAX_REPORTS",
    "sizes of pieces in which a stream is read or sorted": "BYTES_AT_ONCE KEYS_AT_ONCE",
    "a mark inside one function; a text for people": "OPEN OUTSIDE MAX_DETAIL_LENGTH",
    "the default of an owner who says nothing: only messages": "DEFAULT_AGGREGATIONS",
    "between shuffler and coordinator": "MAX_NAMED SIGNATURE_HEADER DIGEST_HEADER BatchState",
    "an interval, and a header of answers that no node reads": "DECLINE_SECONDS MEDIA_TYPE",
}
"""Names on which no bytes of a node depend, with the reason."""


class _Changed(MetaPathFinder, Loader):
    """Imports one module with a statement after the assignment of a name."""

    def __init__(self, module: str, name: str, value: str) -> None:
        self.module, self.file = f"riffle.{module}", ROOT / f"{module.replace('.', '/')}.py"
        self.name, self.value = name, value.format(name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        tree = ast.parse(self.file.read_text())
        place = max(i for i, node in enumerate(tree.body) if self.name in assigned(node))
        tree.body[place + 1 : place + 1] = ast.parse(f"{self.name} = {self.value}").body
        exec(compile(tree, str(self.file), "exec"), vars(module))  # noqa: S102


def assigned(node: ast.stmt) -> set[str]:
    """Returns the names that a statement assigns."""
    targets: list[ast.expr] = [node.target] if isinstance(node, ast.AnnAssign) else []
    targets = node.targets if isinstance(node, ast.Assign) else targets
    inner = (each for target in targets for each in ast.walk(target))
    return {each.id for each in inner if isinstance(each, ast.Name)}


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("riffle", "docs") or name == "tests.vectors"


@contextmanager
def imported_anew(*finders: MetaPathFinder) -> Iterator[ModuleType]:
    """Yields `tests.vectors` with a copy of Riffle; afterwards all modules are as before."""
    before = {name: module for name, module in sys.modules.items() if is_ours(name)}
    for name in before:
        del sys.modules[name]
    sys.meta_path[:0] = finders
    try:
        yield importlib.import_module("tests.vectors")
    finally:
        del sys.meta_path[: len(finders)]
        for name in [name for name in sys.modules if is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def failure(*finders: MetaPathFinder, first: str = "hpke.json") -> str | None:
    """Returns the first error of the vectors, or None. Begins with the file ``first``."""
    try:
        with imported_anew(*finders) as copy:
            for name in (first, *copy.CHECKS):
                copy.CHECKS[name]()
    except BaseException as error:  # pytest's failures are no exceptions
        if isinstance(error, KeyboardInterrupt):
            raise
        return repr(error)
    return None


CASES = [
    pytest.param(module, name, value, id=f"{module.rpartition('.')[2]}.{name}-{i}")
    for module, names in CHANGES.items()
    for name, values in names.items()
    for i, value in enumerate(values if EVERY else values[:1])
]


def test_an_unchanged_copy_passes() -> None:
    assert failure() is None


@pytest.mark.parametrize(("module", "name", "value"), CASES)
def test_a_changed_constant_is_noticed(module: str, name: str, value: str) -> None:
    files = (file for prefix, file in LIKELY.items() if name.startswith(prefix))
    assert failure(_Changed(module, name, value), first=next(files, "descriptors.json"))


def test_every_constant_is_changed_or_free() -> None:
    free = {name for names in FREE.values() for name in names.split()}
    for package in PACKAGES:
        for file in (ROOT / package).glob("*.py"):
            names = {n for node in ast.parse(file.read_text()).body for n in assigned(node)}
            changed = CHANGES.get(f"{package.replace('/', '.')}.{file.stem}", {}).keys()
            assert names == changed | (names & free), file
            assert not names & free & changed, file
