"""Requests over HTTP for tools: each hop checked, bounded in time and size, by the router's way."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.network_policy import Address, Compiled
from dsec_sandboxd.tools.targets import Way, addresses_of

BODY_MAX_BYTES: Final = 16 * 1024 * 1024
"""Of an answer; a longer one is refused when that shows."""

TIMEOUT_MAX_S: Final = 300.0
REDIRECTS_MAX: Final = 10

Part = Callable[[bytes], Awaitable[None]]
"""Takes a piece of an answer on; awaited until there is room for the next one."""

_PIECE_BYTES: Final = 48 * 1024
_HEADERS_MAX_BYTES: Final = 32 * 1024
_METHOD: Final = re.compile(r"[A-Z]{1,20}")
#: CONNECT makes a tunnel, TRACE tells what others added.
_METHODS_NEVER: Final = frozenset({"CONNECT", "TRACE"})
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
#: What says where a request ends and whom it is for is the node's to say: one that is passed to an
#: allowed host must be for that host, and be one request.
_HEADERS_NEVER: Final = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_SECRET_HEADERS: Final = frozenset({"authorization", "cookie"})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_SEE_OTHER: Final = 303
_BECOME_GET: Final = frozenset({301, 302})
_PORTS: Final = {"http": 80, "https": 443}


class HttpArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for.

    Attributes:
        body: in JSON as Base64.
        timeout_s: for all of it, redirects included.
    """

    url: str
    method: str = "GET"
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    body: bytes = b""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_MAX_S)] = 30.0


class HttpAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, but for the body, which was passed on in parts."""

    status: int
    url: str
    headers: list[tuple[str, str]]
    bytes: int


class HttpRequests:
    """Makes requests, each over a connection of its own."""

    def __init__(self, way: Way) -> None:
        """Take the way out."""
        self._way = way
        self._tls: ssl.SSLContext | None = None

    async def ask(self, asked: HttpArguments, policy: Compiled, part: Part) -> HttpAnswer:
        """Make a request, follow where it is sent on to, and pass the body on as it comes.

        Raises:
            DsecError: ``denied`` for a host that the policy does not lead to, also on the way;
                ``invalid`` for what is no request; ``unavailable``, ``timeout``; ``exhausted`` for
                an answer that is too long.
        """
        check_request(asked)
        where = shown(asked.url)
        try:
            async with asyncio.timeout(asked.timeout_s):
                return await self._follow(asked, policy, part)
        except TimeoutError as error:
            told = f"{where} did not answer whole within {asked.timeout_s:g} s"
            raise DsecError(ErrorCode.TIMEOUT, told, retryable=False) from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise invalid(f"{where!r} is no address") from error
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise _unreachable(where, "cannot be reached, or broke off", error) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise _unreachable(where, "gave no answer of HTTP", error) from error

    async def _follow(self, asked: HttpArguments, policy: Compiled, part: Part) -> HttpAnswer:
        url, method, body = _address(asked.url), asked.method, asked.body
        headers = {"Accept-Encoding": "identity", **_cased(asked.headers)}
        for _ in range(REDIRECTS_MAX + 1):
            host, port = url.raw_host or "", url.port or _PORTS[url.scheme]
            addresses = await addresses_of(self._way, policy, host, port)
            async with (
                self._session(addresses) as session,
                session.request(
                    method, url, headers=headers, data=body or None, allow_redirects=False
                ) as answer,
            ):
                location = answer.headers.get("Location", "")
                if answer.status not in _REDIRECTS or not location:
                    return await _passed_on(answer, url, part)
                status = answer.status
            before, url = url, _address(location, url)
            if status == _SEE_OTHER or (status in _BECOME_GET and method == "POST"):
                method, body = ("HEAD" if method == "HEAD" else "GET"), b""
                headers.pop("Content-Type", None)
            if url.origin() != before.origin():
                headers = {
                    name: value
                    for name, value in headers.items()
                    if name.lower() not in _SECRET_HEADERS
                }
        raise unavailable(f"{shown(asked.url)} was sent on more than {REDIRECTS_MAX} times")

    def _session(self, addresses: tuple[Address, ...]) -> aiohttp.ClientSession:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        connector = aiohttp.TCPConnector(
            resolver=_Known(addresses),
            socket_factory=self._sockets_to(addresses),
            use_dns_cache=False,
            force_close=True,
            ssl=self._tls,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, connect=None),
            auto_decompress=False,
            trust_env=False,
        )

    def _sockets_to(self, addresses: tuple[Address, ...]) -> Callable[[Any], socket.socket]:
        """Return what makes sockets to these addresses alone, however the library came by one."""

        def made(info: tuple[Any, ...]) -> socket.socket:
            if ipaddress.ip_address(info[4][0]) not in addresses:
                raise OSError("an address that was not looked at")
            return self._way.tcp_socket(info[0])

        return made


class _Known(AbstractResolver):
    """Answers with addresses that were looked at; nothing is looked up."""

    def __init__(self, addresses: tuple[Address, ...]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        del family
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,  # noqa: PLR2004
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Let go of nothing."""


