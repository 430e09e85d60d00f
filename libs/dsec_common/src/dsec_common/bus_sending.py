"""The sending side of the bus: messages that nobody answers, and answers to who asked."""

from __future__ import annotations

import asyncio

import nats.errors
import structlog

from dsec_common.bus_client import DirectClient
from dsec_common.bus_headers import error_headers, outgoing
from dsec_common.bus_requests import to_dsec_error
from dsec_common.bus_serving import ReplyGuard
from dsec_common.bus_types import ReplyAddress
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import ErrorReply, Message, encode

_log = structlog.get_logger(__name__)


class Sending:
    """Sends over one connection; see :class:`dsec_common.bus.Bus` for what is promised."""

    def __init__(self, client: DirectClient, guard: ReplyGuard) -> None:
        self._client = client
        self._guard = guard
        self._late: set[asyncio.Task[None]] = set()

    async def send(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        """Publish a body; errors as of ``Bus.publish``."""
        if self._client.publish_at_once(subject, "", body, headers):
            return
        try:
            await self._client.publish(subject, body, headers=headers)
        except nats.errors.Error as error:
            raise to_dsec_error(error, "publish to", subject) from error

    async def reply(self, to: ReplyAddress, answer: Message | DsecError) -> None:
        """Answer a caller; see ``Bus.reply``."""
        if to.subject:
            await self.send(to.subject, *self._packed(to, answer))

    def reply_soon(self, to: ReplyAddress, answer: Message | DsecError) -> None:
        """Answer a caller without waiting; see ``Bus.reply_soon``."""
        if not to.subject:
            return
        body, headers = self._packed(to, answer)
        if self._client.publish_at_once(to.subject, "", body, headers):
            return
        task = asyncio.create_task(self._send_late(to.subject, body, headers), name="late answer")
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _send_late(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            await self.send(subject, body, headers)
        except DsecError as error:
            _log.warning("an answer could not be sent", subject=subject, error=error.message)

    def _packed(
        self, to: ReplyAddress, answer: Message | DsecError
    ) -> tuple[bytes, dict[str, str]]:
        if not self._guard.allows(to.subject):
            raise DsecError(ErrorCode.DENIED, f"{to.subject} is not a subject that replies go to")
        if isinstance(answer, DsecError):
            headers = outgoing(to.content_type, error_headers(answer))
            return encode(ErrorReply.of(answer), to.content_type), headers
        return encode(answer, to.content_type), outgoing(to.content_type)

    async def finish(self, timeout_s: float) -> None:
        """Wait until late answers are sent; after ``timeout_s`` give the rest up."""
        if not self._late:
            return
        _, left = await asyncio.wait(set(self._late), timeout=timeout_s)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
