"""The connection under the bus: waiting for an absent server, coming back after a loss."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import nats.errors
import structlog

from dsec_common.bus_client import DirectClient
from dsec_common.bus_requests import ReplyInbox
from dsec_common.bus_types import SERVICE_INBOX_PREFIX, BusConfig
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable

_log: Final = structlog.get_logger(__name__)

#: How often a wait for an absent server says so again.
_REPEAT_LOG_S: Final = 10.0
#: Published while disconnected: kept up to this size and sent when the server is back.
_OUTBOUND_BUFFER_BYTES: Final = 8 * 1024 * 1024
#: A server that says nothing at all for twice this long counts as lost.
_PING_INTERVAL_S: Final = 10
_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})


class Connection:
    """One connection to NATS and the inbox of its replies. It reconnects for ever."""

    def __init__(self, config: BusConfig) -> None:
        self.config = config
        self.client = DirectClient()
        self.inbox: ReplyInbox
        self.on_disconnect: list[Callable[[], None]] = []
        self.on_reconnect: list[Callable[[], None]] = []
        self._opened = False
        self._closing = False
        self._waiting_since = 0.0
        self._last_error = ""
        self._last_logged_at = 0.0
        self._refused = False

    @property
    def connected(self) -> bool:
        """Whether the server is reachable now."""
        return bool(self.client.is_connected)

    async def open(self) -> None:
        """Connect; see ``Bus.connect``."""
        config = self.config
        _check_servers(config.servers)
        prefix = config.inbox_prefix or _inbox_prefix_in(config.credentials_path)
        self._waiting_since = time.monotonic()
        try:
            async with asyncio.timeout(config.connect_timeout_s or None):
                await self.client.connect(
                    servers=list(config.servers),
                    name=config.name,
                    user_credentials=config.credentials_path or None,
                    inbox_prefix=prefix,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=config.reconnect_wait_s,  # type: ignore[arg-type]
                    connect_timeout=2,
                    ping_interval=_PING_INTERVAL_S,
                    pending_size=_OUTBOUND_BUFFER_BYTES,
                    error_cb=self._failed,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._reconnected,
                    closed_cb=self._closed,
                )
        except TimeoutError as error:
            await self.close()
            raise self._connect_error() from error
        except BaseException:
            await self.close()
            raise
        if self._last_error:
            _log.info("NATS is there", servers=config.servers)
        self._last_error = ""
        self.inbox = ReplyInbox(self.client, prefix)
        await self.inbox.open()
        self._opened = True

    def _connect_error(self) -> DsecError:
        servers = ", ".join(self.config.servers)
        if self._refused and not self.config.credentials_path:
            return DsecError(
                ErrorCode.DENIED,
                f"NATS at {servers} lets nobody in without credentials; name a project's "
                "credentials file, as `dsec project list` shows them",
            )
        if self._refused:
            return DsecError(
                ErrorCode.DENIED,
                f"NATS at {servers} refuses the credentials {self.config.credentials_path!r}; use "
                "the file that this server's operator signed",
            )
        return unavailable(
            f"no NATS server at {servers} within {self.config.connect_timeout_s:g} s "
            f"({self._last_error or 'no answer'}); start one or correct the address"
        )

    async def close(self) -> None:
        """Close at once; nothing is sent any more."""
        self._closing = True
        # RuntimeError is uvloop's: the server's end went while the last bytes were being written.
        with contextlib.suppress(nats.errors.Error, OSError, RuntimeError):
            await self.client.close()
        # A close that failed half-way has not come to these.
        for subscription in self.client._subs.values():  # noqa: SLF001  it offers no other way
            subscription._stop_processing()  # noqa: SLF001  same
        # The client cancels its tasks without awaiting them; let them end before the loop may.
        await asyncio.sleep(0)

    async def _failed(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if "permissions violation" in text.lower():
            _log.warning("NATS refused", error=text)
            if self._opened:
                self.inbox.permission_denied(text)
            return
        self._refused |= "authorization violation" in text.lower()
        now = time.monotonic()
        if text != self._last_error or now - self._last_logged_at > _REPEAT_LOG_S:
            self._last_error, self._last_logged_at = text, now
            _log.warning(
                "waiting for NATS",
                servers=self.config.servers,
                error=text,
                waited_s=round(now - self._waiting_since, 1),
            )

    async def _disconnected(self) -> None:
        self._waiting_since = time.monotonic()
        if not self._opened:
            return
        self.inbox.connection_lost()
        if self._closing:
            return
        _log.warning("the connection to NATS is lost; reconnecting")
        for callback in self.on_disconnect:
            callback()

    async def _reconnected(self) -> None:
        _log.info("the connection to NATS is back", servers=self.config.servers)
        self._last_error = ""
        for callback in self.on_reconnect:
            callback()

    async def _closed(self) -> None:
        if not self._closing:
            _log.error("NATS closed the connection for good", error=str(self.client.last_error))


class _Permissions(msgspec.Struct, frozen=True):
    allow: tuple[str, ...] = ()


class _UserPart(msgspec.Struct, frozen=True):
    sub: _Permissions = _Permissions()


class _UserClaims(msgspec.Struct, frozen=True):
    """A user's JWT, as far as the client needs it about itself; the server checks the rest."""

    nats: _UserPart = _UserPart()


def _check_servers(servers: tuple[str, ...]) -> None:
    # The library waits for ever for what is no address, or dies of it in its own clean-up.
    if not servers:
        raise invalid("no address of a NATS server was given; write nats://host:port")
    for server in servers:
        try:
            url = urlsplit(server if "://" in server else f"nats://{server}")
            is_address = url.scheme in _SCHEMES and bool(url.hostname) and url.port != 0
        except ValueError:  # a port or an IPv6 address that is none
            is_address = False
        if not is_address or any(character.isspace() for character in server):
            raise invalid(f"{server!r} is no address of a NATS server; write nats://host:port")


def _inbox_prefix_in(credentials_path: str) -> str:
    """Return the inbox prefix that the user in this credentials file may subscribe to.

    Raises:
        DsecError: ``invalid`` when the file cannot be read or holds no user's JWT.
    """
    if not credentials_path:
        return SERVICE_INBOX_PREFIX
    try:
        lines = Path(credentials_path).read_text(encoding="ascii").splitlines()
        token = lines[lines.index("-----BEGIN NATS USER JWT-----") + 1]
        body = token.split(".")[1]
        claims = msgspec.json.decode(
            base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=_UserClaims
        )
    except (OSError, ValueError, IndexError) as error:
        raise invalid(
            f"cannot read the credentials file {credentials_path} ({error}); it is the .creds file "
            "of a project or a service"
        ) from error
    for pattern in claims.nats.sub.allow:
        if pattern.startswith("_INBOX") and pattern.endswith(".>"):
            return pattern.removesuffix(".>")
    return "_INBOX"
