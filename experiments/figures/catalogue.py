"""Every figure as data: the runs of each curve, with their constants.

``fig6a`` to ``fig8`` are Fig. 6a-c, 7 and 8 of paper 000. Names with ``-large`` have ten times the
paper's K. ``scale`` is regret against K, up to a K at which learning pays despite privacy. Other
figures are about paper 004: Private-UC-O-REPS has full information, and Private UOB-LBPS has bandit
feedback. A run may be part of several figures.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from riffle.common.accounting import CalibrationName
from riffle.experiments.per_episode import PER_EPISODE
from riffle.experiments.study import NOT_PRIVATE
from riffle.experiments.sweep import Parameters, Run

Kind = Literal["time", "epsilon", "episodes", "switches"]

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0)
PAPER_K, LARGE_K = 20_000, 200_000
SCALE = (5_000, 20_000, 200_000)
SCALE_LARGE = (20_000, 200_000, 2_000_000)
ADVERSARIAL_K, ADVERSARIAL_LARGE_K = 2_000, 20_000

TOO_SLOW = f"not run above K = {LARGE_K:,}: it updates in every episode, so its time grows with K"
LEFT_OUT = f"left out above K = {LARGE_K:,} for time; that K compares PE with SDP-PE only"
SWITCHES = (
    "A switch is a change of the deployed policy or mixture. At K = 20,000 paper 000 reports 88 "
    "for PE and SDP-PE, which fits 11 whole stages of H + 2 = 8 batches; the bound of its Eq. 22 "
    "is 96. The papers' constants switch about as often here. The practical ones explore crudely "
    "in the first stage only, and have fewer stages."
)
NOTE_FULL = (
    "Uniform play chooses every action at random: a curve that is not below it has learned nothing."
)
NOTE_BANDIT = (
    f"{NOTE_FULL} JDP and LDP put the same noise on a loss (Lemma 5.6), so LDP's curve hides JDP's."
    " The literal Eq. 4.1 is biased: it counts a loss where none was seen."
)
AGAINST_K = "RiverSwim, X=4, A=2, H=6, epsilon = 1: regret after K"
SHOWN_ELSEWHERE = "the papers' noise and constants are run at epsilon = 0.1 and 1 only, for time"


@dataclass(frozen=True, slots=True)
class Line:
    """A learner in the figures, with the number of its colour (0 to 9) and its dashes.

    Lines with the same `panel` share axes, and their labels end with the panel's name. `world` is
    the environment's label, if the caller gave one.
    """

    label: str
    learner: str
    colour: int
    calibration: CalibrationName = "exact"
    constants: str = "practical"
    options: Parameters = ()
    dashes: str = "-"
    panel: str = ""
    world: str = ""

    def run(self, world: tuple[str, Parameters], K: int, epsilon: float) -> Run:
        """Returns this learner's run of K episodes in a world (environment id, parameters)."""
        private = self.learner not in NOT_PRIVATE and ("privacy", "none") not in self.options
        budget = epsilon if private else None
        return Run(self.learner, *world, K, budget, self.calibration, self.constants, self.options)


@dataclass(frozen=True, slots=True)
class Curve:
    """A line with its runs: a single run shown against time, or one run for each x.

    ``absent`` lists the points that the figure leaves out, with the reasons.
    """

    line: Line
    runs: tuple[Run, ...]
    x: tuple[float, ...]
    absent: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: name, title, kind of x axis, curves, and a note on how to read it."""

    name: str
    title: str
    kind: Kind
    curves: tuple[Curve, ...]
    note: str = ""
    in_all: bool = True

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all curves, without repetition."""
        return tuple(dict.fromkeys(run for curve in self.curves for run in curve.runs))


