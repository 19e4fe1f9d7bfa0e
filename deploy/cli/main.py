"""The command ``riffle``."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

# Module and name of each command. A module is loaded only when its command is asked for: what
# `riffle simulate` needs takes seconds to load, and `riffle health` is asked every few seconds.
COMMANDS = {
    "up": ("riffle.deploy.cli.runs", "up_command"),
    "run": ("riffle.deploy.cli.runs", "run_command"),
    "list": ("riffle.deploy.cli.operate", "list_command"),
    "show": ("riffle.deploy.cli.operate", "show_command"),
    "log": ("riffle.deploy.cli.operate", "log_command"),
    "stop": ("riffle.deploy.cli.operate", "stop_command"),
    "deploy": ("riffle.deploy.cli.operate", "deploy_command"),
    "conservation": ("riffle.deploy.cli.operate", "conservation_command"),
    "compare": ("riffle.deploy.cli.runs", "compare_command"),
    "simulate": ("riffle.deploy.cli.simulate", "simulate_command"),
    "figures": ("riffle.deploy.cli.experiments", "figures_command"),
    "account": ("riffle.deploy.cli.account", "account_command"),
    "audit": ("riffle.deploy.cli.experiments", "audit_command"),
    "shuffler": ("riffle.deploy.cli.roles", "shuffler_command"),
    "coordinator": ("riffle.deploy.cli.roles", "coordinator_command"),
    "node": ("riffle.deploy.cli.roles", "node_command"),
    "bench": ("riffle.deploy.cli.load", "bench_app"),
    "load": ("riffle.deploy.cli.load", "load_command"),
    "doctor": ("riffle.deploy.cli.doctor", "doctor_command"),
    "health": ("riffle.deploy.cli.health", "health_command"),
    "network": ("riffle.deploy.cli.network", "network_app"),
}


VERSION = "--version"
COMPLETE = "_RIFFLE_COMPLETE"
"""Set by the completion that ``riffle --install-completion`` gives a shell."""


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(version("riffle-rl"))
        raise typer.Exit


def riffle(
    _: Annotated[
        bool,
        typer.Option(
            VERSION, callback=_tell_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Reinforcement learning over people whose episodes stay private.

    Exit codes: 0 done; 1 the answer is no, as of a run that failed or was stopped; 2 wrong usage;
    3 an input was refused; 4 a service or file that is needed is not available, or is in use; 130
    interrupted.
    """


def completing() -> list[str]:
    """The words after ``riffle`` that a shell asks to complete; none when it does not."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return words.split()[1:] if COMPLETE in os.environ else []


def build(arguments: Sequence[str]) -> typer.Typer:
    """The command line with the command that these arguments begin with, or else with all."""
    app = typer.Typer(name="riffle", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(riffle)
    if list(arguments[:1]) == [VERSION]:
        return app
    asked = [name for name in arguments[:1] if name in COMMANDS]
    if completing() and not asked:
        for name in COMMANDS:  # a shell that waits for the names of commands needs nothing else
            app.command(name)(riffle)
        return app
    for name in asked or COMMANDS:
        module, attribute = COMMANDS[name]
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main() -> None:
    """Entry point of the command."""
    build(completing() or sys.argv[1:])(prog_name="riffle")


if __name__ == "__main__":
    main()
