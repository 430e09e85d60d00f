"""Headers on the wire: trace context, service errors (NATS ADR-32), who to answer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from dsec_common.bus_types import (
    REPLY_TO_HEADER,
    REPLY_TYPE_HEADER,
    ReplyAddress,
    content_type_of,
)
from dsec_common.errors import STATUS_OF, DsecError, ErrorCode
from dsec_common.wire.base import CONTENT_TYPE_HEADER, ErrorReply, decode

TRACEPARENT: Final = "traceparent"
SERVICE_ERROR: Final = "Nats-Service-Error"
SERVICE_ERROR_CODE: Final = "Nats-Service-Error-Code"

_TRACEPARENT_SHAPE: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
#: Which code an error has whose body is not ours: the first of each status is the general one.
_CODE_OF_STATUS: Final = {status: code for code, status in reversed(STATUS_OF.items())}

current_traceparent: Final[ContextVar[str]] = ContextVar("current_traceparent", default="")
"""The trace context of whatever is being served now; empty outside a request."""


def new_traceparent() -> str:
    """Return the start of a new trace. Identifiers need to be unlike each other, not secret."""
    return f"00-{random.getrandbits(128) or 1:032x}-{random.getrandbits(64) or 1:016x}-01"


def next_traceparent(received: str | None) -> str:
    """Return the trace context of the hop after ``received``: its trace, a span of our own.

    What is not a well-formed version 00 context is replaced by a new trace, as W3C asks.
    """
    if not received or not _TRACEPARENT_SHAPE.fullmatch(received):
        return new_traceparent()
    return f"{received[:36]}{random.getrandbits(64) or 1:016x}{received[52:]}"


def outgoing(
    content_type: str, extra: Mapping[str, str] | None = None, caller: ReplyAddress | None = None
) -> dict[str, str]:
    """Return the headers of a message that is about to leave."""
    headers = {
        CONTENT_TYPE_HEADER: content_type,
        TRACEPARENT: current_traceparent.get() or new_traceparent(),
    }
    if caller is not None:
        headers.update(handed_on(caller))
    if extra:
        headers.update(extra)
    return headers


def handed_on(caller: ReplyAddress) -> dict[str, str]:
    """Return the headers that have whoever serves a message answer ``caller``."""
    if not caller.subject:
        return {}
    return {REPLY_TO_HEADER: caller.subject, REPLY_TYPE_HEADER: caller.content_type}


def error_headers(error: DsecError) -> dict[str, str]:
    """Return the ADR-32 headers of ``error``: its code and message, and its number."""
    return {
        SERVICE_ERROR: f"{error.code}: {error.message}",
        SERVICE_ERROR_CODE: str(STATUS_OF[error.code]),
    }


def raise_service_error(headers: Mapping[str, str] | None, body: bytes) -> None:
    """Raise the error that a reply carries; return when it carries none.

    Raises:
        DsecError: as the service raised it, or made from the headers when the body is not ours.
    """
    if not headers or SERVICE_ERROR not in headers:
        return
    try:
        error = decode(body, ErrorReply, content_type_of(headers)).to_error()
    except DsecError:
        status = headers.get(SERVICE_ERROR_CODE, "")
        code = _CODE_OF_STATUS.get(int(status) if status.isdigit() else 500, ErrorCode.INTERNAL)
        raise DsecError(code, headers[SERVICE_ERROR]) from None
    raise error


def handed_on_caller(headers: Mapping[str, str]) -> ReplyAddress | None:
    """Return the caller that a service named when it handed a request on; ``None`` when it did not.

    Call it only for subjects that none but services can reach.
    """
    subject = headers.get(REPLY_TO_HEADER, "")
    if not subject:
        return None
    return ReplyAddress(
        subject, content_type_of({CONTENT_TYPE_HEADER: headers.get(REPLY_TYPE_HEADER, "")})
    )