RIVERSWIM = ("RiverSwim-v0", (("states", 4), ("horizon", 6)))
BANDIT = ("Bandit-v0", (("actions", 20), ("sigma", 0.1)))
CALIBRATIONS: tuple[CalibrationName, ...] = ("exact", "paper")
ADVERSARIES = ("stochastic", "switching", "drifting")
LAYERED = {
    adversary: (
        "LayeredMDP-v0",
        (("widths", "1-3-3-3-1"), ("actions", 2), ("adversary", adversary)),
    )
    for adversary in ADVERSARIES
}

SDP_PE = Line("SDP-PE", "sdp-pe", 3)
LINES = (
    Line("UCBVI, not private", "ucbvi", 7),
    Line("PE, not private", "pe", 2),
    Line("UCBVI-JDP", "ucbvi-jdp", 0),
    Line("UCBVI-JDP, papers' noise", "ucbvi-jdp", 0, "paper", dashes="--"),
    Line("UCBVI-LDP", "ucbvi-ldp", 1),
    Line("UCBVI-LDP, papers' noise", "ucbvi-ldp", 1, "paper", dashes="--"),
    SDP_PE,
    replace(SDP_PE, label="SDP-PE, papers' noise", calibration="paper", dashes="--"),
    # The paper's first stages have fewer users than steps. Batches of 32 users keep reports short.
    replace(
        SDP_PE,
        label="SDP-PE, papers' constants, n >= 32",
        constants="paper",
        options=(("smallest_n", 32),),
        dashes=":",
    ),
    Line("SDP-PE of 003", "sdp-pe-conference", 4),
)
HOMOGENEOUS = replace(
    SDP_PE, label="SDP-PE, told that steps are alike", colour=6, options=(("homogeneous", True),)
)
RIVERSWIM_LINES = (*LINES, HOMOGENEOUS)
UNIFORM = Line("uniform play", "uniform", 5, options=(("privacy", "none"),), dashes="-.")
BEYOND = (LINES[1], SDP_PE, HOMOGENEOUS)  # the lines with points above LARGE_K


def adversarial_lines(learner: str) -> tuple[Line, ...]:
    """Returns a line for each privacy model and calibration of a paper 004 algorithm."""
    models = (("none", "not private", 7), ("central", "JDP", 0), ("local", "LDP", 1))
    lines = [
        Line(
            f"{label}, papers' noise" if calibration == "paper" else label,
            learner,
            colour,
            calibration,
            options=(("privacy", privacy),),
            dashes="--" if calibration == "paper" else "-",
        )
        for privacy, label, colour in models
        for calibration in (CALIBRATIONS[:1] if privacy == "none" else CALIBRATIONS)
    ]
    if learner == "uob-lbps":
        literal = (("privacy", "central"), ("estimator", "paper"))
        lines.append(Line("JDP, literal Eq. 4.1", learner, 3, options=literal, dashes=":"))
    return (*lines, UNIFORM)


def figures(*, quick: bool = False) -> dict[str, Figure]:
    """Returns all figures by name. With `quick`, K is much smaller, and there are fewer points."""
    paper_K, large_K = (2_000, 4_000) if quick else (PAPER_K, LARGE_K)
    epsilons = (1.0, 4.0) if quick else EPSILONS
    scale, scale_large = ((2_000, 4_000), (4_000, 40_000)) if quick else (SCALE, SCALE_LARGE)
    catalogue = [
        *_of_000(paper_K, epsilons, large=False),
        *_of_000(large_K, epsilons, large=True),
        Figure("scale", AGAINST_K, "episodes", _against_K(scale, large_K)),
        Figure(
            "scale-large",
            AGAINST_K,
            "episodes",
            _against_K(scale_large, large_K),
            f"Not part of `all`: above K = {LARGE_K:,} a run takes seconds.",
            in_all=False,
        ),
        *_of_004(200 if quick else ADVERSARIAL_K, 400 if quick else ADVERSARIAL_LARGE_K),
    ]
    return {figure.name: figure for figure in catalogue}


