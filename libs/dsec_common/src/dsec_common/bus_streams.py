"""JetStream: streams that come back, publishing with an acknowledgement, pull consumers."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, Generic

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dsec_common.bus_order import withdraw
from dsec_common.bus_requests import ReplyInbox
from dsec_common.bus_serving import ReplyGuard, read_request
from dsec_common.bus_types import EventHandler, MessageT, ServeStats, StreamSpec
from dsec_common.errors import DsecError, ErrorCode

_log: Final = structlog.get_logger(__name__)

_NANOSECONDS: Final = 1_000_000_000
_API_TIMEOUT_S: Final = 5.0
_MARKER_TTL_S: Final = 60

#: Codes of JetStream's own errors that mean something to us.
_STREAM_EXISTS_WITH_OTHER_SETTINGS: Final = 10058
_WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
_STORE_FAILED: Final = 10077
_STREAM_NOT_FOUND: Final = 10059

_retryable: Final = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})


def _error_of(error: dict[str, Any], operation: str, subject: str) -> DsecError:
    """Return what an error of the JetStream API means to us."""
    number = int(error.get("err_code", 0))
    status = int(error.get("code", 500))
    text = error.get("description", "no description")
    if number in _WRONG_LAST_SEQUENCE:
        code = ErrorCode.CONFLICT
    elif number == _STORE_FAILED or "exceeded" in text:
        code = ErrorCode.EXHAUSTED
    elif status == 404:  # noqa: PLR2004  HTTP's number
        code = ErrorCode.NOT_FOUND
    elif status >= 500:  # noqa: PLR2004  HTTP's number: the server's own trouble, it may pass
        code = ErrorCode.UNAVAILABLE
    else:
        code = ErrorCode.INVALID
    return DsecError(
        code,
        f"{operation} {subject}: JetStream says {text}",
        details={"subject": subject, "jetstream_error": number},
    )


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    """Return ``spec`` as the JetStream API writes it."""
    max_age_ns = int(spec.max_age_s * _NANOSECONDS)
    window_ns = int(spec.duplicate_window_s * _NANOSECONDS)
    per_subject = spec.refuse_when_full and spec.max_messages_per_subject > 0
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.work_queue else "limits",
        "storage": "memory" if spec.in_memory else "file",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_msg_size": -1,
        "max_age": max_age_ns,
        "max_bytes": spec.max_bytes,
        "max_msgs_per_subject": spec.max_messages_per_subject,
        "discard": "new" if spec.refuse_when_full or spec.bucket else "old",
        "discard_new_per_subject": per_subject and not spec.bucket,
        "duplicate_window": min(window_ns, max_age_ns) if max_age_ns else window_ns,
        "num_replicas": spec.replicas,
        "allow_msg_ttl": spec.message_ttl or spec.bucket,
        # A publisher's header must never be able to purge a stream that projects publish to.
        "allow_rollup_hdrs": spec.bucket,
        "deny_delete": spec.bucket,
        "allow_direct": True,
        # An entry that expires leaves a marker, so that watchers hear of it.
        **({"subject_delete_marker_ttl": _MARKER_TTL_S * _NANOSECONDS} if spec.bucket else {}),
    }


class Streams:
    """What the bus keeps alive in JetStream: the streams it was asked for, and their consumers."""

    def __init__(self, client: Client, inbox: ReplyInbox, guard: ReplyGuard) -> None:
        self._client = client
        self._inbox = inbox
        self._guard = guard
        self._specs: dict[str, StreamSpec] = {}
        self._consumers: list[Consumer[Any]] = []
        self._restoring: asyncio.Task[None] | None = None
        #: Counts the connections so far: what depends on one knows by it when to start again.
        self.epoch = 0
        #: Time limits that are over when the connection was lost and is back.
        self.waits: set[asyncio.Timeout] = set()

    async def api(
        self, operation: str, payload: dict[str, Any], timeout_s: float = _API_TIMEOUT_S
    ) -> dict[str, Any]:
        """Return JetStream's answer to one call of its API.

        Raises:
            DsecError: as JetStream's error means; ``unavailable`` when it does not answer.
        """
        body = msgspec.json.encode(payload) if payload else b""
        reply = await self._inbox.request(f"$JS.API.{operation}", body, None, timeout_s)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if "error" in answer:
            raise _error_of(answer["error"], "JetStream API", operation)
        return answer

    async def direct_get(self, stream: str, subject: str) -> Msg:
        """Return the subject's last message, or one with a ``Status`` header when there is none."""
        return await self._inbox.request(
            f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", None, _API_TIMEOUT_S
        )

    async def stored(self, stream: str, subject: str) -> int:
        """Return how many messages a stream holds on a subject."""
        answer = await self.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject})
        counts: dict[str, int] = answer["state"].get("subjects") or {}
        return counts.get(subject, 0)

    async def ensure(self, spec: StreamSpec) -> None:
        """Create the stream or change it to ``spec``, and remember it for the next reconnection."""
        config = stream_config(spec)
        try:
            await self.api(f"STREAM.CREATE.{spec.name}", config)
        except DsecError as error:
            if error.details.get("jetstream_error") != _STREAM_EXISTS_WITH_OTHER_SETTINGS:
                raise
            await self.api(f"STREAM.UPDATE.{spec.name}", config)
        self._specs[spec.name] = spec

    def reconnected(self) -> None:
        """Bring back what a server without a memory may have forgotten; runs in the background."""
        self.epoch += 1
        for wait in [wait for wait in self.waits if not wait.expired()]:
            wait.reschedule(asyncio.get_running_loop().time())
        if self._restoring is not None and not self._restoring.done():
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore(), name="restore streams")

    async def _restore(self) -> None:
        """Ensure every stream, for as long as it takes: JetStream may answer later than NATS."""
        for spec in list(self._specs.values()):
            while True:
                try:
                    await self.ensure(spec)
                    break
                except DsecError as error:
                    _log.warning("a stream is not back yet", stream=spec.name, error=str(error))
                    if error.code not in _retryable:
                        break
                    await asyncio.sleep(0.2)
        for consumer in self._consumers:
            consumer.restart()

    async def publish(
        self,
        subject: str,
        body: bytes,
        headers: dict[str, str],
        *,
        message_id: str = "",
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
        ttl_s: float = 0.0,
        timeout_s: float = _API_TIMEOUT_S,
    ) -> int:
        """Append a message; see ``Bus.js_publish``."""
        if message_id:
            headers["Nats-Msg-Id"] = message_id
        if expected_last_sequence is not None:
            headers["Nats-Expected-Last-Sequence"] = str(expected_last_sequence)
        if expected_last_subject_sequence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_last_subject_sequence)
        if ttl_s:
            headers["Nats-TTL"] = str(max(1, round(ttl_s)))
        # With an expectation, a retry after a lost acknowledgement reads as a conflict even under
        # the same id; only the caller can tell whose message the last one is.
        may_retry = message_id and (
            expected_last_sequence is None and expected_last_subject_sequence is None
        )
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await self._append(subject, body, headers, left_s)
            except DsecError as error:
                pause_s = 0.05
                out_of_time = time.monotonic() + pause_s >= deadline
                if not may_retry or error.code not in _retryable or out_of_time:
                    raise
                await asyncio.sleep(pause_s)

    async def _append(
        self, subject: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> int:
        reply = await self._inbox.request(subject, body, headers, timeout_s)
        answer = msgspec.json.decode(reply.data)
        if "error" in answer:
            raise _error_of(answer["error"], "append to", subject)
        return int(answer["seq"])

    async def consume(
        self,
        stream: str,
        durable: str,
        message_type: type[MessageT],
        handler: EventHandler[MessageT],
        *,
        filter_subject: str,
        max_in_flight: int,
        ack_wait_s: float,
        max_deliver: int,
    ) -> Consumer[MessageT]:
        """Begin to consume; see ``Bus.consume``."""
        config: dict[str, Any] = {
            "durable_name": durable,
            "name": durable,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "ack_wait": int(ack_wait_s * _NANOSECONDS),
            "max_deliver": max_deliver,
            # Other processes share the consumer, so the bound on one must not be the bound on all.
            "max_ack_pending": -1,
        }
        if filter_subject:
            config["filter_subject"] = filter_subject
        consumer = Consumer(
            self,
            stream,
            config,
            message_type,
            handler,
            max_in_flight=max_in_flight,
            ack_wait_s=ack_wait_s,
            guard=self._guard,
        )
        await consumer.start(self._client)
        self._consumers.append(consumer)
        return consumer

    async def stop_accepting(self) -> None:
        """Have every consumer ask for no more."""
        await asyncio.gather(*(consumer.stop_accepting() for consumer in self._consumers))

    async def finish(self, timeout_s: float) -> int:
        """Wait for the consumers' handlers; return how many were cancelled."""
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.wait({self._restoring})
            self._restoring = None
        return sum(
            await asyncio.gather(*(consumer.finish(timeout_s) for consumer in self._consumers))
        )


class Consumer(Generic[MessageT]):
    """One process's share of a durable consumer: what ``Bus.consume`` returns.

    It keeps one request for messages open, for as many as there are free places. The request ends
    by itself after a few seconds, so that one which a server has lost is soon replaced.
    """

    _PULL_EXPIRES_S: Final = 5.0
    _RETRY_S: Final = 0.2

    def __init__(
        self,
        streams: Streams,
        stream: str,
        config: dict[str, Any],
        message_type: type[MessageT],
        handler: EventHandler[MessageT],
        *,
        max_in_flight: int,
        ack_wait_s: float,
        guard: ReplyGuard,
    ) -> None:
        self.stream = stream
        self.durable: str = config["durable_name"]
        self.stats = ServeStats()
        self._streams = streams
        self._config = config
        self._message_type = message_type
        self._handler = handler
        self._max_in_flight = max_in_flight
        self._ack_wait_s = ack_wait_s
        self._guard = guard
        self._tasks: dict[asyncio.Task[None], Msg] = {}
        self._pull = 0
        self._outstanding = 0
        self._pull_deadline = 0.0
        self._created = False
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._client: Client
        self._prefix = ""
        self._subscription: Subscription | None = None

    async def start(self, client: Client) -> None:
        """Subscribe to deliveries and begin to ask for messages."""
        self._client = client
        self._prefix = client.new_inbox()
        self._subscription = await client.subscribe(
            f"{self._prefix}.*", cb=self._receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._loop_task = asyncio.create_task(self._run(), name=f"consume {self.stream}")

    def restart(self) -> None:
        """Take nothing for granted after a reconnection: consumer and pull are made again."""
        self._created = False
        self._outstanding = 0
        self._wake.set()

    # --- Asking for messages ------------------------------------------------------------------

    async def _run(self) -> None:
        progress_at = time.monotonic() + self._ack_wait_s / 3
        while True:
            self._wake.clear()
            try:
                await self._ask()
                pause_s = max(self._pull_deadline - time.monotonic(), 0.01)
            except DsecError as error:
                if str(error) != self.stats.last_error:
                    self.stats.last_error = str(error)
                    _log.warning(
                        "a consumer waits",
                        stream=self.stream,
                        durable=self.durable,
                        error=str(error),
                    )
                pause_s = self._RETRY_S
            now = time.monotonic()
            if now >= progress_at:
                await self._tell_progress()
                progress_at = now + self._ack_wait_s / 3
            # The loop wakes for a free place, an ended pull, the next progress, or a lost pull.
            timer = asyncio.get_running_loop().call_later(
                min(pause_s, max(progress_at - now, 0.01)), self._wake.set
            )
            try:
                await self._wake.wait()
            finally:
                timer.cancel()

    async def _ask(self) -> None:
        now = time.monotonic()
        if self._outstanding and now < self._pull_deadline:
            return
        free = self._max_in_flight - len(self._tasks)
        if free <= 0:
            self._outstanding, self._pull_deadline = 0, now + self._PULL_EXPIRES_S
            return
        if not self._created:
            await self._streams.api(
                f"CONSUMER.DURABLE.CREATE.{self.stream}.{self.durable}",
                {"stream_name": self.stream, "config": self._config},
            )
            self._created = True
        self._pull += 1
        self._outstanding = free
        self._pull_deadline = now + self._PULL_EXPIRES_S + 1.0
        await self._client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.durable}",
            msgspec.json.encode(
                {"batch": free, "expires": int(self._PULL_EXPIRES_S * _NANOSECONDS)}
            ),
            reply=f"{self._prefix}.{self._pull}",
        )

    async def _receive(self, message: Msg) -> None:
        status = (message.headers or {}).get("Status", "")
        if status and not message.reply:
            # Only the newest pull counts; an older one was given up.
            if message.subject == f"{self._prefix}.{self._pull}":
                self._pull_ended(message, status)
            return
        if self._outstanding:
            self._outstanding -= 1
            if not self._outstanding:
                self._wake.set()
        task = asyncio.create_task(self._work(message), name=f"consume {self.stream}")
        self._tasks[task] = message

    def _pull_ended(self, message: Msg, status: str) -> None:
        """Note that the server ended a pull: empty, expired, or the consumer is gone."""
        self._outstanding = 0
        if status in {"409", "503"}:
            self._created = False
            _log.info(
                "a consumer's pull ended",
                stream=self.stream,
                reason=(message.headers or {}).get("Description", status),
            )
            # Not at once: the server may be electing a leader or not have the stream yet.
            self._pull_deadline = time.monotonic() + self._RETRY_S
            self._outstanding = 1
            asyncio.get_running_loop().call_later(self._RETRY_S, self._wake.set)
            return
        self._wake.set()

    async def _tell_progress(self) -> None:
        for message in list(self._tasks.values()):
            await self._acknowledge(message, b"+WPI")

    # --- Handling them ------------------------------------------------------------------------

    async def _work(self, message: Msg) -> None:
        started_at = time.monotonic()
        verdict = b"-NAK"
        try:
            verdict = await self._verdict(message)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.pop(task, None)
            self.stats.requests += 1
            self.stats.processing_time_s += time.monotonic() - started_at
            await self._acknowledge(message, verdict)
            if not self._outstanding:
                self._wake.set()

    async def _verdict(self, message: Msg) -> bytes:
        """Handle ``message`` and return what to tell the server about it."""
        metadata = message.metadata
        try:
            request = read_request(
                message,
                self._message_type,
                self._guard,
                delivery=metadata.num_delivered,
                sequence=metadata.sequence.stream,
                stored_at=metadata.timestamp.timestamp(),
            )
            await self._handler(request)
        except DsecError as error:
            self._note(error)
            if not error.retryable:
                _log.warning(
                    "gave up a stream's message", subject=message.subject, error=str(error)
                )
                return b"+TERM " + str(error.code).encode()
            return _nak(error.retry_after_s or 1.0)
        except Exception as error:  # noqa: BLE001  the edge: the message comes again
            self._note(error)
            _log.exception("a stream's handler failed", subject=message.subject)
            return _nak(min(2.0**metadata.num_delivered, 30.0))
        return b"+ACK"

    def _note(self, error: Exception) -> None:
        self.stats.errors += 1
        self.stats.last_error = str(error)

    async def _acknowledge(self, message: Msg, verdict: bytes) -> None:
        try:
            await self._client.publish(message.reply, verdict)
        except Exception as error:  # noqa: BLE001  without the acknowledgement it is delivered again
            _log.warning("could not acknowledge", subject=message.subject, error=str(error))

    # --- The end ------------------------------------------------------------------------------

    async def stop_accepting(self) -> None:
        """Ask for no more messages; what has been delivered is still handled."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
            self._loop_task = None
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await withdraw(self._client, subscription)

    async def finish(self, timeout_s: float) -> int:
        """Wait for handlers; after ``timeout_s`` cancel them, and their messages come again."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
            self._loop_task = None
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        return len(late)


def _nak(delay_s: float) -> bytes:
    """Return the refusal that has a message delivered again after ``delay_s`` seconds."""
    return b'-NAK {"delay": %d}' % int(delay_s * _NANOSECONDS)
