"""``dsec auth``: keys, credentials and a server configuration, for a NATS that runs elsewhere.

``dsec up`` does all this by itself; a compose file or a cluster starts with ``dsec auth init``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from dsec.cli.output import SETTINGS, Json, Output, run

app = typer.Typer(
    no_args_is_help=True, help="Keys and credentials for a NATS server that you run yourself."
)

#: The server's own default; what a project sends in one message is cut to fit it.
#: Public claims only, and read by a server that may run as another user.
_CONFIG_MODE: Final = 0o644
_CREDENTIALS_MODE: Final = 0o600


@app.command()
def init(
    *,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where the keys are kept. Default: `auth` in the state directory."),
    ] = None,
    nats_config: Annotated[
        Path | None, typer.Option(help="Write the configuration of nats-server to this file.")
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(help="Also copy what services need, and no key of the operator, here."),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="Make credentials for a node; may be repeated.")
    ] = None,
    nats_listen: Annotated[
        str, typer.Option(help="HOST:PORT for clients, in the configuration.")
    ] = "0.0.0.0:4222",
    nats_monitor: Annotated[
        str, typer.Option(help="HOST:PORT of /healthz, in the configuration.")
    ] = "127.0.0.1:8222",
    nats_data: Annotated[
        Path, typer.Option(help="Where the server keeps streams and accounts, on its machine.")
    ] = Path("/data"),
    nats_name: Annotated[str, typer.Option(help="The server's name in a cluster.")] = "dsec",
    json_output: Json = False,
) -> None:
    """Make what is missing and keep what is there; doing it again changes nothing.

    Whoever holds the directory is the operator. A running server learns of new projects by
    `dsec project create`, and needs neither a new configuration nor a reload.
    """

    async def work(output: Output) -> None:
        from dsec.stack.options import CORE_SERVICES, SANDBOXD  # noqa: PLC0415  --help stays quick
        from dsec_common.accounts import AuthDirectory  # noqa: PLC0415  as above

        auth = AuthDirectory.create_or_open(directory or _default_directory())
        files = {role: auth.service_credentials(role) for role in CORE_SERVICES}
        for name in node or ():
            files[f"{SANDBOXD}-{name}"] = auth.service_credentials(SANDBOXD, name)
        if credentials:
            credentials.mkdir(mode=0o700, parents=True, exist_ok=True)
            copies = {name: credentials.absolute() / path.name for name, path in files.items()}
            for name, path in files.items():
                _keep(copies[name], path.read_text(encoding="ascii"), _CREDENTIALS_MODE)
            files = copies
        changed = False
        if nats_config:
            text = _server_config(
                listen=nats_listen,
                monitor=nats_monitor,
                data=nats_data,
                name=nats_name,
                accounts=auth.server_config(nats_data / "accounts"),
            )
            nats_config.parent.mkdir(parents=True, exist_ok=True)
            changed = _keep(nats_config, text, _CONFIG_MODE)
        projects = {name: str(auth.project(name)) for name in auth.projects()}
        if output.json:
            output.document(
                {
                    "directory": str(auth.path),
                    "nats_config": str(nats_config.absolute()) if nats_config else None,
                    "nats_config_changed": changed,
                    "services": {name: str(path) for name, path in files.items()},
                    "projects": projects,
                }
            )
            return
        rows = [(f"service {name}", str(path)) for name, path in files.items()]
        rows += [(f"project {name}", path) for name, path in projects.items()]
        output.table(("CREDENTIALS OF", "FILE"), rows)
        if nats_config:
            output.say(f"{nats_config}: {'written' if changed else 'as it was'}")

    run(work, json=json_output)


def _default_directory() -> Path:
    from dsec.connection import state_directory  # noqa: PLC0415  --help stays quick
    from dsec.stack.layout import Layout  # noqa: PLC0415  as above

    named = SETTINGS.state_directory
    return Layout(Path(named) if named else state_directory()).auth


def _server_config(*, listen: str, monitor: str, data: Path, name: str, accounts: str) -> str:
    """Return a whole server configuration; what a cluster adds goes beside an ``include`` of it."""
    import msgspec  # noqa: PLC0415  --help stays quick

    from dsec_common.embedded.nats import limits_config  # noqa: PLC0415  as above

    def quoted(text: str) -> str:
        return msgspec.json.encode(text).decode()

    return (
        "# Written by `dsec auth init`, which writes it again: change its options, not this file.\n"
        f"listen: {quoted(listen)}\n"
        f"http: {quoted(monitor)}\n"
        f"server_name: {quoted(name)}\n"
        f"{limits_config()}"
        f"jetstream {{\n  store_dir: {quoted(str(data / 'jetstream'))}\n}}\n"
        f"{accounts}"
    )


def _keep(path: Path, text: str, mode: int) -> bool:
    """Make the file say ``text``; return whether it did not before. A reader never sees half."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8", errors="replace") == text:
            return False
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return True