def _of_000(K: int, epsilons: tuple[float, ...], large: bool) -> Iterable[Figure]:
    suffix = "-large" if large else ""
    title = f"RiverSwim, X=4, A=2, H=6, K = {K:,}"
    yield _against_epsilon(f"fig6a{suffix}", K, epsilons, large)
    for name, epsilon in (("fig6b", 0.1), ("fig6c", 1.0)):
        curves = _single(RIVERSWIM_LINES, RIVERSWIM, K, epsilon)
        yield Figure(f"{name}{suffix}", f"{title}, epsilon = {epsilon:g}", "time", curves)
    yield Figure(
        f"fig7{suffix}",
        f"Bandit, A=20, users' means N(r*, 0.1^2), K = {K:,}, epsilon = 1",
        "time",
        _single(LINES, BANDIT, K, 1.0),
    )
    yield Figure(
        f"fig8{suffix}",
        f"{title}, epsilon = 1",
        "switches",
        _single(RIVERSWIM_LINES, RIVERSWIM, K, 1.0),
        f"The same runs as fig6c{suffix}. {SWITCHES}",
    )


def _single(
    lines: tuple[Line, ...], world: tuple[str, Parameters], K: int, epsilon: float
) -> tuple[Curve, ...]:
    return tuple(Curve(line, (line.run(world, K, epsilon),), (float(K),)) for line in lines)


def _against_epsilon(name: str, K: int, epsilons: tuple[float, ...], large: bool) -> Figure:
    curves = []
    for line in RIVERSWIM_LINES:
        thin = large and "paper" in {line.calibration, line.constants}
        shown = tuple(e for e in epsilons if not thin or e in {0.1, 1.0})
        absent = tuple((e, SHOWN_ELSEWHERE) for e in epsilons if e not in shown)
        curves.append(Curve(line, tuple(line.run(RIVERSWIM, K, e) for e in shown), shown, absent))
    title = f"RiverSwim, X=4, A=2, H=6: regret after K = {K:,}"
    return Figure(name, title, "epsilon", tuple(curves))


def _against_K(grid: tuple[int, ...], last: int) -> tuple[Curve, ...]:
    curves = []
    for line in RIVERSWIM_LINES:
        shown = [K for K in grid if line in BEYOND or K in range(last + 1)]
        runs = tuple(line.run(RIVERSWIM, K, 1.0) for K in shown)
        reason = TOO_SLOW if line.learner in PER_EPISODE else LEFT_OUT
        absent = tuple((float(K), reason) for K in grid if K not in shown)
        curves.append(Curve(line, runs, tuple(map(float, shown)), absent))
    return tuple(curves)


def _of_004(K: int, large_K: int) -> Iterable[Figure]:
    world = "layers 1-3-3-3-1, A=2"
    names = (("uc-o-reps", "full", NOTE_FULL), ("uob-lbps", "bandit", NOTE_BANDIT))
    for learner, name, note in names:
        title = f"004, {learner.upper()}: {world}, K = {K:,}, epsilon = 1"
        curves = _single(adversarial_lines(learner), LAYERED["switching"], K, 1.0)
        switching = f"{title}, losses switching 3 times"
        yield Figure(f"adversarial-{name}", switching, "time", curves, note)
        yield Figure(f"adversaries-{name}", title, "time", _each_adversary(learner, K), note)
    yield Figure(
        "adversarial-large",
        f"004, UC-O-REPS: {world}, K = {large_K:,}, epsilon = 1, means of losses fixed",
        "time",
        _single(_with_exact_noise("uc-o-reps"), LAYERED["stochastic"], large_K, 1.0),
        NOTE_FULL,
    )


def _each_adversary(learner: str, K: int) -> tuple[Curve, ...]:
    lines = _with_exact_noise(learner)
    return tuple(
        replace(curve, line=replace(line, label=f"{line.label}; {panel}", panel=panel))
        for panel in ADVERSARIES
        for line, curve in zip(lines, _single(lines, LAYERED[panel], K, 1.0), strict=True)
    )


def _with_exact_noise(learner: str) -> tuple[Line, ...]:
    return tuple(line for line in adversarial_lines(learner) if line.calibration == "exact")
