"""The command ``riffle``: its table of commands, and its entry point.

Only the module of the given command is imported. The imports of `riffle simulate` take seconds, and
containers run `riffle health` every few seconds.
"""

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

INTERRUPTED = 130
"""A copy of `deploy.output.Exit.INTERRUPTED`, because importing it may be interrupted."""
COMPLETION = "_RIFFLE_COMPLETE"
"""Environment variable that the script of ``riffle --install-completion`` sets."""


# For each command, its module in this package and its line of help: the first paragraph of its
# docstring. The function or the group of a command is named `<command>_command`, with underscores.
COMMANDS = {
    "up": ("up", "Start a network on loopback, run to the end, write the results."),
    "run": ("up", "Run on a network that is up, follow the run to its end, write the results."),
    "list": ("runs", "List all runs, oldest first, with trust model and progress."),
    "show": ("runs", "Show a run's state, result and cost, or one of its tables."),
    "log": ("runs", "Print a run's events, one a line."),
    "stop": ("runs", "Stop a run: abandon an open batch, still count a sealed one."),
    "deploy": ("runs", "Deploy a policy or a mixture in a run whose learner is manual."),
    "conservation": ("runs", "Account for every message of a run, at both services."),
    "compare": ("up", "Run shuffle, local and central trust on one loopback network."),
    "simulate": ("simulate", "Simulate a run over several seeds and report exact regret."),
    "sweep": (
        "experiments",
        "Simulate a grid of learners, environments, epsilons, K and trust models.",
    ),
    "account": ("account", "Compute the noise for a guarantee, or the guarantee of given noise."),
    "budget": ("account", "Show what people have spent of their lifetime limits."),
    "audit": ("experiments", "Attack the real code to bound epsilon and beta from below."),
    "shuffler": ("network", "Run the shuffler. A file or RIFFLE_SHUFFLER_* configure it."),
    "coordinator": ("network", "Run the coordinator. A file or RIFFLE_COORDINATOR_* configure it."),
    "node": ("network", "Run one node for each credential. A file or RIFFLE_NODE_* configure it."),
    "bench": ("load", "Measure Riffle's own speed."),
    "load": ("load", "Load a network with real nodes and name its bottleneck."),
    "conformance": ("load", "Offer batches to a client that you wrote, and name its mistakes."),
    "check-report": (
        "load",
        "Say what is right and what is wrong about one report of a test batch.",
    ),
    "doctor": ("network", "Check this machine and, if given, a network and its services."),
    "health": ("network", "Ask a service whether it is ready."),
    "network": ("network", "Create and change the secrets of a network."),
}


def build(arguments: Sequence[str]) -> "typer.Typer":
    """Returns the command line for these arguments.

    The command line has only the command that the arguments name. If they name none, the command
    line lists the names and summaries of all commands.
    """
    import typer  # noqa: PLC0415  (an interruption of this import must end in one line, too)

    def print_version(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import version  # noqa: PLC0415  (slow to import, rarely used)

            typer.echo(version("riffle-rl"))
            raise typer.Exit

    def riffle(
        _: Annotated[
            bool,
            typer.Option(
                "--version", callback=print_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """Reinforcement learning over people whose episodes stay private.

        Exit codes: 0 done; 1 a negative result, such as a failed or stopped run; 2 wrong usage; 3
        an input was refused; 4 a required service or file is not available, or is in use; 130
        interrupted.
        """

    name = next((word for word in arguments if word != "--"), "")
    listing = name not in COMMANDS
    app = typer.Typer(
        name="riffle",
        no_args_is_help=True,
        add_completion=listing or COMPLETION in os.environ,
        pretty_exceptions_enable=False,
    )
    # Typer imports Pydantic to convert options, so ``riffle`` has options only for its listing.
    app.callback(add_help_option=listing)(riffle)
    if listing:
        for listed, (_, summary) in COMMANDS.items():
            app.command(listed, help=summary)(riffle)
        return app
    module = import_module(f"riffle.deploy.cli.{COMMANDS[name][0]}")
    app.info.cls = import_module("riffle.deploy.output").Commands
    command = getattr(module, f"{name.replace('-', '_')}_command")
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)
    return app


def main() -> None:
    """Runs the command line. An interrupt during its imports ends in one line, not a traceback."""
    # Child processes must not import modules from the user's current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    gc.set_threshold(20_000)  # looking for garbage while modules load takes a tenth of the start
    try:
        words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        completed = words.split()[1:] if COMPLETION in os.environ else []
        build(completed or sys.argv[1:])(prog_name="riffle")
    except KeyboardInterrupt:
        sys.stderr.write("riffle: interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
