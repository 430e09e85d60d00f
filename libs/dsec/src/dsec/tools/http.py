"""``http_client``: requests over HTTP and HTTPS, bounded in time and size."""

from __future__ import annotations

import base64
import contextlib
import email.message
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, Protocol, cast

from dsec.tools.deadlines import Deadline
from dsec.tools.tool import Tool, tool_call
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable

BODY_MAX_BYTES: Final = 16 * 1024 * 1024
"""Of a response; a longer one is refused and not cut."""

_TIMEOUT_S: Final = 30.0
_PIECE_BYTES: Final = 64 * 1024
#: What must not follow a redirect to somebody else.
_SECRET_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization"})


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer, whatever its status.

    Attributes:
        status_code: such as 200.
        headers: by name; upper and lower case are the same.
        content: the body.
        url: where it came from, after redirects.
    """

    status_code: int
    headers: email.message.Message
    content: bytes
    url: str

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status_code < http.client.BAD_REQUEST

    @property
    def text(self) -> str:
        """The body as text, in the character set that it names, else UTF-8."""
        charset = self.headers.get_content_charset() or "utf-8"
        try:
            return self.content.decode(charset, "replace")
        except LookupError:
            return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Return what the body says.

        Raises:
            DsecError: ``invalid`` when it is no JSON.
        """
        try:
            return json.loads(self.content)
        except ValueError as error:
            raise invalid(f"the answer of {shown(self.url)} is no JSON: {error}") from None


class Body(Protocol):
    """An answer that is being read."""

    status: int
    headers: email.message.Message
    url: str
    length: int | None
    """How much is still to come, as far as its beginning said."""

    def read1(self, count: int = -1, /) -> bytes:
        """Return what there is, at most ``count`` bytes; nothing at the end."""
        ...

    def readline(self, limit: int = -1, /) -> bytes:
        """Return the next line."""
        ...


