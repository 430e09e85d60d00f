"""``dsec project``: create, list, remove; for the operator, who has the state directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsec.cli.output import SETTINGS, Json, Output, run

if TYPE_CHECKING:
    from dsec_common.accounts import AuthDirectory

app = typer.Typer(no_args_is_help=True, help="Projects: each has an account of its own.")


def operator() -> tuple[AuthDirectory, tuple[str, ...]]:
    """Return the operator's directory and the servers that run, none when all is down."""
    from dsec.connection import read_context, state_directory  # noqa: PLC0415  --help stays quick
    from dsec.stack.layout import Layout  # noqa: PLC0415  as above
    from dsec_common.accounts import AuthDirectory  # noqa: PLC0415  as above
    from dsec_common.errors import DsecError, ErrorCode  # noqa: PLC0415  as above

    named = SETTINGS.state_directory
    layout = Layout(Path(named) if named else state_directory())
    if not layout.auth.is_dir():
        raise DsecError(
            ErrorCode.NOT_FOUND,
            f"{layout.directory} holds no operator's keys: start the platform with `dsec up`, or "
            "name its state directory with --state-directory",
        )
    if SETTINGS.servers:
        servers = tuple(url.strip() for url in SETTINGS.servers.split(",") if url.strip())
        return AuthDirectory.create_or_open(layout.auth), servers
    context = read_context(layout.directory)
    return AuthDirectory.create_or_open(layout.auth), context.nats_servers if context else ()


@app.command()
def create(name: str, *, json_output: Json = False) -> None:
    """Make a project and print the path of its credentials file."""

    async def work(output: Output) -> None:
        from dsec_common.bus_admin import announce_project  # noqa: PLC0415  --help stays quick

        auth, servers = operator()
        credentials = auth.create_project(name)
        if servers:
            await announce_project(auth, servers, name)
        if output.json:
            output.document({"project": name, "credentials": str(credentials)})
        else:
            output.text(str(credentials))
            if not servers:
                output.say("the platform is not running; it will know the project when it starts")

    run(work, json=json_output)


@app.command("list")
def list_projects(*, json_output: Json = False) -> None:
    """List the projects and where their credentials are."""

    async def work(output: Output) -> None:
        auth, _ = operator()
        found = [(name, str(auth.project(name))) for name in auth.projects()]
        if output.json:
            output.document(
                [{"project": name, "credentials": credentials} for name, credentials in found]
            )
        else:
            output.table(("PROJECT", "CREDENTIALS"), found)

    run(work, json=json_output)


@app.command()
def rm(name: str, *, json_output: Json = False) -> None:
    """Forget a project and close its connections. Its sandboxes live until their own end."""

    async def work(output: Output) -> None:
        from dsec_common.bus_admin import retire_project  # noqa: PLC0415  --help stays quick

        auth, servers = operator()
        if servers:
            await retire_project(auth, servers, name)
        else:
            auth.remove_project(name)
        if output.json:
            output.document({"project": name})
        else:
            output.text(name)

    run(work, json=json_output)
