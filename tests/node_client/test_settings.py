"""Settings: missing or unsafe ones are named at the start; secrets stay out of reprs."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.parameters import Guarantee
from riffle.common.protocol.errors import LocalError
from riffle.node_client.ledger import Limit
from riffle.node_client.settings import Settings
from riffle.node_client.users import opaque_id
from tests.node_client import world

NODE = "ab" * 16
USERS_KEY = b"k" * 32
KEY = world.public(world.SHUFFLER).hex()


def variables(folder: Path, **changes: str | None) -> dict[str, str]:
    credentials = folder / "credentials.json"
    credentials.write_text(json.dumps([{"node_id": NODE, "token": "SECRET"}]))
    values: dict[str, str | None] = {
        "SHUFFLER_URL": "http://127.0.0.1:8401",
        "SHUFFLER_ID": "shuffler-1",
        "SHUFFLER_KEY": KEY,
        "COORDINATOR_KEY": world.public(world.COORDINATOR).hex(),
        "CREDENTIALS_FILE": str(credentials),
        "STATE_DIR": str(folder / "state"),
        "SIMULATED_USERS": "true",
        "MAX_EPSILON": "1.0",
        "MAX_BETA": "1e-5",
        "MIN_DISHONEST_FRACTION": "0.1",
    }
    merged = values | changes
    return {f"RIFFLE_NODE_{name}": text for name, text in merged.items() if text is not None}


def load(folder: Path, patch: pytest.MonkeyPatch, **changes: str | None) -> Settings:
    for name, text in variables(folder, **changes).items():
        patch.setenv(name, text)
    return Settings.load()


def test_pins_demands_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(tmp_path, monkeypatch, STATES="5", HORIZON="3")
    environment = settings.make_environment()
    demands = settings.demands(environment)
    assert demands.sizes == Sizes(5, 2, 3)
    assert (demands.required.epsilon, demands.required.dishonest_fraction) == (1.0, 0.1)
    assert demands.shuffler_key.hex() == KEY
    assert (demands.loopback, demands.test_entry) == (True, False)
    assert demands.trust_models == ("shuffle",), "other trust models only where the owner says so"
    assert settings.credentials()[0].token == "SECRET"
    assert "SECRET" not in repr(settings.credentials())


@pytest.mark.parametrize(
    "url",
    [
        "https://shuffler:8401",
        "http://127.0.0.1:8401,https://shuffler:8401",
        "https://shuffler:8401,http://127.0.0.1:8401",
    ],
)
def test_off_loopback_no_other_owner_may_break_the_guarantee(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Finding A8. One replica elsewhere is enough."""
    assert load(tmp_path, monkeypatch).max_owner_share == 1.0
    remote = load(tmp_path, monkeypatch, SHUFFLER_URL=url)
    assert remote.demands(remote.make_environment()).max_owner_share == 0.05
    for share, fraction in (("0.2", "0.1"), ("1", "0.1"), ("0.05", "0")):
        with pytest.raises(LocalError, match=r"max_owner_share .* must not be above"):
            changes = {"MAX_OWNER_SHARE": share, "MIN_DISHONEST_FRACTION": fraction}
            load(tmp_path, monkeypatch, SHUFFLER_URL=url, **changes)


