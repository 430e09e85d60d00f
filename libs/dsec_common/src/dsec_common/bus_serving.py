"""The answering side of the bus: bounded concurrency, typed errors, orderly drain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dsec_common.bus_headers import (
    TRACEPARENT,
    current_traceparent,
    error_headers,
    handed_on_caller,
    next_traceparent,
    outgoing,
)
from dsec_common.bus_intake import PROJECT_BYTES_MAX, Held, Intake
from dsec_common.bus_order import withdraw
from dsec_common.bus_types import (
    SERVICES_ONLY_PREFIX,
    EventHandler,
    Handler,
    MessageT,
    ReplyAddress,
    Request,
    ServeStats,
    content_type_of,
)
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import ErrorReply, Message, decode, encode

_log: Final = structlog.get_logger(__name__)

Send = Callable[[str, bytes, dict[str, str]], Awaitable[None]]
"""Publishes a body with headers; raises ``DsecError``."""


class ReplyGuard:
    """Decides which reply subjects a service may be made to publish to.

    A caller chooses its reply subject, and a service has more rights than its callers: without this
    check a caller could have a service publish to another's ``…delete`` or to the JetStream API.
    """

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._prefixes = prefixes

    def allows(self, subject: str) -> bool:
        """Return whether a reply may go to ``subject``."""
        return subject.startswith(self._prefixes) and "*" not in subject and ">" not in subject


class Served(Generic[MessageT]):
    """One served subject: what ``Bus.serve`` returns.

    At most ``concurrency`` handlers run, at most ``max_pending`` requests wait for one, of which
    one project never has all; a request beyond that is answered ``exhausted`` at once. Nothing is
    dropped without an answer, but for a request whose reply subject is not allowed.

    With ``at_once`` a handler, which then must not wait for anything, is called by whoever reads
    the connection: it costs no task, and no request ever waits for a place.
    """

    def __init__(
        self,
        subject: str,
        request_type: type[MessageT],
        handler: Handler[MessageT],
        *,
        concurrency: int,
        max_pending: int,
        send: Send,
        guard: ReplyGuard,
        held: Held,
        at_once: bool = False,
    ) -> None:
        self.subject = subject
        self.stats = ServeStats()
        self._request_type = request_type
        self._handler = handler
        self._at_once = at_once
        self._held = held
        self._intake: Intake[tuple[Msg, float]] = Intake(concurrency, max_pending)
        self._concurrency = concurrency
        self._max_pending = max_pending
        self._send = send
        self._guard = guard
        self._tasks: set[asyncio.Task[None]] = set()
        self.subscription: Subscription | None = None

    async def receive(self, message: Msg) -> None:
        """Take one message from the client; return without waiting for its handler."""
        if message.reply and not self._guard.allows(message.reply):
            self.stats.refused += 1
            _log.warning(
                "dropped a request: its reply subject is not one that this service answers to",
                subject=message.subject,
                reply=message.reply,
            )
            return
        if self._at_once:
            await self._handle(message)
            current_traceparent.set("")  # the reader's own; it goes on to other requests
            return
        project, size = project_of(message.subject), len(message.data)
        if not self._held.take(project, size):
            await self._refuse(
                message,
                f"project {project} has {PROJECT_BYTES_MAX} bytes of requests here already; "
                "try again a little later",
            )
        elif self._intake.begin(project):
            work = self._work(project, message)
            self._tasks.add(asyncio.create_task(work, name=f"serve {self.subject}"))
        elif not self._intake.wait(project, (message, time.monotonic())):
            self._held.give_back(project, size)
            await self._refuse(
                message,
                f"{self.subject} is serving {self._concurrency} requests and "
                f"{self._max_pending} wait, or as many of project {project} as one may have; "
                "try again a little later",
            )

    async def _refuse(self, message: Msg, why: str) -> None:
        self.stats.refused += 1
        error = DsecError(ErrorCode.EXHAUSTED, why, retry_after_s=self._retry_after_s())
        await self._answer_error(message, error)

    def _retry_after_s(self) -> float:
        """Estimate when a place is free: what waits, at the rate reached so far."""
        done = max(self.stats.requests, 1)
        mean_s = self.stats.processing_time_s / done
        return round(max(0.05, mean_s * (self._intake.waiting + 1) / self._concurrency), 3)

    async def _work(self, project: str, message: Msg, since: float = 0.0) -> None:
        """Handle ``message`` and then, in the same task, whatever is next of what waits."""
        try:
            while True:
                try:
                    await self._handle(message, since)
                finally:
                    self._intake.end(project)
                    self._held.give_back(project, len(message.data))
                following = self._intake.next()
                if following is None:
                    return
                project, (message, since) = following
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.discard(task)

    async def _handle(self, message: Msg, since: float = 0.0) -> None:
        started_at = time.monotonic()
        self.stats.in_flight += 1
        try:
            request = self.read(message)
            if since:
                request = msgspec.structs.replace(request, waited_s=started_at - since)
            answer = await self._handler(request)
            if answer is not None and message.reply:
                await self._send_answer(message, answer)
        except asyncio.CancelledError:
            await self._answer_error(
                message,
                DsecError(
                    ErrorCode.UNAVAILABLE,
                    f"{self.subject}: the service stopped before the request was done; try again",
                    retry_after_s=1.0,
                    details={"may_have_happened": True},
                ),
            )
            raise
        except DsecError as error:
            await self._answer_error(message, error)
        except Exception as error:  # noqa: BLE001  the edge: anything else becomes `internal`
            _log.exception("a handler failed", subject=message.subject)
            await self._answer_error(
                message,
                DsecError(
                    ErrorCode.INTERNAL,
                    f"{self.subject} failed unexpectedly ({type(error).__name__}); its log says "
                    f"why, under trace {current_traceparent.get()}",
                ),
            )
        finally:
            self.stats.in_flight -= 1
            self.stats.requests += 1
            self.stats.processing_time_s += time.monotonic() - started_at

    def read(self, message: Msg) -> Request[MessageT]:
        """Return the request in ``message`` and make its trace the current one.

        Raises:
            DsecError: ``invalid`` when the body does not decode.
        """
        return read_request(message, self._request_type, self._guard)

    async def _send_answer(self, message: Msg, answer: Message) -> None:
        content_type = content_type_of(message.headers)
        await self._send(message.reply, encode(answer, content_type), outgoing(content_type))

    async def _answer_error(self, message: Msg, error: DsecError) -> None:
        self.stats.errors += 1
        self.stats.last_error = str(error)
        if not message.reply:
            _log.warning(
                "a request without reply failed", subject=message.subject, error=str(error)
            )
            return
        content_type = content_type_of(message.headers)
        headers = outgoing(content_type, error_headers(error))
        try:
            await self._send(message.reply, encode(ErrorReply.of(error), content_type), headers)
        except DsecError as failure:
            _log.warning("an error could not be sent", subject=message.subject, error=str(failure))

    async def stop_accepting(self, client: Client) -> None:
        """Unsubscribe and take in every message that the server had already sent."""
        if self.subscription is not None:
            subscription, self.subscription = self.subscription, None
            await withdraw(client, subscription)

    async def finish(self, timeout_s: float) -> int:
        """Wait for handlers; after ``timeout_s`` seconds cancel the rest and return their number.

        A cancelled request is answered ``unavailable``.
        """
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in late:
            task.cancel()
        waiting = self._intake.take_all()
        for message, _ in waiting:
            self._held.give_back(project_of(message.subject), len(message.data))
            await self._answer_error(
                message,
                DsecError(ErrorCode.UNAVAILABLE, f"{self.subject}: the service is stopping"),
            )
        if late:
            await asyncio.wait(late)
        return len(late) + len(waiting)


def project_of(subject: str) -> str:
    """Return the project that a subject names, or the services' own token."""
    parts = subject.split(".", 3)
    return parts[2] if len(parts) > 3 else ""  # noqa: PLR2004  dsec.v1.<project>.…


