"""The one way to NATS: requests, services, events, streams and key-value buckets.

One :class:`Bus` per process. It owns the connection, every task that serves a message, the bound on
how many run, and the order in which all of it stops; services never touch the NATS client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import nats.errors
import structlog

from dsec_common.bus_connection import Connection
from dsec_common.bus_discovery import Discovery
from dsec_common.bus_headers import (
    current_traceparent,
    outgoing,
    raise_service_error,
)
from dsec_common.bus_intake import Held
from dsec_common.bus_kv import Entry, KeyValue
from dsec_common.bus_objects import ObjectBucket
from dsec_common.bus_order import flush
from dsec_common.bus_reading import read_messages
from dsec_common.bus_requests import Which, to_dsec_error
from dsec_common.bus_sending import Sending
from dsec_common.bus_serving import EventSubscription, ReplyGuard, Served
from dsec_common.bus_streams import Consumer, Streams
from dsec_common.bus_types import (
    BusConfig,
    EventHandler,
    Handler,
    MessageT,
    ReplyAddress,
    ReplyT,
    Request,
    ServeStats,
    StreamSpec,
    content_type_of,
)
from dsec_common.errors import DsecError, invalid
from dsec_common.wire.base import MSGPACK, Message, decode, encode

__all__ = [
    "Bus",
    "BusConfig",
    "Consumer",
    "Entry",
    "EventHandler",
    "Handler",
    "KeyValue",
    "ReplyAddress",
    "Request",
    "ServeStats",
    "Served",
    "StreamSpec",
    "current_traceparent",
]

_log: Final = structlog.get_logger(__name__)

DEFAULT_REQUEST_TIMEOUT_S: Final = 5.0
DEFAULT_DRAIN_TIMEOUT_S: Final = 10.0


class Bus:
    """A connection to NATS and everything that this process does over it.

    Make one with :meth:`connect`, end it with :meth:`drain` (orderly) or :meth:`close` (at once).
    It reconnects for ever; subscriptions, streams and consumers come back by themselves.
    """

    def __init__(self, connection: Connection) -> None:
        self.config = connection.config
        self._connection = connection
        self._client = connection.client
        self._inbox = connection.inbox
        self._guard = ReplyGuard(connection.config.reply_prefixes)
        self._sending = Sending(self._client, self._guard)
        self._streams = Streams(self._client, self._inbox, self._guard)
        connection.on_reconnect.append(self._streams.reconnected)
        self._served: list[Served[Any]] = []
        self._held = Held()
        self._events: list[EventSubscription[Any]] = []
        self._discovery: Discovery | None = None

    @classmethod
    async def connect(cls, config: BusConfig) -> Bus:
        """Return a connected bus; wait for an absent server, saying so in the log.

        Raises:
            DsecError: ``unavailable`` when no server answered within ``connect_timeout_s``,
                ``denied`` when one refused the credentials all that time, ``invalid`` when the
                credentials file cannot be read or an address is none.
        """
        connection = Connection(config)
        await connection.open()
        return cls(connection)

    @property
    def connected(self) -> bool:
        """Whether the server is reachable now."""
        return self._connection.connected

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` each time the connection is lost."""
        self._connection.on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` each time the connection is back, with all subscriptions."""
        self._connection.on_reconnect.append(callback)

    # --- Asking -------------------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        message: Message,
        reply_type: type[ReplyT],
        *,
        timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
        caller: ReplyAddress | None = None,
    ) -> ReplyT:
        """Send ``message`` and return the reply; never retries by itself.

        Args:
            subject: from ``subjects.py``.
            message: the body.
            reply_type: what the reply decodes as; a union is fine.
            timeout_s: how long to wait.
            headers: further headers.
            caller: hand this caller's address on, so that the service may answer it directly.

        Raises:
            DsecError: the service's own error unchanged; ``unavailable`` when nobody serves the
                subject or the connection is lost meanwhile; ``timeout``; ``denied``; ``invalid``.
        """
        reply = await self._inbox.request(
            subject, encode(message), outgoing(MSGPACK, headers, caller), timeout_s
        )
        raise_service_error(reply.headers, reply.data)
        return decode(reply.data, reply_type, content_type_of(reply.headers))

    def give_up(self, subject: Which, error: Callable[[], DsecError]) -> None:
        """Fail all requests that wait to a subject, or to all that match; they may yet be done."""
        self._inbox.give_up(subject, error)

    async def request_raw(
        self, subject: str, body: bytes, *, timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    ) -> bytes:
        """Send bytes that are no message of ours and return the reply's; for NATS's own services.

        Raises:
            DsecError: ``unavailable``, ``timeout``, ``denied`` or ``invalid``.
        """
        return bytes((await self._inbox.request(subject, body, None, timeout_s)).data)

    async def publish(
        self, subject: str, message: Message, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send an event: at most once, to whoever listens now.

        Raises:
            DsecError: ``unavailable`` when disconnected with a full buffer; ``invalid``.
        """
        await self._sending.send(subject, encode(message), outgoing(MSGPACK, headers))

    async def reply(self, to: ReplyAddress, message: Message) -> None:
        """Answer a caller whose request was handed on, in the encoding that it reads.

        The server forwards one answer to each request, so exactly one service must give it.

        Raises:
            DsecError: ``denied`` for a subject that is no reply subject; as :meth:`publish`.
        """
        await self._sending.reply(to, message)

    async def reply_error(self, to: ReplyAddress, error: DsecError) -> None:
        """Answer a caller with ``error``; otherwise as :meth:`reply`."""
        await self._sending.reply(to, error)

    def reply_soon(self, to: ReplyAddress, answer: Message | DsecError) -> None:
        """Answer a caller as :meth:`reply` and :meth:`reply_error`, without waiting.

        What cannot be sent at once, as without a connection, is sent by a task, which logs its
        failure.

        Raises:
            DsecError: ``denied`` for a subject that is no reply subject; ``invalid``.
        """
        self._sending.reply_soon(to, answer)

    # --- Answering ----------------------------------------------------------------------------

    async def serve(
        self,
        subject: str,
        request_type: type[MessageT],
        handler: Handler[MessageT],
        *,
        queue: str = "",
        concurrency: int = 64,
        max_pending: int = 1024,
        at_once: bool = False,
    ) -> Served[MessageT]:
        """Answer requests on ``subject`` with what ``handler`` returns.

        ``None`` from the handler sends nothing: someone else answers. A ``DsecError`` reaches the
        caller unchanged, any other exception as ``internal``. JSON is answered as JSON.

        Args:
            subject: a subject or pattern from ``subjects.py``.
            request_type: what bodies decode as; one that does not is answered ``invalid``.
            handler: runs as a task of its own, with the caller's trace as the current one.
            queue: processes that share a queue name share the requests.
            concurrency: handlers at once.
            max_pending: requests that may wait for one; more are answered ``exhausted``. Of both,
                and of what large requests take of the memory, one project has a part only.
            at_once: ``handler`` waits for nothing, and all else on the connection waits for it: it
                is called without a task, and the bounds do not matter.
        """
        served = Served(
            subject,
            request_type,
            handler,
            concurrency=concurrency,
            max_pending=max_pending,
            send=self._sending.send,
            guard=self._guard,
            held=self._held,
            at_once=at_once,
        )
        # The client's own limits drop silently; ours answer. Reception never waits, so no
        # message stays in the client.
        served.subscription = await self._client.subscribe_directly(
            subject, served.receive, queue=queue
        )
        self._served.append(served)
        return served

    async def subscribe(
        self,
        subject: str,
        message_type: type[MessageT],
        handler: EventHandler[MessageT],
        *,
        queue: str = "",
        max_pending: int = 65_536,
    ) -> EventSubscription[MessageT]:
        """See events on ``subject``, one after the other in the order of arrival.

        A handler that raises is logged and the next event follows. Events beyond ``max_pending``
        that wait for a slow handler are dropped, counted in ``stats.refused`` and logged.
        """
        events = EventSubscription(
            subject, message_type, handler, max_pending=max_pending, guard=self._guard
        )
        events.subscription = await self._client.subscribe_directly(
            subject, events.receive, queue=queue
        )
        events.start()
        self._events.append(events)
        return events

    async def unsubscribe(self, subscription: EventSubscription[Any] | Served[Any]) -> None:
        """End one subscription now; what it has not handled yet is dropped, requests refused."""
        if self.connected:
            with contextlib.suppress(nats.errors.Error):
                await subscription.stop_accepting(self._client)
        await subscription.finish(0.0)
        if isinstance(subscription, Served):
            self._served.remove(subscription)
        else:
            self._events.remove(subscription)

    async def register(self, name: str, version: str, description: str) -> None:
        """Let ``nats micro`` find this service and read its statistics.

        Subjects served later are listed too.

        Raises:
            DsecError: ``invalid`` when called twice.
        """
        if self._discovery is not None:
            raise invalid(f"this bus is already registered as {self._discovery.name}")
        self._discovery = Discovery(name, version, description, self._served, self._sending.send)
        await self._discovery.open(self._client, self._guard)

    # --- Streams and buckets ------------------------------------------------------------------

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create the stream, or change it to ``spec``; done again after each reconnection.

        Raises:
            DsecError: ``unavailable`` when JetStream does not answer; ``invalid`` when it refuses.
        """
        await self._streams.ensure(spec)

    async def js_publish(
        self,
        subject: str,
        message: Message,
        *,
        message_id: str = "",
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
        ttl_s: float = 0.0,
        timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
    ) -> int:
        """Append ``message`` to the stream that captures ``subject``; return its sequence number.

        With a ``message_id`` it is tried again until ``timeout_s``, since the stream knows
        duplicates; without one it is sent once.

        Args:
            subject: from ``subjects.py``.
            message: the body.
            message_id: known again within the stream's ``duplicate_window_s``.
            expected_last_sequence: append only if this is the stream's last sequence.
            expected_last_subject_sequence: append only if this is the subject's last sequence.
            ttl_s: drop the message after this many whole seconds; 0 keeps it.
            timeout_s: how long to wait for the acknowledgement.

        Raises:
            DsecError: ``conflict`` when the expected sequence is not the last; ``exhausted`` when
                the stream is full; ``unavailable`` or ``timeout`` without an acknowledgement.
        """
        return await self._streams.publish(
            subject,
            encode(message),
            outgoing(MSGPACK),
            message_id=message_id,
            expected_last_sequence=expected_last_sequence,
            expected_last_subject_sequence=expected_last_subject_sequence,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
        )

    async def read(self, stream: str, subject: str, first: int) -> list[tuple[int, bytes]]:
        """Return the next messages of a subject: see :func:`read_messages`."""
        return await read_messages(self._inbox, stream, subject, first)

    async def stored(self, stream: str, subject: str) -> int:
        """Return how many messages a stream holds on a subject."""
        return await self._streams.stored(stream, subject)

    async def consume(
        self,
        stream: str,
        durable: str,
        message_type: type[MessageT],
        handler: EventHandler[MessageT],
        *,
        filter_subject: str = "",
        max_in_flight: int = 64,
        ack_wait_s: float = 10.0,
        max_deliver: int = -1,
    ) -> Consumer[MessageT]:
        """Hand each message of a stream to ``handler`` until it is done with it.

        A return acknowledges; a retryable ``DsecError`` has it delivered again after the error's
        ``retry_after_s``; any other ``DsecError`` ends it; an unexpected exception has it delivered
        again. A handler may take longer than ``ack_wait_s``: the server is told that it is at work.
        Each message is handled at least once: a crash before the acknowledgement repeats it.

        Args:
            stream: its name; it need not exist yet.
            durable: consumers of the same name share the messages.
            message_type: what bodies decode as; one that does not is ended.
            handler: runs as a task of its own.
            filter_subject: only messages on this subject or pattern.
            max_in_flight: messages in handlers at once.
            ack_wait_s: a message that a crash or a lost connection swallowed comes again this much
                later.
            max_deliver: deliveries at most; -1 for no limit.
        """
        return await self._streams.consume(
            stream,
            durable,
            message_type,
            handler,
            filter_subject=filter_subject,
            max_in_flight=max_in_flight,
            ack_wait_s=ack_wait_s,
            max_deliver=max_deliver,
        )

    async def kv(
        self,
        bucket: str,
        message_type: type[MessageT],
        *,
        ttl_s: float = 0.0,
        history: int = 1,
        in_memory: bool = False,
        replicas: int = 1,
        max_bytes: int = -1,
    ) -> KeyValue[MessageT]:
        """Return the bucket, created when missing; created again if a server loses it.

        Args:
            bucket: letters, digits, hyphens and underscores.
            message_type: what values decode as.
            ttl_s: entries vanish this long after their last change; 0 keeps them.
            history: how many values per key are kept.
            in_memory: kept in the server's memory only.
            replicas: how many servers keep a copy.
            max_bytes: a value beyond this is refused as ``exhausted``; -1 for no limit.
        """
        spec = KeyValue.stream_spec(
            bucket,
            ttl_s=ttl_s,
            history=history,
            in_memory=in_memory,
            replicas=replicas,
            max_bytes=max_bytes,
        )
        await self._streams.ensure(spec)
        return KeyValue(self._client, self._streams, bucket, message_type)

    async def objects(self, bucket: str, *, replicas: int = 1, max_bytes: int = -1) -> ObjectBucket:
        """Return the bucket of large values, created when missing; ``max_bytes`` as of a bucket."""
        spec = ObjectBucket.stream_spec(bucket, replicas=replicas, max_bytes=max_bytes)
        await self._streams.ensure(spec)
        return ObjectBucket(self._inbox, self._streams, bucket)

    # --- The end ------------------------------------------------------------------------------

    async def flush(self, timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S) -> None:
        """Return when the server has seen everything sent so far, subscriptions included.

        Raises:
            DsecError: ``unavailable`` or ``timeout`` when it does not answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await flush(self._client)
        except (nats.errors.Error, TimeoutError) as error:
            raise to_dsec_error(error, "flush", ", ".join(self.config.servers)) from error

    async def drain(self, timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S) -> None:
        """End in order, so that no accepted request stays without its reply.

        1. Consumers ask for no more messages; subscriptions are withdrawn, and what the server had
           already sent is still taken in.
        2. Handlers finish, within ``timeout_s`` seconds; later ones are cancelled and their callers
           told ``unavailable``, their stream messages left to be delivered again.
        3. Replies and acknowledgements are flushed to the server.
        4. The connection closes. This bus's own requests work until here.

        Without a connection, steps 1 and 3 are skipped: the server already knows that we are gone.
        """
        deadline = time.monotonic() + timeout_s
        if self.connected:
            with contextlib.suppress(TimeoutError, nats.errors.Error):
                async with asyncio.timeout(timeout_s):
                    await self._stop_accepting()
        left_s = max(deadline - time.monotonic(), 0.0)
        counts = await asyncio.gather(
            self._streams.finish(left_s),
            *(served.finish(left_s) for served in self._served),
            *(events.finish(left_s) for events in self._events),
        )
        if sum(counts):
            _log.warning("cancelled what was not done at the end of the drain", count=sum(counts))
        if self.connected:
            await self._sending.finish(max(deadline - time.monotonic(), 0.0))
            with contextlib.suppress(DsecError):
                await self.flush()
        await self.close()

    async def _stop_accepting(self) -> None:
        await asyncio.gather(
            self._streams.stop_accepting(),
            *(served.stop_accepting(self._client) for served in self._served),
            *(events.stop_accepting(self._client) for events in self._events),
        )

    async def close(self) -> None:
        """Close at once; handlers are cancelled and what they would have answered is lost."""
        await self._streams.finish(0.0)
        await asyncio.gather(
            *(served.finish(0.0) for served in self._served),
            *(events.finish(0.0) for events in self._events),
            self._sending.finish(0.0),
        )
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()
