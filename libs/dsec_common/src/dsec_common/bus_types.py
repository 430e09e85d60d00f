"""What callers of the bus hold in their hands: its configuration, a request, the shape of a stream.

Nothing here imports the transport, so that a pure core may name these types.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec

from dsec_common.wire.base import CONTENT_TYPE_HEADER, JSON, MSGPACK, Message

MessageT = TypeVar("MessageT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)

#: Where an account's imported requests expect their answers; the server makes these subjects.
IMPORTED_REPLY_PREFIX: Final = "_R_."
#: Under it lie the inboxes of the services themselves.
SERVICE_INBOX_PREFIX: Final = "_INBOX.dsec"
#: The header in which a caller's reply subject travels when a service hands a request on.
REPLY_TO_HEADER: Final = "reply-to"
#: The encoding that the caller behind :data:`REPLY_TO_HEADER` reads.
REPLY_TYPE_HEADER: Final = "reply-content-type"
#: Only services reach subjects below it, so only there may a request name another's reply subject.
SERVICES_ONLY_PREFIX: Final = "dsec.v1._sys."


class BusConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a process reaches NATS.

    Attributes:
        servers: URLs such as ``nats://127.0.0.1:4222``; any one that answers will do.
        credentials_path: the credentials file; empty connects without any.
        name: what the server's own monitoring calls this connection.
        inbox_prefix: below it this process receives replies. Empty takes what the credentials
            allow, which is right everywhere but on a server without accounts.
        connect_timeout_s: how long the first connection may take; 0 waits for ever.
        reconnect_wait_s: pause between two attempts on the same server.
        reply_prefixes: a request whose reply subject starts with none of these is not served.
    """

    servers: tuple[str, ...] = ("nats://127.0.0.1:4222",)
    credentials_path: str = ""
    name: str = "dsec"
    inbox_prefix: str = ""
    connect_timeout_s: float = 30.0
    reconnect_wait_s: float = 0.2
    reply_prefixes: tuple[str, ...] = (IMPORTED_REPLY_PREFIX, f"{SERVICE_INBOX_PREFIX}.")


class ReplyAddress(msgspec.Struct, frozen=True):
    """Where a caller waits and what it reads. An empty subject means that nobody waits."""

    subject: str = ""
    content_type: str = MSGPACK


class Request(msgspec.Struct, Generic[MessageT], frozen=True):
    """One message as its handler sees it.

    Attributes:
        message: the decoded body.
        subject: the whole subject it came on.
        tokens: the subject's tokens.
        headers: the headers as sent; trust none of them beyond what this class reads.
        reply_to: where what the handler returns is sent.
        caller: the party at the start of the story. When a service handed the request on, it is the
            original caller; otherwise the same as ``reply_to``.
        content_type: what ``reply_to`` reads, and what the body was written in.
        traceparent: the W3C trace context of this hop.
        delivery: how often JetStream has delivered this message, from 1; 0 outside streams.
        sequence: the message's number in its stream; 0 outside streams.
        stored_at: Unix time at which the stream took the message; 0 outside streams.
        waited_s: how long it waited in this process for its handler.
    """

    message: MessageT
    subject: str
    tokens: tuple[str, ...]
    headers: Mapping[str, str]
    reply_to: str
    caller: ReplyAddress
    content_type: str
    traceparent: str
    delivery: int = 0
    sequence: int = 0
    stored_at: float = 0.0
    waited_s: float = 0.0

    @property
    def project(self) -> str:
        """The project in the subject. Accounts guarantee it: a message's body could not."""
        return self.tokens[2] if len(self.tokens) > 2 else ""  # noqa: PLR2004  dsec.v1.<project>


Handler = Callable[[Request[MessageT]], Awaitable[Message | None]]
"""Serves a request. ``None`` says that someone else will answer the caller."""

EventHandler = Callable[[Request[MessageT]], Awaitable[None]]
"""Sees an event or a stream's message; a ``DsecError`` decides what becomes of the latter."""


def content_type_of(headers: Mapping[str, str] | None) -> str:
    """Return the encoding that ``headers`` name; msgpack when they name none that is known."""
    if not headers:
        return MSGPACK
    named = headers.get(CONTENT_TYPE_HEADER) or headers.get("Content-Type") or MSGPACK
    return JSON if named.partition(";")[0].strip().lower() == JSON else MSGPACK


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A JetStream stream as one service wants it.

    Attributes:
        name: the stream's name.
        subjects: the patterns it captures.
        work_queue: each message is kept until one consumer acknowledges it, then deleted.
        in_memory: kept in the server's memory only; lost when it stops.
        max_age_s: messages older than this are dropped; 0 keeps them.
        max_bytes: the stream's size limit; -1 for none.
        max_messages_per_subject: the limit for each concrete subject; -1 for none.
        refuse_when_full: at a limit new messages are refused (``exhausted``) instead of old ones
            dropped; for the limit per subject too, so that no project can fill another's share.
        duplicate_window_s: how long a message id is known. All who publish to the stream share
            the ids: where projects do, keep it at the smallest (0.1) and know duplicates
            otherwise, or one project could suppress another's message by guessing its id.
        message_ttl: whether a message may carry a time to live of its own.
        replicas: how many servers keep a copy.
        bucket: the subjects are the keys of a key-value bucket.
    """

    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    in_memory: bool = False
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_messages_per_subject: int = -1
    refuse_when_full: bool = False
    duplicate_window_s: float = 120.0
    message_ttl: bool = False
    replicas: int = 1
    bucket: bool = False


@dataclass(slots=True)
class ServeStats:
    """What one subscription has done since it began."""

    requests: int = 0
    errors: int = 0
    refused: int = 0
    processing_time_s: float = 0.0
    last_error: str = ""
    in_flight: int = field(default=0)
