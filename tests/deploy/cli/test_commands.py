"""The command line: one document on stdout, one line on stderr, stated exit codes."""

import json
import re
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from riffle.deploy import output
from riffle.deploy.cli.options import RunOptions
from riffle.deploy.cli.simulate import rounded
from riffle.experiments.adversarial import run
from riffle.experiments.adversaries import Algorithm, Case
from tests.deploy.cli.calls import document, riffle

RIVERSWIM = ["--states", "4", "--actions", "2", "--horizon", "6", "--episodes", "4096"]


LOCAL = "http://127.0.0.1:1"
ROOT = Path(__file__).parents[3]
OWN = ["--learner", f"{ROOT}/examples/own_learner.py:ExploreThenCommit", "--option"]
MISTAKES = f"{ROOT}/tests/examples/mistakes.py"


def test_account_states_what_a_guarantee_costs() -> None:
    answer = document(riffle("account", *RIVERSWIM, "--families", "paper", "--format", "json"))
    assert answer["counters"] == 288
    assert answer["expected_ones"] <= 510
    assert answer["epsilon_lower"] <= answer["epsilon_upper"] <= 1
    assert answer["variance_over_gaussian"] <= 1.02
    assert answer["ones_of_the_paper_over_exact"] > 100


def test_account_of_a_noise_gives_its_epsilon() -> None:
    needed = document(riffle("account", *RIVERSWIM, "--format", "json"))
    numerator, log2 = str(needed["p_exact"]).split("/2^")
    back = document(
        riffle(
            "account",
            *RIVERSWIM,
            "--bits",
            str(needed["bits_per_user"]),
            "--p",
            f"{numerator}/{2 ** int(log2)}",
            "--noise-slots",
            str(int(needed["padded_messages"]) - 6),
            "--format",
            "json",
        )
    )
    assert back["epsilon_upper"] == pytest.approx(needed["epsilon_upper"])


def test_account_of_sums_has_the_noise_of_messages_and_no_padding() -> None:
    sums, messages = (
        document(riffle("account", *RIVERSWIM, "--aggregation", name, "--format", "json"))
        for name in ("sums", "messages")
    )
    for same in ("bits_per_user", "p_exact", "variance", "counters"):
        assert sums[same] == messages[same]
    assert sums["epsilon_upper"] <= messages["epsilon_upper"], "all of beta pays for noise"
    assert (sums["padded_messages"], sums["report_bytes"]) == (1, 32 + 2 * 384 + 48)
    given = ("--bits", "45", "--p", "1/1024", "--aggregation", "sums", "--format", "json")
    assert document(riffle("account", *RIVERSWIM, *given))["beta_overflow"] < 1e-300


