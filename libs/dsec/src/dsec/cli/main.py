"""The command ``dsec``.

Exit codes: 0 done, 1 failed, 2 the command line or the configuration cannot be meant, 130
interrupted, 141 nobody reads what is printed; ``sandbox exec`` has its own.
"""

from __future__ import annotations

import platform as host
import sys
from typing import Annotated, Final, cast

import typer

from dsec import __version__
from dsec.cli import (
    action,
    agent,
    auth,
    cost,
    dag,
    debug,
    factory,
    files,
    layer,
    life,
    logs,
    network,
    node,
    pool,
    project,
    simulate,
    snapshot,
    stack,
)
from dsec.cli import exec as commands
from dsec.cli.options import COMMAND_LAST
from dsec.cli.output import EXIT_USAGE, SETTINGS, Json, Output, run

#: What every complaint about a command line is.
_COMMAND_LINE_ERROR: Final = cast("type[Exception]", typer.BadParameter.__base__)

app = typer.Typer(
    name="dsec",
    help="An elastic compute base for training LLM agents: disposable sandboxes over NATS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    files.cp,
    files.ls,
    files.stat,
    files.mkdir,
    files.mv,
    files.rm,
    files.watch,
):
    commands.app.command()(command)
commands.app.command(context_settings=COMMAND_LAST)(action.action)
commands.app.command()(action.actions)
app.add_typer(commands.app, name="sandbox")
app.add_typer(agent.app, name="agent")
app.add_typer(dag.app, name="dag")
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(layer.app, name="layer")
app.add_typer(factory.app, name="factory")
app.add_typer(node.app, name="node")
app.add_typer(network.app, name="network")
app.add_typer(pool.app, name="pool")
app.add_typer(project.app, name="project")
app.add_typer(auth.app, name="auth")
app.add_typer(debug.app, name="debug")
app.command("run", context_settings=COMMAND_LAST)(life.run_command)
app.command("call", context_settings=COMMAND_LAST)(pool.call)
app.command()(stack.up)
app.command()(stack.down)
app.command()(stack.status)
app.command()(logs.logs)
app.command()(logs.trace)
app.command()(cost.cost)
app.command()(simulate.simulate)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dsec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    servers: Annotated[
        str | None, typer.Option(envvar="DSEC_NATS_SERVERS", help="NATS URLs.")
    ] = None,
    credentials: Annotated[
        str | None, typer.Option(envvar="DSEC_NATS_CREDENTIALS", help="Project credentials file.")
    ] = None,
    state_directory: Annotated[
        str | None,
        typer.Option(envvar="DSEC_HOME", help="State directory of `dsec up`."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and logs.")] = False,
    json_output: Json = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take what holds for every command."""
    SETTINGS.servers = servers
    SETTINGS.credentials = credentials
    SETTINGS.state_directory = state_directory
    SETTINGS.debug = debug
    SETTINGS.json = json_output


@app.command()
def version(*, json_output: Json = False) -> None:
    """Print the version."""

    async def work(output: Output) -> None:
        facts = {"dsec": __version__, "python": host.python_version(), "linux": host.release()}
        if output.json:
            output.document(facts)
        else:
            output.facts(facts)

    run(work, json=json_output)


def main() -> None:
    """Run the command line of this process."""
    if "--json" not in sys.argv:
        sys.exit(app())
    try:
        code = app(standalone_mode=False)
    except _COMMAND_LINE_ERROR as error:
        Output(json=True).usage(cast("typer.BadParameter", error).format_message())
        code = EXIT_USAGE
    sys.exit(code)


if __name__ == "__main__":
    main()
