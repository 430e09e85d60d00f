"""Where the platform is and who we are there: servers, credentials, project, Kafka.

Looked up in this order: what the caller says; ``DSEC_NATS_SERVERS``, ``DSEC_NATS_CREDENTIALS`` and
``DSEC_KAFKA_BOOTSTRAP``; the ``context.json`` that ``dsec up`` keeps in its state directory.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import DEFAULT_PROJECT, validate_project

CONTEXT_FILE: Final = "context.json"

_JWT: Final = re.compile(
    r"-----BEGIN NATS USER JWT-----\s*(\S+)\s*-+END NATS USER JWT-+", re.MULTILINE
)
_PROJECT_SUBJECT: Final = re.compile(r"dsec\.v1\.([a-z0-9][a-z0-9-]*)\.")


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What ``dsec up`` writes down for clients on the same machine.

    Attributes:
        nats_servers: where NATS listens.
        credentials: path of the project's credentials file; empty on a server without accounts.
        project: the project that those credentials belong to.
        kafka_bootstrap: ``host:port`` of Kafka; empty when the platform has none.
    """

    nats_servers: tuple[str, ...]
    credentials: str = ""
    project: str = DEFAULT_PROJECT
    kafka_bootstrap: str = ""


def state_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return where ``dsec up`` keeps its state unless told otherwise.

    ``$DSEC_HOME``, else ``$XDG_STATE_HOME/dsec``, else ``~/.local/state/dsec``.
    """
    environment = os.environ if environment is None else environment
    if home := environment.get("DSEC_HOME"):
        return Path(home).absolute()
    if state := environment.get("XDG_STATE_HOME"):
        return Path(state).absolute() / "dsec"
    return Path("~/.local/state/dsec").expanduser()


def read_context(directory: Path) -> Context | None:
    """Return the context of a running ``dsec up``, or None when there is none.

    Raises:
        DsecError: ``invalid`` when the file is there and cannot be understood.
    """
    path = directory / CONTEXT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Context)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise invalid(
            f"cannot read {path}: {error.strerror}; run as the user of dsec up"
        ) from error
    except msgspec.DecodeError as error:
        raise invalid(f"{path} is not a context file ({error}); run `dsec up` again") from error


def write_context(directory: Path, context: Context) -> None:
    """Write the context so that a reader sees the old file or the new one, never half of it."""
    temporary = directory / f".{CONTEXT_FILE}.new"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(context)) + b"\n")
    temporary.replace(directory / CONTEXT_FILE)


def resolve_connection(
    servers: str | Sequence[str] | None = None,
    credentials: str | os.PathLike[str] | None = None,
    *,
    project: str | None = None,
    kafka_bootstrap: str | None = None,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Context:
    """Return where to connect, from the first source that says it.

    Args:
        servers: NATS URLs, as a list or joined by commas.
        credentials: path of a project's credentials file.
        project: only for a server without accounts; with credentials it must be theirs.
        kafka_bootstrap: ``host:port`` of Kafka, for reading logs.
        directory: the state directory of ``dsec up``; by default :func:`state_directory`.
        environment: instead of the process's own.

    Raises:
        DsecError: ``unavailable`` when nothing says where the platform is, ``invalid`` when a
            source cannot be understood.
    """
    environment = os.environ if environment is None else environment
    directory = directory or state_directory(environment)
    servers = servers or environment.get("DSEC_NATS_SERVERS")
    credentials = credentials or environment.get("DSEC_NATS_CREDENTIALS")
    kafka = kafka_bootstrap or environment.get("DSEC_KAFKA_BOOTSTRAP", "")
    context = None
    if not servers:
        context = read_context(directory)
        if context is None:
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                "no platform to connect to: start one with `dsec up`, or set DSEC_NATS_SERVERS and "
                "DSEC_NATS_CREDENTIALS (looked for a running platform in "
                f"{directory}; $DSEC_HOME names another place)",
                retryable=False,
            )
        servers = context.nats_servers
        credentials = credentials or context.credentials
        kafka = kafka or context.kafka_bootstrap
    addresses = tuple(
        address.strip()
        for address in (servers.split(",") if isinstance(servers, str) else servers)
        if address.strip()
    )
    path = os.fspath(credentials) if credentials else ""
    return Context(
        nats_servers=addresses,
        credentials=path,
        project=_project(path, project, context),
        kafka_bootstrap=kafka,
    )


def _project(credentials: str, asked: str | None, context: Context | None) -> str:
    if not credentials:
        return validate_project(asked or (context.project if context else DEFAULT_PROJECT))
    owner = project_of_credentials(Path(credentials))
    if asked and asked != owner:
        raise invalid(
            f"the credentials file {credentials} belongs to project {owner!r}, not {asked!r}; "
            "leave the project out, it is known from the credentials"
        )
    return owner


class _Permission(msgspec.Struct):
    allow: list[str] = []


class _UserPart(msgspec.Struct):
    pub: _Permission = msgspec.field(default_factory=_Permission)


class _UserClaims(msgspec.Struct):
    nats: _UserPart = msgspec.field(default_factory=_UserPart)


def project_of_credentials(path: Path) -> str:
    """Return the project that a credentials file belongs to: the only one it may publish to.

    The file is read, not verified; the server verifies it, and a forged name would only lead to
    subjects that the server refuses.

    Raises:
        DsecError: ``invalid`` when the file is missing or is no project's.
    """
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise invalid(
            f"cannot read the credentials file {path}: {error.strerror}; "
            "`dsec project list` shows where a project's file is"
        ) from error
    found = _JWT.search(text)
    try:
        body = found[1].split(".")[1] if found else ""
        claims = msgspec.json.decode(
            base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=_UserClaims
        )
    except (IndexError, binascii.Error, msgspec.DecodeError) as error:
        raise invalid(f"{path} is not a NATS credentials file") from error
    for subject in claims.nats.pub.allow:
        if owner := _PROJECT_SUBJECT.match(subject):
            return validate_project(owner[1])
    raise invalid(f"the credentials in {path} are not a project's; use those of a project")