def test_fewer_honest_reports_need_more_noise_from_each() -> None:
    everyone = document(riffle("account", *RIVERSWIM, "--format", "json"))
    most = document(riffle("account", *RIVERSWIM, "--honest-fraction", "0.8", "--format", "json"))
    assert most["honest_reports"] == 4096 - 819
    assert most["expected_ones"] > everyone["expected_ones"] * 1.2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["account", *RIVERSWIM, "--epsilon", "-1"], 3, "epsilon"),
        (["account", *RIVERSWIM, "--honest-fraction", "0"], 3, "dishonest_fraction"),
        (["account", *RIVERSWIM, "--bits", "3"], 3, "--bits and --p belong together"),
        (["account", *RIVERSWIM, "--bits", "3", "--p", "1/3"], 3, "power of two"),
        (["account", *RIVERSWIM, "--bits", "3", "--p", "x"], 3, "not a fraction"),
        (["account", *RIVERSWIM, "--families", "all"], 2, "families"),
        (["simulate", "--preset", "nothing"], 3, "known are demo, riverswim"),
        (["simulate", "--env", "RiverSwin-v0"], 3, "did you mean 'RiverSwim-v0'"),
        (["simulate", "--param", "states"], 3, "not NAME=VALUE"),
        (["simulate", "--env", "RandomMDP-v0", "--param", "seed=-1"], 3, "must not be negative"),
        (["simulate", "--option", "support=no"], 3, "support must be true or false, not 'no'"),
        (["up", "--env", "LayeredMDP-v0", "--option", "homogeneous=true"], 3, "its steps differ"),
        (["simulate", "--param", "colour=1"], 3, "no parameter 'colour'"),
        (["simulate", "--option", "first_stag=64"], 3, "did you mean 'first_stage'? known are"),
        (["simulate", "--learner", "ucbvi", "--option", "least_visit=2"], 3, "mean 'least_visits'"),
        (["simulate", "--episodes", "0"], 3, "episodes"),
        (["simulate", "--learner", "ucbvi", "--families", "lean"], 3, "--calibration decides"),
        (["simulate", "--learner", "ucbvi", "--calibration", "conference"], 3, "not for ucbvi"),
        (
            [
                "simulate",
                "--learner",
                "uc-o-reps",
                "--env",
                "LayeredMDP-v0",
                "--calibration",
                "conference",
            ],
            3,
            "not for uc-o-reps",
        ),
        (["simulate", "--learner", "q-learning"], 3, "known are pe, sdp-pe"),
        (["simulate", "--learner", "ucbvi-jpd"], 3, "did you mean 'ucbvi-jdp'"),
        (
            ["simulate", "--learner", "uob-lbps", "--trust", "local"],
            3,
            "--option adversary, privacy",
        ),
        (["simulate", "--learner", "uob-lbps", "--preset", "riverswim"], 3, "--preset"),
        (["simulate", "--learner", "uob-lbps", "--preset", "demo"], 3, "--preset"),
        (
            ["simulate", "--learner", "uob-lbps", "--option", "widths=1"],
            3,
            "'widths'; known are adv",
        ),
        (["simulate", "--learner", "uob-lbps", "--option", "seed=1"], 3, "known are adversary"),
        (["simulate", "--learner", "uob-lbps", "--option", "eta=x"], 3, "eta"),
        (["simulate", "--learner", "uob-lbps", "--param", "widths=1-x-1"], 3, "widths"),
        (["simulate", "--learner", "uob-lbps", "--option", "privacy=both"], 3, "privacy"),
        (["simulate", "--learner", "uob-lbps", "--horizon", "3"], 3, "--horizon"),
        (
            ["simulate", "--learner", "uob-lbps", "--env", "RiverSwim-v0", "--param", "widths=1-1"],
            3,
            "no parameter 'widths'",
        ),
        (["simulate", "--learner", "manual"], 3, "there is no simulated learner 'manual'; known"),
        (["simulate", "--learner", "no/such.py:Mine"], 3, "there is no Python file"),
        (["simulate", "--env", "no/such.py:make"], 3, "no Python file"),
        (["simulate", *OWN, "share=x"], 3, "own-learner: TypeError"),
        (["simulate", *OWN, "share=2"], 3, "cannot deploy 20000 episodes; 10000 of K are left"),
        (["up", *OWN, "share=0"], 3, "own-learner: cannot deploy 0 episodes"),
        (["up", "--learner", f"{MISTAKES}:NoLearner"], 3, "it has no next_deployment"),
        (["compare", "--learner", f"{MISTAKES}:Raises"], 3, "KeyError: 'deployment' (mistakes.py"),
        (["simulate", "--learner", f"{MISTAKES}:ReturnsAPolicy"], 3, "is not a Deployment"),
        (["simulate", "--env", f"{MISTAKES}:raises"], 3, "KeyError: 3 (mistakes.py, line"),
        (["up", "--env", f"{MISTAKES}:returns_a_dict"], 3, "a dict, which is no environment"),
        (["simulate", "--preset", "riverswin"], 3, "did you mean 'riverswim'"),
        (["up", "--learner", "sdp-pi"], 3, "did you mean 'sdp-pe'"),
        (["sweep", "fig9"], 3, "known are fig6a"),
        (["sweep", "fig-6a"], 3, "did you mean 'fig6a'? known are"),
        (["sweep", "fig6a", "--learner", "pe"], 3, "--learner is for a grid of your own"),
        (["sweep", "--learner", "sdp-pi"], 3, "did you mean 'sdp-pe'"),
        (["sweep", "--env", "RiverSwim-v0,staets=3"], 3, "did you mean 'states'"),
        (["sweep", "--episodes", "0"], 3, "not 0"),
        (["sweep", "--learner", "pe", "--learner", "pe"], 3, "two have the same label"),
        (["run", "--network", "no/such/folder"], 4, "as --network runs/demo/network"),
        (["health", "http://127.0.0.1:1/readyz"], 4, "nothing accepts connections there"),
        (["run", "--detach", "--out", "x"], 3, "--detach writes no results"),
        (["up", "--shuffler-port", "99999"], 2, "not '99999'"),
        (["network", "enrol", "--owner", "me", "--users", "x"], 2, "'x' is no whole number"),
        (["up", "--trust", "x"], 2, "'--trust': 'x' is not one of"),
        (["health", "nonsense"], 3, "'nonsense' is no address: it must be http://host:port"),
        (["up", "--learner", "ucbvi"], 3, "ucbvi is on the simulator only: riffle simulate --lea"),
        (["compare", "--learner", "uob-lbps"], 3, "uob-lbps is on the simulator only"),
        (["health", "http://[::1/readyz"], 3, "'http://[::1/readyz' is no address"),
        (["account", *RIVERSWIM, "--honest-fraction", "nan"], 3, "--honest-fraction"),
        (["simulate", "--param", "states=10000000"], 4, "memory is too small"),
        (
            ["network", "enrol", "no", "--shuffler-url", LOCAL, "--owner", "me", "--users", "1"],
            4,
            "no token at",
        ),
        (["nothing"], 2, "nothing"),
    ],
)
def test_bad_input_ends_in_one_line_and_an_exit_code(
    arguments: list[str], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = riffle(*arguments)
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    if code != 2:
        assert result.stderr.strip().count("\n") == 0
        assert result.stderr.startswith("riffle: ")


def test_results_are_kept(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    result = riffle("up", "--out", str(tmp_path))
    assert result.exit_code == 3
    assert "--force" in result.stderr
    assert (tmp_path / "summary.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["stages.csv", "manifest.json", "regret.png"])
def test_results_of_an_interrupted_run_are_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    result = riffle("up", "--out", str(tmp_path))
    assert result.exit_code == 3
    assert f"{name} exists" in result.stderr
    assert (tmp_path / name).read_text() == "mine"


def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        result = riffle("up", "--out", str(tmp_path), "--shuffler-port", port)
    assert result.exit_code == 4
    assert port in result.stderr
    assert "choose another port" in result.stderr


def test_simulate_reports_the_documented_keys() -> None:
    answer = document(
        riffle("simulate", "--episodes", "2000", "--seeds", "2", "--workers", "1", "--horizon", "3",
               "--format", "json")
    )  # fmt: skip
    assert {"regret_mean", "regret_ci", "policy_switches", "seconds"} <= answer.keys()
    assert answer["seeds"] == 2
    assert 0 <= answer["regret_mean"] <= answer["regret_ceiling"]


@pytest.mark.long
@pytest.mark.parametrize(
    "learner",
    ["sdp-pe-conference", "pe", "ucbvi", "ucbvi-jdp", "ucbvi-ldp", "ucbvi-shuffle"],
)
def test_simulate_any_learner(learner: str) -> None:
    result = riffle("simulate", "--learner", learner, "--calibration", "exact", "--episodes",
                    "1000", "--seeds", "2", "--workers", "1", "--horizon", "3", "--format",
                    "json")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert {"regret_mean", "regret_ci", "policy_switches", "seconds"} <= answer.keys()
    assert answer["learner"] == learner
    assert answer["calibration"] == "exact"
    assert 0 <= answer["regret_mean"] <= answer["regret_ceiling"]


@pytest.mark.long
@pytest.mark.parametrize("learner", ["uc-o-reps", "uob-lbps"])
def test_simulate_against_an_adversary(learner: Algorithm) -> None:
    answer = document(
        riffle("simulate", "--learner", learner, "--episodes", "60", "--seeds", "2", "--workers",
               "1", "--calibration", "paper", "--env", "LayeredMDP-v0", "--param", "widths=1-2-2-1",
               "--param", "adversary=drifting", "--option", "privacy=local", "--format", "json")
    )  # fmt: skip
    one, two = (
        run(Case(learner, 60, 1.0, 1e-5, "local", "paper", seed, adversary="drifting",
                 widths=(1, 2, 2, 1))) for seed in (0, 1)
    )  # fmt: skip
    assert answer["regret_mean"] == pytest.approx((one.regret + two.regret) / 2)
    assert answer["regret_uniform_mean"] > 0
    assert answer["seconds"] > 0


def test_simulate_an_adversary_on_an_mdp_of_ones_own() -> None:
    answer = document(
        riffle("simulate", "--learner", "uc-o-reps", "--episodes", "20", "--seeds", "1", "--env",
               "RiverSwim-v0", "--horizon", "3", "--workers", "1", "--format", "json")
    )  # fmt: skip
    assert (answer["environment"], answer["adversary"]) == ("RiverSwim-v0", "rewards")
    assert answer["constants"]["widths"] == "1-2-3-1"


def test_a_file_of_an_mdp_shows_its_name_and_not_its_folder() -> None:
    answer = document(
        riffle("simulate", "--learner", "uc-o-reps", "--episodes", "10", "--seeds", "1", "--env",
               "examples/own_environment.py:make", "--workers", "1", "--format", "json")
    )  # fmt: skip
    assert answer["environment"] == "own_environment.py:make"
    assert "examples" not in str(answer)


def test_simulate_keeps_results_and_ends_with_the_regret(tmp_path: Path) -> None:
    words = ("--learner", "pe", "--episodes", "4e2", "--seeds", "2", "--workers", "1")
    plain = riffle("simulate", *words, "--out", str(tmp_path))
    assert plain.exit_code == 0, plain.stderr
    *_, last, _ = plain.stdout.splitlines()
    assert re.search(r"regret_mean +│ \d+ \[\d+, \d+\] \(95 % band, 2 seeds\)", last)
    assert "constants." not in plain.stdout
    assert (tmp_path / "seeds.csv").read_text().count("\n") == 3
    assert json.loads((tmp_path / "summary.json").read_text())["episodes"] == 400
    verbose = riffle("simulate", *words, "--verbose").stdout
    assert "constants.growth" in verbose
    assert re.search(r"│ +0 │ (left|right)", verbose), "actions have names"


def test_figures_are_rounded_to_their_bands() -> None:
    assert rounded(1563.77, [1481.3, 1646.2], 20) == "1,564 [1,481, 1,646] (95 % band, 20 seeds)"
    assert rounded(0.012345, [0.011, 0.0137], 3) == "0.0123 [0.0110, 0.0137] (95 % band, 3 seeds)"
    assert rounded(15.9, [-0.01, 32.0], 3) == "16 [0, 32] (95 % band, 3 seeds)"
    assert rounded(5.0, [5.0, 5.0], 2) == "5 [5, 5] (95 % band, 2 seeds)"


def test_one_seed_has_no_confidence_interval() -> None:
    words = ("simulate", "--learner", "ucbvi", "--episodes", "200", "--seeds", "1")
    assert document(riffle(*words, "--format", "json"))["regret_ci"] is None
    *_, last, _ = riffle(*words).stdout.splitlines()
    assert re.search(r"regret_mean +│ \d+ \(1 seed has no band\)", last)


def test_simulate_prints_constants_in_the_papers_calibration() -> None:
    result = riffle("simulate", "--learner", "ucbvi-ldp", "--calibration", "paper", "--episodes",
                    "200", "--seeds", "1", "--workers", "1", "--verbose")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "laplace" in result.stdout
    assert "constants.noise_parameter" in result.stdout


def test_figures_end_to_end_and_are_kept(tmp_path: Path) -> None:
    arguments = ["sweep", "adversarial-full", "--quick", "--seeds", "1", "--workers", "1",
                 "--out", str(tmp_path), "--format", "json"]  # fmt: skip
    answer = json.loads(riffle(*arguments).stdout)
    assert answer["seeds"] == 1
    assert [figure["figure"] for figure in answer["figures"]] == ["adversarial-full"]
    for ending in (".csv", ".png", ".svg", ".md", ".json"):
        assert (tmp_path / f"adversarial-full{ending}").stat().st_size > 0
    (figure,) = answer["figures"]
    assert Path(figure["picture"]) == tmp_path / "adversarial-full.png"
    assert Path(figure["table"]) == tmp_path / "adversarial-full.md"
    refused = riffle(*arguments)
    assert refused.exit_code == 3
    assert "--force" in refused.stderr


def test_figures_print_their_files_and_where_gaps_are_explained(tmp_path: Path) -> None:
    words = ("sweep", "fig8", "--quick", "--seeds", "1", "--workers", "1")
    result = riffle(*words, "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert f"written to {tmp_path}" in result.stdout
    assert str(tmp_path / "fig8.png") in result.stdout
    assert "not computed: SDP-PE, papers' noise: " in result.stdout
    assert f"all are in {tmp_path / 'fig8.md'}" in result.stdout


def test_a_sweep_that_computes_nothing_says_why_and_fails(tmp_path: Path) -> None:
    words = ("sweep", "--episodes", "200", "--epsilon", "0.01", "--seeds", "1", "--workers", "1")
    result = riffle(*words, "--out", str(tmp_path))
    assert result.exit_code == 1, result.stderr
    assert "not computed: sdp-pe: 200: " in result.stdout
    assert f"all are in {tmp_path / 'sweep.md'}" in result.stdout


def test_a_sweep_that_is_terminated_ends_as_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception ends joblib's processes, which would otherwise compute on."""
    handlers = []

    def interrupted(*_: object) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise KeyboardInterrupt

    monkeypatch.setattr("riffle.deploy.cli.experiments.make", interrupted)
    result = riffle("sweep", "fig8", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert handlers == [signal.default_int_handler]
    assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler


def test_figures_name_the_packages_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    words = ("--dask", "tcp://127.0.0.1:1")
    result = riffle("sweep", "fig6a", *words, "--out", str(tmp_path))
    assert result.exit_code == 4
    *_, last = result.stderr.splitlines()
    assert last.startswith("riffle: a cluster needs dask: pip install 'riffle-rl[experiments]'")


def test_a_run_declares_what_its_environment_declares() -> None:
    river = RunOptions().apply().spec
    assert river.homogeneous
    assert river.layout().counters < 384 / 3
    layered, random = (
        RunOptions(env=env).apply().spec for env in ("LayeredMDP-v0", "RandomMDP-v0")
    )
    assert (layered.homogeneous, layered.support is None) == (False, False)
    assert (random.homogeneous, random.support) == (False, None)


def test_options_change_what_is_declared() -> None:
    changed = RunOptions(option=["homogeneous=false", "support=false"]).apply().spec
    assert (changed.homogeneous, changed.support, changed.options) == (False, None, {})
    declared = RunOptions(env="RandomMDP-v0", option=["homogeneous=true"]).apply().spec
    assert declared.homogeneous
    assert RunOptions(constants="paper").apply().spec.support is None


def test_network_init_keeps_secrets_apart_and_is_idempotent(tmp_path: Path) -> None:
    assert riffle("network", "init", str(tmp_path)).exit_code == 0
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert riffle("network", "init", str(tmp_path)).exit_code == 0
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert before == after
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in after)
    private = {
        (tmp_path / "shuffler" / "signing_key").read_bytes(),
        (tmp_path / "coordinator" / "signing_key").read_bytes(),
        *(file.read_bytes() for file in (tmp_path / "coordinator/analyzer_keys").glob("*.key")),
    }
    assert not any(file.read_bytes() in private for file in (tmp_path / "nodes").iterdir())
    shuffler = {file.read_bytes() for file in (tmp_path / "shuffler").iterdir()}
    tokens = {file.read_bytes() for file in (tmp_path / "operator").glob("*_token")}
    assert not shuffler & tokens, "the shuffler keeps hashes of tokens only"


def test_network_init_answers_in_json(tmp_path: Path) -> None:
    folder = str(tmp_path / "network")
    shuffler, coordinator = (
        "https://s.example:8401,https://t.example:8401",
        "https://127.0.0.1:8400",
    )
    urls = ("--shuffler-url", shuffler)
    result = riffle("network", "init", folder, *urls, "--format", "json")
    known = {"shuffler_url": shuffler, "coordinator_url": "https://localhost:8400"}
    assert document(result) == {"folder": folder} | known
    assert result.stderr == ""
    assert riffle("network", "init", folder).exit_code == 0
    changed = riffle("network", "init", folder, "--coordinator-url", coordinator)
    assert changed.exit_code == 3
    assert f"is '{coordinator}', but {folder}/operator/coordinator_url says" in changed.stderr


def test_doctor_reports_every_fault(tmp_path: Path) -> None:
    riffle("network", "init", str(tmp_path / "network"))
    port = riffle("doctor", "--out", str(tmp_path), "--port", "99999")
    assert port.exit_code == 1
    assert "port 99999 cannot be used: ports end at 65535" in port.stdout
    (tmp_path / "afile").write_text("")
    file = riffle("doctor", "--out", str(tmp_path / "afile"))
    assert "afile is a file where a folder is needed" in file.stdout
    empty = riffle(
        "doctor", "--out", str(tmp_path), "--network", str(tmp_path / "network"),
        "--format", "json",
    )  # fmt: skip
    details = [f["detail"] for f in json.loads(empty.stdout)["findings"] if not f["ok"]]
    assert "no node is enrolled yet" in details[0]
    assert [detail.split()[0] for detail in details[1:]] == [
        "https://localhost:8400",
        "https://localhost:8401",
    ]
    nodes = tmp_path / "network" / "nodes"
    for name, text in (
        ("credentials.json", json.dumps([{"node_id": "ab" * 16, "token": "t"}])),
        ("users_key", "5e" * 32),
        ("users.json", json.dumps({"ab" * 16: ["anna"]})),
    ):
        (nodes / name).write_text(text)
        (nodes / name).chmod(0o600)
    (tmp_path / "network" / "nodes" / "ca.pem").chmod(0o644)
    url = "http://127.0.0.1:1"
    result = riffle(
        "doctor", "--out", str(tmp_path), "--network", str(tmp_path / "network"), "--url", url,
        "--format", "json",
    )  # fmt: skip
    assert result.exit_code == 1
    wrong = [f["check"] for f in json.loads(result.stdout)["findings"] if not f["ok"]]
    assert wrong == ["secrets", "service"], "and no address of the network"


def test_help_names_the_figures_and_one_wording_of_the_exit_codes() -> None:
    assert "fig6a, " in " ".join(riffle("sweep", "--help").stdout.split())
    wording = "a required service or file is not available, or is in use; 130 interrupted."
    for text in (riffle("--help").stdout, (ROOT / "README.md").read_text(), str(output.__doc__)):
        assert wording in re.sub(r"[\s│]+", " ", text)