class HttpClient(Tool):
    """``http_client``. It needs ``network_access``.

    In a sandbox whose contract names it the node makes its calls, and the sandbox needs no network;
    a request has at most 190 KiB then.

    A status of any kind is an answer and no error. Proxies and certificates are those of the
    environment (``HTTPS_PROXY``, ``NO_PROXY``, ``SSL_CERT_FILE``).

    Errors of every call, as :class:`DsecError`: ``invalid`` for what is no HTTP address,
    ``unavailable`` when nobody answers, ``timeout`` when the answer is not whole in time,
    ``exhausted`` when it is longer than 16 MiB, and those of the contract.
    """

    @tool_call("network_access")
    def get(
        self,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Response:
        """Return what ``url`` answers to GET; ``params`` are added to its query."""
        url = _with_query(url, params)
        return self._request("GET", url, headers=headers, timeout_s=timeout_s)

    @tool_call("network_access")
    def post(
        self,
        url: str,
        *,
        json: Any = None,
        data: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Response:
        """Return what ``url`` answers to POST with ``json``, or ``data`` as it is."""
        sent, body = _body(json, data, headers)
        return self._request("POST", url, headers=sent, timeout_s=timeout_s, body=body)

    @tool_call("network_access")
    def request(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        data: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Response:
        """Return what ``url`` answers to any method."""
        sent, body = _body(json, data, headers)
        url = _with_query(url, params)
        return self._request(method, url, headers=sent, timeout_s=timeout_s, body=body)

    def _request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        body: bytes | None = None,
    ) -> Response:
        self.note(url=shown(url), method=method)
        sent = base64.b64encode(body or b"").decode()
        asked = {"url": url, "method": method, "headers": dict(headers or {}), "body": sent}
        by_node = self.ask_node({**asked, "timeout_s": timeout_s}, timeout_s)
        if by_node is not None:
            return self._answered(*by_node)
        with opened(method, url, headers or {}, body, timeout_s) as answer:
            content = whole(answer)
            self.note(status=str(answer.status), bytes=str(len(content)))
            return Response(
                status_code=answer.status, headers=answer.headers, content=content, url=answer.url
            )

    def _answered(self, told: Mapping[str, Any], content: bytes) -> Response:
        self.note(status=str(told["status"]), bytes=str(len(content)))
        headers = email.message.Message()
        for name, value in told["headers"]:
            headers[name] = value
        return Response(
            status_code=told["status"], headers=headers, content=content, url=told["url"]
        )


@contextlib.contextmanager
def opened(
    method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
) -> Iterator[Body]:
    """Yield the answer to a request, to be read within.

    Raises:
        DsecError: as :class:`HttpClient` says, also for what happens while it is read.
    """
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise invalid(f"{shown(url)!r} is no address of HTTP or HTTPS")
    where = shown(url)
    try:
        request = urllib.request.Request(url, body, dict(headers), method=method)  # noqa: S310  checked
        with (
            Deadline(timeout_s) as deadline,
            contextlib.closing(_answer(request, timeout_s, deadline)) as answer,
        ):
            yield cast("Body", answer)
    except TimeoutError as error:
        raise _late(where, timeout_s) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _late(where, timeout_s) from error
        raise unavailable(f"{where} cannot be reached: {error.reason}") from error
    except (http.client.InvalidURL, UnicodeError) as error:
        raise invalid(f"{where!r} is no address: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise unavailable(f"{where} broke off: {type(error).__name__}: {error}") from error


def whole(answer: Body, limit_bytes: int = BODY_MAX_BYTES) -> bytes:
    """Return a body, to be called while it is open.

    Raises:
        DsecError: ``exhausted`` when it is longer than the limit.
    """
    body = bytearray()
    while piece := answer.read1(_PIECE_BYTES):
        body += piece
        if len(body) > limit_bytes:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the answer of {shown(answer.url)} is longer than {limit_bytes} bytes",
                retryable=False,
            )
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return bytes(body)


def shown(url: str) -> str:
    """Return an address without what may be secret in it: user, password, query."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows as browsers do, and takes no secrets to another host."""

    def redirect_request(  # noqa: PLR0917  the library's own
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and _origin(newurl) != _origin(req.full_url):
            for name in list(following.headers):
                if name.lower() in _SECRET_HEADERS:
                    del following.headers[name]
        return following


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Takes a status as an answer; redirects alone are followed."""

    def http_response(
        self, request: urllib.request.Request, response: http.client.HTTPResponse
    ) -> http.client.HTTPResponse:
        if response.status in {301, 302, 303, 307, 308} and "location" in response.headers:
            return cast("http.client.HTTPResponse", super().http_response(request, response))
        return response

    https_response = http_response


def _answer(
    request: urllib.request.Request, timeout_s: float, deadline: Deadline
) -> http.client.HTTPResponse:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        *deadline.handlers(),
        _Redirects(),
        _AnyStatus(),
    ):
        opener.add_handler(handler)
    try:
        return cast("http.client.HTTPResponse", opener.open(request, timeout=timeout_s))
    except urllib.error.HTTPError as error:  # a redirect that cannot be followed
        return cast("http.client.HTTPResponse", error)


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _late(where: str, timeout_s: float) -> DsecError:
    return DsecError(ErrorCode.TIMEOUT, f"{where} did not answer within {timeout_s:g} s")


def _with_query(url: str, params: Mapping[str, Any] | None) -> str:
    if not params:
        return url
    parts = urllib.parse.urlsplit(url)
    query = "&".join(filter(None, (parts.query, urllib.parse.urlencode(params, doseq=True))))
    return urllib.parse.urlunsplit(parts._replace(query=query))


def _body(
    document: Any, data: bytes | str | None, headers: Mapping[str, str] | None
) -> tuple[dict[str, str], bytes | None]:
    sent = dict(headers or {})
    if document is None:
        return sent, data.encode("utf-8") if isinstance(data, str) else data
    if data is not None:
        raise invalid("give a request json or data, not both")
    if "content-type" not in {name.lower() for name in sent}:
        sent["Content-Type"] = "application/json"
    try:
        return sent, json.dumps(document).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise invalid(f"the request's json is none: {error}") from None
