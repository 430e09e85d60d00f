"""The asking side of the bus: one inbox for all replies, and errors in our own words."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg

from dsec_common.bus_client import DirectClient
from dsec_common.errors import NOBODY_SERVES, DsecError, ErrorCode, invalid, unavailable
from dsec_common.timers import timers_of

Which = str | Callable[[str], bool]
"""A subject, or whether one is meant."""

_NO_RESPONDERS: Final = "503"
_DENIED_PUBLISH: Final = re.compile(
    r'permissions violation for publish to "([^"]+)"', re.IGNORECASE
)


def to_dsec_error(error: Exception, operation: str, subject: str) -> DsecError:
    """Return what a failure of the NATS client means to us, naming operation and subject."""
    if isinstance(error, nats.errors.MaxPayloadError):
        return invalid(
            f"{operation} {subject}: the message is larger than the NATS server accepts; send less "
            "at once or raise the server's max_payload",
            subject=subject,
        )
    if isinstance(error, nats.errors.BadSubjectError | nats.errors.BadHeaderError):
        return invalid(
            f"{operation} {subject!r}: not a valid NATS subject or header", subject=subject
        )
    if isinstance(error, nats.errors.TimeoutError | TimeoutError):
        return DsecError(
            ErrorCode.TIMEOUT,
            f"{operation} {subject}: NATS did not answer in time; check that the server is well",
            details={"subject": subject},
        )
    if isinstance(error, nats.errors.OutboundBufferLimitError):
        return unavailable(
            f"{operation} {subject}: NATS is not connected and the buffer for later is full; "
            "wait until the connection is back",
            subject=subject,
        )
    return unavailable(
        f"{operation} {subject}: no connection to NATS ({error or type(error).__name__})",
        subject=subject,
    )


class _Waiting:
    """One request on its way."""

    __slots__ = ("before", "future", "is_last", "subject", "timeout_s", "timer")

    def __init__(self, subject: str, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.subject = subject
        self.timeout_s = timeout_s
        # Of a request with many replies: what has come, and which is the last.
        self.before: list[Msg] = []
        self.is_last: Callable[[Msg], bool] | None = None
        self.future: asyncio.Future[Msg] = loop.create_future()
        self.timer = timers_of(loop).call_later(timeout_s, self._expire)

    def _expire(self) -> None:
        self.fail(
            DsecError(
                ErrorCode.TIMEOUT,
                f"no reply from {self.subject} within {self.timeout_s:g} s; it may have been "
                "carried out all the same. Check that its service is well, or allow more time",
                details={"subject": self.subject, "timeout_s": self.timeout_s},
            )
        )

    def fail(self, error: DsecError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class ReplyInbox:
    """Sends requests and pairs each with its reply, over one subscription.

    A request that is waiting when the connection is lost fails at once with ``unavailable``: its
    reply could only have come over that connection.
    """

    def __init__(self, client: DirectClient, prefix: str) -> None:
        self._client = client
        # The server delivers replies by this name alone, so it must not be guessable.
        self._prefix = f"{prefix}.{random.SystemRandom().getrandbits(96):024x}."
        self._waiting: dict[str, _Waiting] = {}
        self._count = 0

    async def open(self) -> None:
        """Subscribe; afterwards requests can be sent."""
        # No limits: a limit would drop replies silently, and each has a request that awaits it.
        await self._client.subscribe_directly(f"{self._prefix}*", self._on_reply)

    async def request(
        self, subject: str, body: bytes, headers: dict[str, Any] | None, timeout_s: float
    ) -> Msg:
        """Return the raw reply to ``body``.

        Raises:
            DsecError: ``unavailable`` when nobody serves ``subject`` or the connection is lost,
                ``timeout`` after ``timeout_s`` seconds, ``denied`` when the credentials do not
                allow it, ``invalid`` for an impossible subject or size.
        """
        waiting = _Waiting(subject, timeout_s, asyncio.get_running_loop())
        return await self._ask(waiting, body, headers)

    async def request_many(
        self, subject: str, body: bytes, is_last: Callable[[Msg], bool], timeout_s: float
    ) -> list[Msg]:
        """Return the raw replies to ``body`` up to the one that ``is_last``; errors as of one."""
        waiting = _Waiting(subject, timeout_s, asyncio.get_running_loop())
        waiting.is_last = is_last
        last = await self._ask(waiting, body, None)
        return [*waiting.before, last]

    async def _ask(self, waiting: _Waiting, body: bytes, headers: dict[str, Any] | None) -> Msg:
        self._count += 1
        token = f"{self._count:x}"
        subject = waiting.subject
        self._waiting[token] = waiting
        reply_to = self._prefix + token
        try:
            if not self._client.publish_at_once(subject, reply_to, body, headers):
                await self._client.publish(subject, body, reply=reply_to, headers=headers)
            message = await waiting.future
        except nats.errors.Error as error:
            raise to_dsec_error(error, "request to", subject) from error
        finally:
            waiting.timer.cancel()
            del self._waiting[token]
        if not message.data and _status(message.headers) == _NO_RESPONDERS:
            raise unavailable(
                f"nobody serves {subject}; check that its service is running and that the project "
                "and the ids in the subject exist",
                subject=subject,
                reason=NOBODY_SERVES,
            )
        return message

    async def _on_reply(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject[len(self._prefix) :])
        if waiting is None or waiting.future.done():
            return
        if waiting.is_last is not None and not waiting.is_last(message):
            waiting.before.append(message)
        else:
            waiting.future.set_result(message)

    def connection_lost(self) -> None:
        """Fail what is waiting: no reply can come any more."""
        for waiting in self._waiting.values():
            waiting.fail(
                unavailable(
                    f"the connection to NATS was lost while waiting for {waiting.subject}; the "
                    "request may have been carried out",
                    subject=waiting.subject,
                    may_have_happened=True,
                )
            )

    def give_up(self, subject: str | Callable[[str], bool], error: Callable[[], DsecError]) -> None:
        """Fail what waits for a reply from ``subject``, or from all that match.

        A reply that still comes is dropped.
        """
        for waiting in self._waiting.values():
            asked = waiting.subject
            if asked == subject if isinstance(subject, str) else subject(asked):
                waiting.fail(error())

    def permission_denied(self, server_error: str) -> None:
        """Fail the requests that the server refused to forward, as its error message says."""
        match = _DENIED_PUBLISH.search(server_error)
        if match is None:
            return
        for waiting in self._waiting.values():
            if waiting.subject.lower() == match[1].lower():
                waiting.fail(
                    DsecError(
                        ErrorCode.DENIED,
                        f"these credentials may not publish to {waiting.subject}; use those of the "
                        "project or service that the subject belongs to",
                        details={"subject": waiting.subject},
                    )
                )


def _status(headers: Mapping[str, str] | None) -> str:
    return headers.get("Status", "") if headers else ""
