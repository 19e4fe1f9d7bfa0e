"""The command ``riffle``."""

import typer

from deploy.cli import network, roles
from deploy.cli.account import account_command
from deploy.cli.doctor import doctor_command
from deploy.cli.simulate import simulate_command

app = typer.Typer(name="riffle", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def riffle() -> None:
    """Reinforcement learning over people whose episodes stay private.

    Exit codes: 0 done; 1 the answer is no; 2 wrong usage; 3 an input was refused; 4 a service or
    file that is needed is not available; 130 interrupted.
    """


app.command("up")(network.up_command)
app.command("run")(network.run_command)
app.command("simulate")(simulate_command)
app.command("account")(account_command)
app.command("shuffler")(roles.shuffler_command)
app.command("coordinator")(roles.coordinator_command)
app.command("node")(roles.node_command)
app.command("doctor")(doctor_command)
app.command("health")(roles.health_command)
app.add_typer(network.network_app, name="network")


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