def test_defaults_off_loopback_protect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner has not said allows nothing that is weaker."""
    found = load(tmp_path, monkeypatch, SHUFFLER_URL="https://shuffler.example")
    demands = found.demands(found.make_environment())
    assert (demands.trust_models, demands.aggregations) == (("shuffle",), ("messages",))
    assert demands.max_owner_share == 0.05
    assert (demands.test_entry, demands.loopback) == (False, False)
    assert demands.max_seconds <= 31 * 86_400


DEMANDED: dict[str, tuple[str, str, object]] = {
    "SHUFFLER_ID": ("shuffler_id", "another", "another"),
    "SHUFFLER_KEY": ("shuffler_key", "ab" * 32, bytes.fromhex("ab" * 32)),
    "COORDINATOR_KEY": ("coordinator_key", "cd" * 32, bytes.fromhex("cd" * 32)),
    "MAX_EPSILON": ("required", "0.5", Guarantee(0.5, 1e-5, 0.1)),
    "MAX_BETA": ("required", "1e-9", Guarantee(1.0, 1e-9, 0.1)),
    "MIN_DISHONEST_FRACTION": ("required", "0.25", Guarantee(1.0, 1e-5, 0.25)),
    "TRUST_MODELS": ("trust_models", '["local"]', ("local",)),
    "AGGREGATIONS": ("aggregations", '["sums"]', ("sums",)),
    "MAX_OWNER_SHARE": ("max_owner_share", "0.125", 0.125),
    "MAX_BATCH_SECONDS": ("max_seconds", "77", 77),
    "MAX_EPISODE_SECONDS": ("max_episode_seconds", "77", 77),
    "TEST_ENTRY": ("test_entry", "true", True),
    "HORIZON": ("sizes", "3", Sizes(6, 2, 3)),
}


def test_every_demand_of_an_owner_reaches_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting changes its own demand and no other, so none is dropped or swapped."""

    def demands(**changes: str) -> dict[str, object]:
        with monkeypatch.context() as patch:
            found = load(tmp_path, patch, **({"STATES": "6", "HORIZON": "2"} | changes))
            made = found.demands(found.make_environment())
        return {field.name: getattr(made, field.name) for field in fields(made)}

    before = demands()
    for name, (demand, text, value) in DEMANDED.items():
        after = demands(**{name: text})
        changed = {each for each in before if str(before[each]) != str(after[each])}
        assert changed - {"declaration"} == {demand}, name
        assert after[demand] == value, name
    (tmp_path / "pins").write_text("ef" * 32)
    assert demands(ANALYZER_KEYS_FILE=str(tmp_path / "pins"))["analyzer_keys"] == {"ef" * 32}
    elsewhere = demands(SHUFFLER_URL="https://shuffler.example")
    assert (before["loopback"], elsewhere["loopback"]) == (True, False)


def test_an_owner_allows_trust_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(tmp_path, monkeypatch, TRUST_MODELS='["shuffle", "local"]')
    demands = settings.demands(settings.make_environment())
    assert demands.trust_models == ("shuffle", "local")
    for wrong in ("[]", '["everybody"]', "central"):
        with pytest.raises(LocalError, match="trust_models"):
            load(tmp_path, monkeypatch, TRUST_MODELS=wrong)


def test_environment_parameters_are_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(
        tmp_path,
        monkeypatch,
        ENVIRONMENT="Bandit-v0",
        ENVIRONMENT_PARAMETERS='{"sigma": 0.2, "means": [0.1, 0.9], "seed": 3}',
    )
    assert settings.make_environment().sizes == Sizes(1, 2, 1)