async def _passed_on(answer: aiohttp.ClientResponse, url: URL, part: Part) -> HttpAnswer:
    count = 0
    async for piece in answer.content.iter_chunked(_PIECE_BYTES):
        count += len(piece)
        if count > BODY_MAX_BYTES:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the answer of {shown(str(url))} is longer than {BODY_MAX_BYTES} bytes",
                retryable=False,
            )
        await part(piece)
    headers = [(str(name), _text(value)) for name, value in answer.headers.items()]
    if sum(len(name) + len(value) for name, value in headers) > _HEADERS_MAX_BYTES:
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"the answer of {shown(str(url))} has headers of more than {_HEADERS_MAX_BYTES} bytes",
            retryable=False,
        )
    bare = url.with_user(None) if url.user else url
    return HttpAnswer(status=answer.status, url=str(bare), headers=headers, bytes=count)


def _text(value: str) -> str:
    """Return a header's value without what is no text, as which the library keeps other bytes."""
    return value.encode("utf-8", "replace").decode("utf-8")


def check_request(asked: HttpArguments) -> None:
    """Refuse what is no request, before anything is counted or connected.

    Raises:
        DsecError: ``invalid``, naming what.
    """
    _address(asked.url)
    if not _METHOD.fullmatch(asked.method) or asked.method in _METHODS_NEVER:
        raise invalid(f"{asked.method[:20]!r} is no method that is passed on")
    for name, value in asked.headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _is_plain(value):
            raise invalid(f"{name[:128]!r} is no header of one line")
        if name.lower() in _HEADERS_NEVER:
            raise invalid(f"the header {name!r} is the node's to say: leave it out")


def shown(url: str) -> str:
    """Return an address without what may be secret in it: user, password, query."""
    try:
        parts = URL(url)
        return str(
            URL.build(
                scheme=parts.scheme,
                host=parts.host or "",
                path=parts.path,
                port=parts.explicit_port,
            )
        )[:1024]
    except ValueError:
        return url.partition("?")[0].rpartition("@")[2][:100]


def _address(text: str, base: URL | None = None) -> URL:
    """Return an address as it is asked for.

    Raises:
        DsecError: ``invalid`` for what is none, or is read in more ways than one.
    """
    try:
        url = URL(text) if base is None else URL(str(base.join(URL(text))))
        fine = "\\" not in text and url.scheme in _PORTS and url.raw_host and url.port
    except ValueError:
        fine = False
    if not fine:
        raise invalid(f"{shown(text)!r} is no address of HTTP or HTTPS")
    return url


def _cased(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers of which those that this module looks at are written as it does."""
    own = {"accept-encoding": "Accept-Encoding", "content-type": "Content-Type"}
    return {own.get(name.lower(), name): value for name, value in headers.items()}


def _is_plain(value: str) -> bool:
    return value.isascii() and all(one == "\t" or one.isprintable() for one in value)


def _unreachable(where: str, what: str, error: Exception) -> DsecError:
    # The error's own text has addresses in it, which are nobody's business inside.
    return DsecError(
        ErrorCode.UNAVAILABLE, f"{where} {what} ({type(error).__name__})", retryable=False
    )
