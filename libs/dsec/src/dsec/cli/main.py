"""The command ``dsec``.

Exit codes: 0 done, 1 failed, 2 the command line or the configuration cannot be meant, 130
interrupted; ``sandbox exec`` has its own.
"""

from __future__ import annotations

import platform as host
import sys
from typing import Annotated

import typer

from dsec import __version__
from dsec.cli import auth, layer, logs, node, project, sandbox, stack
from dsec.cli.output import SETTINGS, Json, Output, run

app = typer.Typer(
    name="dsec",
    help="An elastic compute base for training LLM agents: disposable sandboxes over NATS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(layer.app, name="layer")
app.add_typer(node.app, name="node")
app.add_typer(project.app, name="project")
app.add_typer(auth.app, name="auth")
app.command()(stack.up)
app.command()(stack.down)
app.command()(stack.status)
app.command()(logs.logs)
app.command()(logs.trace)


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
    sys.exit(app())


if __name__ == "__main__":
    main()