def test_keys_can_be_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    settings = load(
        tmp_path, monkeypatch, SHUFFLER_KEY=None, SHUFFLER_KEY_FILE=str(tmp_path / "key")
    )
    assert settings.demands(settings.make_environment()).shuffler_key.hex() == KEY
    (tmp_path / "key").write_text("short")
    with pytest.raises(LocalError, match="64 hex digits"):
        settings.demands(settings.make_environment())
    (tmp_path / "key").unlink()
    with pytest.raises(LocalError, match="cannot read"):
        settings.demands(settings.make_environment())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MAX_EPSILON": None}, "max_epsilon"),
        ({"MAX_EPSILON": "0"}, "max_epsilon"),
        ({"MAX_BETA": None}, "max_beta"),
        ({"MIN_DISHONEST_FRACTION": None}, "min_dishonest_fraction"),
        ({"MIN_DISHONEST_FRACTION": "1"}, "min_dishonest_fraction"),
        ({"STATE_DIR": None}, "state_dir"),
        ({"CREDENTIALS_FILE": None}, "credentials_file"),
        ({"SHUFFLER_URL": "ftp://127.0.0.1"}, "https://host:port"),
        ({"SHUFFLER_URL": "127.0.0.1:80"}, "https://host:port"),
        ({"SHUFFLER_URL": "http://shuffler.example"}, "TLS is mandatory"),
        ({"SHUFFLER_URL": "https://shuffler.example", "TEST_ENTRY": "1"}, "loopback"),
        ({"SHUFFLER_KEY": None}, "exactly one of shuffler_key"),
        ({"COORDINATOR_KEY_FILE": "also"}, "exactly one of coordinator_key"),
        ({"SHUFFLER_KEY": "abc"}, "shuffler_key"),
        ({"SHUFFLER_ID": "two words"}, "shuffler_id"),
        ({"WORKERS": "0"}, "workers"),
        ({"USERS_A_REQUEST": "2049"}, "users_a_request"),
        ({"STATES": "0"}, "states"),
        ({"LEDGER_FILE": "ledger.sqlite"}, "ledger_file and lifetime_epsilon need each other"),
        ({"LIFETIME_EPSILON": "1"}, "ledger_file and lifetime_epsilon need each other"),
        ({"SHORTEST_EPOCH_SECONDS": "60"}, "shortest_epoch_seconds needs both"),
        ({"SIMULATED_USERS": None}, "exactly one of users_file and simulated_users"),
        ({"SIMULATED_USERS": "false"}, "exactly one of users_file and simulated_users"),
        ({"USERS_FILE": "users.json"}, "exactly one of users_file and simulated_users"),
        ({"SIMULATED_USERS": None, "USERS_FILE": "users.json"}, "users_file needs users_key_file"),
    ],
)
def test_a_wrong_setting_is_named(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LocalError) as caught:
        load(tmp_path, monkeypatch, **changes)
    assert caught.value.slug == "invalid-spec"
    assert says in caught.value.detail


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '[{"node_id": "zz", "token": "SECRET"}]',
        '[{"node_id": "' + "ab" * 16 + '", "token": ""}]',
        "[" + ",".join(['{"node_id": "' + "ab" * 16 + '", "token": "SECRET"}'] * 2) + "]",
        '[{"node_id": "' + "ab" * 16 + '", "token": "SECRET", "more": 1}]',
    ],
)
def test_credentials_must_be_whole_and_stay_secret(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(tmp_path, monkeypatch)
    settings.credentials_file.write_text(content)
    with pytest.raises(LocalError, match=r"credentials\.json") as caught:
        settings.credentials()
    assert "SECRET" not in caught.value.detail
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def with_users(folder: Path, patch: pytest.MonkeyPatch, content: object) -> Settings:
    (folder / "users.json").write_text(json.dumps(content))
    patch.delenv("RIFFLE_NODE_SIMULATED_USERS", raising=False)
    (folder / "users_key").write_text(USERS_KEY.hex())
    files = {"USERS_FILE": folder / "users.json", "USERS_KEY_FILE": folder / "users_key"}
    return load(folder, patch, SIMULATED_USERS=None, **{k: str(v) for k, v in files.items()})


def test_users_come_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    people = ["ann@example.org", "Jörg Müller"]
    listed = with_users(tmp_path, monkeypatch, {NODE: people}).users()
    assert listed == {NODE: [opaque_id(USERS_KEY, person) for person in people]}
    monkeypatch.delenv("RIFFLE_NODE_USERS_FILE")
    assert load(tmp_path, monkeypatch).users() is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "object"),
        ({}, f"no users of node {NODE}"),
        ({NODE: []}, f"no users of node {NODE}"),
        ({NODE: ["01" * 16], "cd" * 16: ["02" * 16]}, f"node {'cd' * 16} has no credential"),
        ({NODE: ["01" * 16, "01" * 16]}, "twice"),
        ({NODE: [""]}, "pattern"),
        ({NODE: ["ann@example.org "]}, "pattern"),
        ({NODE: ["a" * 201]}, "200"),
        ({"ann@example.org": [NODE]}, "a key is not a node's id"),
        ({NODE: ["bob"], "ann@example.org": [""]}, "a key is not a node's id"),
    ],
)
def test_the_users_file_must_be_whole(
    content: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_users(tmp_path, monkeypatch, content)
    with pytest.raises(LocalError, match=r"users\.json") as caught:
        settings.users()
    assert caught.value.slug == "invalid-spec"
    assert says in caught.value.detail
    assert not [user for user in ("01" * 16, "ann", "bob") if user in caught.value.detail]


def test_every_setting_has_a_description() -> None:
    undescribed = {name for name, field in Settings.model_fields.items() if not field.description}
    assert undescribed == set()


def test_a_copy_of_the_ledgers_folder_does_not_replace_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, the head is with the key, or with the credentials."""
    for folder in ("ledger", "key", "heads"):
        (tmp_path / folder).mkdir()
    (tmp_path / "key" / "users_key").write_text("5e" * 32)
    given: dict[str, str | None] = {"LIFETIME_EPSILON": "3.0"}
    given["LEDGER_FILE"] = str(tmp_path / "ledger" / "ledger.sqlite")
    key = {"USERS_KEY_FILE": str(tmp_path / "key" / "users_key")}
    heads = {"LEDGER_HEAD_DIR": str(tmp_path / "heads"), "LIFETIME_BETA": "0.001"}
    for more, folder, beta in (({}, "", 1e-5), (key, "key", 1e-5), (key | heads, "heads", 0.001)):
        ledger = load(tmp_path, monkeypatch, **given, **more).ledger()
        assert ledger is not None
        assert ledger.limit == Limit(3.0, beta)
        assert ledger.head.folder == tmp_path / folder
        assert ledger.head.written() > 0
