"""The NATS client with a short way for what happens most: a message comes in, a message goes out.

The library gives each message to a task of its subscription, through a queue, and each publication
to a task that flushes, through another. Here a subscription that never makes the reader wait is
called by the reader itself, and what can be written in this turn of the loop is. All that is out of
the ordinary goes the library's own way.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import MaxPayloadError

from dsec_common.bus_transport import GatheringTransport

Receive = Callable[[Msg], Awaitable[None]]

_PREAMBLE: Final = b"NATS/1.0\r\n"
_PART: Final = r"[!-)+-\-/-=?-~]+"
_SUBJECT: Final = re.compile(rf"{_PART}(?:\.{_PART})*")
"""Tokens of visible characters without a wildcard: the library looks at anything else."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
#: With more than this waiting to be written, the library's own way waits until there is less.
_WAITING_BYTES_MAX: Final = 256 * 1024


class DirectClient(Client):
    """A client some of whose subscriptions are called without delay."""

    def __init__(self) -> None:
        super().__init__()
        self._direct: dict[int, Receive] = {}

    async def subscribe_directly(
        self, subject: str, receive: Receive, *, queue: str = ""
    ) -> Subscription:
        """Subscribe without limits on what waits; ``receive`` holds up all else on the connection.

        Messages keep their order. What it raises is told to the client's error callback.
        """
        subscription = await self.subscribe(
            subject, queue=queue, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._direct[subscription._id] = receive  # noqa: SLF001  it offers no other way
        return subscription

    def publish_at_once(
        self, subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None
    ) -> bool:
        """Write a message, and return true; or leave it to :meth:`publish`, and return false."""
        transport = self._transport
        if (
            self._status != Client.CONNECTED
            or self._pending
            or type(transport) is not GatheringTransport
            or not _SUBJECT.fullmatch(subject)
            or (reply and not _SUBJECT.fullmatch(reply))
        ):
            return False
        waiting_bytes = transport.waiting_bytes
        if waiting_bytes is None or waiting_bytes > _WAITING_BYTES_MAX:
            return False
        head = header_block(headers) if headers else b""
        if head is None:
            return False
        size = len(head) + len(payload)
        if size > self._max_payload:
            return False
        operation = f"HPUB {subject} {reply} {len(head)}" if head else f"PUB {subject} {reply}"
        transport.write(b"%s %d\r\n%s%s\r\n" % (operation.encode(), size, head, payload))
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        return True

    async def _send_publish(
        self,
        subject: str,
        reply: str,
        payload: bytes,
        payload_size: int,
        headers: dict[str, Any] | None,
    ) -> None:
        # The server counts headers, too, and has done with whoever sends too much. The library
        # looks at the body alone.
        if payload_size + _size_of(headers or {}) > self._max_payload:
            raise MaxPayloadError
        await super()._send_publish(subject, reply, payload, payload_size, headers)

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None and s.uri.scheme not in {"ws", "wss"}:
            self._transport = GatheringTransport(self._ps.parse)
        await super()._connect_to_server(s)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._direct.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        receive = self._direct.get(sid)
        named: dict[str, str] | None = None
        is_plain = receive is not None and sid in self._subs
        if is_plain and headers:  # acknowledgements of JetStream have none
            named = plain_headers(headers)
            is_plain = named is not None
        if receive is None or not is_plain:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            await receive(Msg(self, subject.decode(), reply.decode(), data, named))
        except Exception as error:  # noqa: BLE001  the reader must go on
            await self._error_cb(error)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        # Once the task that flushes has found the connection broken, and until another is there,
        # the library writes here, and its caller would get the socket's error: with a connection
        # what was on its way is lost; subscriptions are sent again, and who waits is told.
        try:
            return await super()._flush_pending(force_flush)
        except OSError:
            sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            sent.set_result(None)
            return sent

    async def _process_pong(self) -> None:
        # It answers the future of whoever asked for a flush, without a look: if that was given up,
        # the error would end its reading, and nothing would be heard on this connection any more.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


@functools.lru_cache(maxsize=256)
def _is_name(name: str) -> bool:
    """Return whether a header's name is a plain one; there are few."""
    return _NAME.fullmatch(name) is not None


def header_block(headers: Mapping[str, str]) -> bytes | None:
    """Return headers as they are sent; None for any that need a closer look."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if _is_name(name)]
    text = "".join(lines)
    if not (len(lines) == len(headers) == text.count("\n") == text.count("\r")):
        return None
    return b"%s%s\r\n" % (_PREAMBLE, text.encode())


def _size_of(headers: Mapping[str, str]) -> int:
    """Return how many bytes headers take at most."""
    lines = sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
    return len(_PREAMBLE) + lines + 2 if headers else 0


def plain_headers(block: bytes) -> dict[str, str] | None:
    """Return the headers in a block; None for one with a status line, or none at all."""
    if not block or not block.startswith(_PREAMBLE):
        return None
    named: dict[str, str] = {}
    for line in block[len(_PREAMBLE) :].decode("utf-8", "replace").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            if not _is_name(name):
                return None
            named[name] = value.strip()
    return named
