"""Accounts: one operator, one account for the services, one for each project; all in one directory.

Each project is a NATS account of its own, so that a project is known from its connection and can
never be claimed in a message. Whoever holds this directory is the operator: it holds every key. ::

    <directory>/operator.nk  operator.jwt         the operator's key and claims
                system.nk    system.jwt           the server's own account: adding projects
                services.nk  services.jwt         the account that all services share
                creds/<user>.nk  <user>.creds     system, broker, scheduler, …, sandboxd-<node>
                projects/<name>.nk .jwt .user.nk .creds

Keys are made once and kept; claims are signed again when this version wants them to say something
else. Files are replaced atomically and readable by their owner only. Several processes may open the
directory at once.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec_common.accounts_jwt import (
    Identity,
    KeyKind,
    credentials_text,
    decode_claims,
    encode_claims,
)
from dsec_common.accounts_permissions import (
    NODE_ROLE,
    ROLES,
    project_imports,
    project_permissions,
    service_exports,
    service_permissions,
)
from dsec_common.errors import DsecError, ErrorCode, from_os_error, not_found
from dsec_common.subjects import DEFAULT_PROJECT, validate_project

#: A server takes 65,536 in all, unless it is told otherwise.
PROJECT_CONNECTIONS_MAX: Final = 4096

_UNLIMITED: Final = {"subs": -1, "data": -1, "payload": -1}
_ACCOUNT_LIMITS: Final = _UNLIMITED | {
    "imports": -1,
    "exports": -1,
    "wildcards": True,
    "conn": -1,
    "leaf": -1,
}
_JETSTREAM_LIMITS: Final = {
    "mem_storage": -1,
    "disk_storage": -1,
    "streams": -1,
    "consumer": -1,
}


class AuthDirectory:
    """Keys, claims and credentials files; made by :meth:`create_or_open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._operator = self._identity("operator.nk", KeyKind.OPERATOR)
        self._system = self._identity("system.nk", KeyKind.ACCOUNT)
        self._services = self._identity("services.nk", KeyKind.ACCOUNT)

    @classmethod
    def create_or_open(cls, path: str | os.PathLike[str]) -> AuthDirectory:
        """Return the directory at ``path``, with every file that this version needs.

        The credentials of all services and of the project ``default`` are there afterwards; a
        node's come with :meth:`service_credentials`.

        Raises:
            DsecError: naming operation, path and errno when a file cannot be made or read;
                ``invalid`` when one holds something else.
        """
        directory = Path(path).absolute()
        try:
            for folder in (directory, directory / "creds", directory / "projects"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            auth = cls(directory)
            auth._sign_all()
        except OSError as error:
            raise from_os_error("open auth directory", error, str(directory)) from error
        return auth

    def _sign_all(self) -> None:
        operator = {
            "type": "operator",
            "version": 2,
            "system_account": self._system.public_key,
        }
        self._signed("operator.jwt", self._operator.public_key, "dsec", operator, self._operator)
        system = {"type": "account", "version": 2, "limits": _ACCOUNT_LIMITS}
        self._signed("system.jwt", self._system.public_key, "SYS", system, self._operator)
        services = {
            "type": "account",
            "version": 2,
            "limits": _ACCOUNT_LIMITS | _JETSTREAM_LIMITS,
            "exports": service_exports(),
        }
        self._signed(
            "services.jwt", self._services.public_key, "SERVICES", services, self._operator
        )
        self._user("creds/system", "system", {}, self._system)
        for role in ROLES:
            self.service_credentials(role)
        for name in self.projects():
            self._sign_project(name)
        if DEFAULT_PROJECT not in self.projects():
            self._sign_project(DEFAULT_PROJECT)

    # --- Services -----------------------------------------------------------------------------

    def service_credentials(self, role: str, node: str = "") -> Path:
        """Return the credentials file of a service, made when missing.

        Args:
            role: ``broker``, ``scheduler``, ``chronus``, ``tracer`` or ``sandboxd``.
            node: the node's name; only for ``sandboxd``, which then can act for no other node.

        Raises:
            DsecError: ``invalid`` for an unknown role or an impossible node name.
        """
        publish, subscribe = service_permissions(role, node)
        user = f"{role}:{node}" if role == NODE_ROLE else role
        permissions = {"pub": {"allow": publish}, "sub": {"allow": subscribe}}
        return self._user(f"creds/{user.replace(':', '-')}", user, permissions, self._services)

    def system_credentials(self) -> Path:
        """Return the credentials file that may add and remove accounts while a server runs."""
        return self.path / "creds/system.creds"

    # --- Projects -----------------------------------------------------------------------------

    def projects(self) -> list[str]:
        """Return the names of all projects, sorted."""
        return sorted(path.name.removesuffix(".jwt") for path in self._projects.glob("*.jwt"))

    def project(self, name: str) -> Path:
        """Return the credentials file of a project's users.

        Raises:
            DsecError: ``not_found``, with the closest known name; ``invalid``.
        """
        self._require_project(name)
        return self._projects / f"{name}.creds"

    def create_project(self, name: str) -> Path:
        """Make a project's account and return its credentials file.

        A running server learns of it through :meth:`project_token`, see ``bus_admin``; a server
        that starts later knows it from the start.

        Raises:
            DsecError: ``conflict`` when it exists; ``invalid`` for an impossible name.
        """
        validate_project(name)
        if (self._projects / f"{name}.jwt").exists():
            raise DsecError(
                ErrorCode.CONFLICT,
                f"project {name} exists; its credentials are {self._projects / name}.creds",
                details={"project": name},
            )
        return self._sign_project(name)

    def project_token(self, name: str) -> str:
        """Return the signed claims of a project's account, for a running server.

        Raises:
            DsecError: ``not_found``; ``invalid``.
        """
        self._require_project(name)
        return (self._projects / f"{name}.jwt").read_text(encoding="ascii")

    def remove_project(self, name: str) -> str:
        """Forget a project and return the signed order to do so, for a running server.

        Its keys are deleted: a later project of the same name is another account.

        Raises:
            DsecError: ``not_found``; ``invalid``; ``denied`` for the project ``default``, which
                belongs to every platform.
        """
        if name == DEFAULT_PROJECT:
            raise DsecError(
                ErrorCode.DENIED,
                f"the project {name} cannot be removed: it is what clients of this platform use "
                "unless told otherwise; remove its layers and sandboxes instead",
            )
        claims = decode_claims(self.project_token(name), self._operator.public_key)
        order = {"type": "generic", "version": 2, "accounts": [claims["sub"]]}
        token = encode_claims(self._operator.public_key, "remove", order, self._operator)
        for suffix in (".jwt", ".creds", ".user.nk", ".nk"):
            (self._projects / f"{name}{suffix}").unlink(missing_ok=True)
        return token

    @property
    def _projects(self) -> Path:
        return self.path / "projects"

    def _require_project(self, name: str) -> None:
        validate_project(name)
        if not (self._projects / f"{name}.jwt").exists():
            close = difflib.get_close_matches(name, self.projects(), n=1)
            hint = f"did you mean {close[0]}?" if close else "create it: dsec project create NAME"
            raise not_found(f"there is no project {name}; {hint}", project=name)

    def _sign_project(self, name: str) -> Path:
        account = self._identity(f"projects/{name}.nk", KeyKind.ACCOUNT)
        # Without storage limits an account has no JetStream of its own.
        claims = {
            "type": "account",
            "version": 2,
            "limits": _ACCOUNT_LIMITS | {"conn": PROJECT_CONNECTIONS_MAX},
            "imports": project_imports(name, self._services.public_key),
        }
        credentials = self._user(
            f"projects/{name}", name, project_permissions(name), account, key=f"{name}.user.nk"
        )
        # The account's claims come last: their file is what makes the project exist.
        self._signed(f"projects/{name}.jwt", account.public_key, name, claims, self._operator)
        return credentials

    # --- The server ---------------------------------------------------------------------------

    def server_config(self, resolver_directory: str | os.PathLike[str]) -> str:
        """Return the part of a server's configuration that makes it obey this operator.

        Args:
            resolver_directory: where the server keeps the accounts that it is told of; its own.
        """
        preload = {
            self._system.public_key: (self.path / "system.jwt").read_text(encoding="ascii"),
            self._services.public_key: (self.path / "services.jwt").read_text(encoding="ascii"),
        }
        for name in self.projects():
            token = self.project_token(name)
            preload[decode_claims(token, self._operator.public_key)["sub"]] = token
        lines = "\n".join(f"  {key}: {token}" for key, token in preload.items())
        operator = (self.path / "operator.jwt").read_text(encoding="ascii")
        return (
            # A service's permissions travel in its CONNECT line, which may have 4 KiB by default.
            "max_control_line: 65536\n"
            f"operator: {operator}\n"
            f"system_account: {self._system.public_key}\n"
            "resolver {\n"
            "  type: full\n"
            f"  dir: {_quoted(str(resolver_directory))}\n"
            "  allow_delete: true\n"
            '  interval: "2m"\n'
            # How long a connection with an account that nobody knows waits for its refusal.
            '  timeout: "500ms"\n'
            "}\n"
            f"resolver_preload {{\n{lines}\n}}\n"
        )

    # --- Files --------------------------------------------------------------------------------

    def _identity(self, name: str, kind: KeyKind) -> Identity:
        """Return the key in a file; make it when missing. Of two makers the first one's stays."""
        path = self.path / name
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                _write(path, Identity.new(kind).seed, replace=False)
        return Identity(path.read_text(encoding="ascii").strip())

    def _signed(
        self, name: str, subject: str, title: str, nats: dict[str, Any], issuer: Identity
    ) -> str:
        """Return the claims in a file; sign them anew when they do not say ``nats``."""
        path = self.path / name
        if path.exists():
            token = path.read_text(encoding="ascii")
            claims = decode_claims(token, issuer.public_key)
            if claims["nats"] == nats and claims["sub"] == subject:
                return token
        token = encode_claims(subject, title, nats, issuer)
        _write(path, token)
        return token

    def _user(
        self,
        stem: str,
        name: str,
        permissions: dict[str, Any],
        account: Identity,
        *,
        key: str = "",
    ) -> Path:
        """Return a user's credentials file; renew it when it grants other permissions."""
        path = self.path / f"{stem}.creds"
        folder = path.parent.name
        user = self._identity(f"{folder}/{key}" if key else f"{stem}.nk", KeyKind.USER)
        nats = {"type": "user", "version": 2} | _UNLIMITED | permissions
        if path.exists():
            with contextlib.suppress(DsecError, IndexError):
                token = path.read_text(encoding="ascii").splitlines()[1]
                claims = decode_claims(token, account.public_key)
                if claims["nats"] == nats and claims["sub"] == user.public_key:
                    return path
        token = encode_claims(user.public_key, name, nats, account)
        _write(path, credentials_text(token, user))
        return path


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _write(path: Path, text: str, *, replace: bool = True) -> None:
    """Write a file whole or not at all; without ``replace`` an existing one is an error."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            Path(temporary).replace(path)
        else:
            os.link(temporary, path)
            Path(temporary).unlink()
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