def read_request(
    message: Msg, request_type: type[MessageT], guard: ReplyGuard, **delivery: Any
) -> Request[MessageT]:
    """Return the request in ``message`` and make its trace the current one.

    The header that names another's reply subject counts only where none but services can publish.

    Raises:
        DsecError: ``invalid`` when the body does not decode.
    """
    headers = message.headers or {}
    content_type = content_type_of(headers)
    traceparent = next_traceparent(headers.get(TRACEPARENT))
    current_traceparent.set(traceparent)
    caller = None
    if message.subject.startswith(SERVICES_ONLY_PREFIX):
        caller = handed_on_caller(headers)
        if caller is not None and not guard.allows(caller.subject):
            _log.warning(
                "ignored a caller's address that is no reply subject",
                subject=message.subject,
                reply=caller.subject,
            )
            caller = ReplyAddress()
    reply_to = "" if delivery else message.reply
    return Request(
        message=decode(message.data, request_type, content_type),
        subject=message.subject,
        tokens=tuple(message.subject.split(".")),
        headers=headers,
        reply_to=reply_to,
        caller=caller or ReplyAddress(reply_to, content_type),
        content_type=content_type,
        traceparent=traceparent,
        **delivery,
    )


class EventSubscription(Generic[MessageT]):
    """One subscription to events: what ``Bus.subscribe`` returns. Order is kept."""

    def __init__(
        self,
        subject: str,
        message_type: type[MessageT],
        handler: EventHandler[MessageT],
        *,
        max_pending: int,
        guard: ReplyGuard,
    ) -> None:
        self.subject = subject
        self.stats = ServeStats()
        self._message_type = message_type
        self._handler = handler
        self._max_pending = max_pending
        self._guard = guard
        self._queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.subscription: Subscription | None = None

    def start(self) -> None:
        """Begin to handle what arrives."""
        self._task = asyncio.create_task(self._work(), name=f"events {self.subject}")

    async def receive(self, message: Msg) -> None:
        """Take one message from the client; return without waiting for its handler."""
        if self._queue.qsize() < self._max_pending:
            self._queue.put_nowait(message)
            return
        if self.stats.refused % 1000 == 0:
            _log.error(
                "dropped events: the handler is too slow",
                subject=self.subject,
                dropped=self.stats.refused + 1,
            )
        self.stats.refused += 1

    async def _work(self) -> None:
        while True:
            message = await self._queue.get()
            try:
                await self._handler(read_request(message, self._message_type, self._guard))
            except Exception as error:  # noqa: BLE001  the edge: the next event must follow
                self.stats.errors += 1
                self.stats.last_error = str(error)
                _log.exception("an event's handler failed", subject=message.subject)
            finally:
                self.stats.requests += 1
                self._queue.task_done()

    async def stop_accepting(self, client: Client) -> None:
        """Unsubscribe and take in every event that the server had already sent."""
        if self.subscription is not None:
            subscription, self.subscription = self.subscription, None
            await withdraw(client, subscription)

    async def finish(self, timeout_s: float) -> int:
        """Wait until all events are handled; after ``timeout_s`` drop the rest, return how many."""
        if self._task is None:
            return 0
        task, self._task = self._task, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        left = self._queue.qsize()
        task.cancel()
        await asyncio.wait({task})
        return left
