"""One connection of an agent: bytes in, requests out, answers back, never more than is bounded.

A connection is not read while it has too many unanswered requests, while its sandbox asks too
often, or while its answers are not taken: what the agent sends then stays in its own socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from enum import Flag, auto
from functools import partial
from typing import Final, Protocol

import structlog

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.agent_limits import AgentLimits, ByteBudget, RequestRate
from dsec_sandboxd.agent_protocol import (
    HEADER_BYTES,
    AgentRequest,
    Log,
    RequestId,
    Tool,
    decode_request,
    encode_error,
    encode_part,
    encode_result,
    frame_length,
    request_id_of,
)
from dsec_sandboxd.agent_session import AgentSession

_log: Final = structlog.get_logger(__name__)

_READ_BYTES: Final = 64 * 1024


class _Pause(Flag):
    """Why a connection is not read."""

    IN_FLIGHT = auto()
    RATE = auto()
    UNSENT = auto()


_NOT: Final = _Pause(0)


class Owner(Protocol):
    """Who counts the connections."""

    def used(self, connection: AgentConnection) -> None:
        """Note that a connection asked for something just now."""
        ...

    def ended(self, connection: AgentConnection) -> None:
        """Note that a connection is closed."""
        ...


class _Hold:
    """The bytes of one large frame, given back once."""

    def __init__(self, budget: ByteBudget, count: int) -> None:
        self._budget = budget
        self._count = count

    def release(self) -> None:
        count, self._count = self._count, 0
        if count:
            self._budget.give(count)


class AgentConnection:
    """Reads frames, has the session answer them, writes answers in the order they are ready."""

    def __init__(
        self,
        peer: socket.socket,
        session: AgentSession,
        owner: Owner,
        *,
        limits: AgentLimits,
        rate: RequestRate,
        budget: ByteBudget,
    ) -> None:
        """Take a connected, non-blocking socket and begin to read."""
        self._peer = peer
        self._session = session
        self._owner = owner
        self._limits = limits
        self._rate = rate
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent = bytearray()
        self._hold: _Hold | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = _NOT
        self._closed = False
        self._frame_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._taken: asyncio.Future[None] | None = None
        self._rate_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(peer, self._readable)

    @property
    def local(self) -> str:
        """The sandbox that it belongs to."""
        return self._session.local

    @property
    def idle(self) -> bool:
        """Whether nothing is under way on it."""
        return not (self._tasks or self._received or self._unsent)

    def close(self) -> None:
        """Close at once: answers under way are not sent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._peer)
        self._loop.remove_writer(self._peer)
        self._peer.close()
        for timer in (self._frame_timer, self._write_timer, self._rate_timer):
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._received.clear()
        self._unsent.clear()
        if self._hold is not None:
            self._hold.release()
        self._owner.ended(self)

    async def closed(self) -> None:
        """Return when nothing of a closed connection runs any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- In -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            piece = self._peer.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        if not piece:
            # An agent that shut down its sending side waits for no answer that it could act on.
            self.close()
            return
        self._owner.used(self)
        self._received += piece
        self._take_frames()

    def _take_frames(self) -> None:
        """Take the whole frames that are there, as long as nothing says to wait."""
        try:
            while not self._paused and not self._closed:
                body = self._next_body()
                if body is None:
                    break
                self._begin(body)
        except DsecError as error:
            # Where the next frame begins is not known any more.
            self._refuse_and_close(error)
            return
        self._watch_frame()

    def _next_body(self) -> bytes | None:
        received = self._received
        if len(received) < HEADER_BYTES:
            return None
        length = frame_length(received[:HEADER_BYTES])
        if self._hold is None and length > self._limits.large_frame_bytes:
            if not self._budget.take(length):
                raise DsecError(
                    ErrorCode.EXHAUSTED,
                    "too many large requests are under way; try again a little later",
                    retry_after_s=0.5,
                )
            self._hold = _Hold(self._budget, length)
        if len(received) < HEADER_BYTES + length:
            return None
        if delay_s := self._rate.delay_s(self._loop.time()):
            self._pause(_Pause.RATE)
            self._rate_timer = self._loop.call_later(delay_s, self._resume, _Pause.RATE)
            return None
        body = bytes(received[HEADER_BYTES : HEADER_BYTES + length])
        del received[: HEADER_BYTES + length]
        if self._frame_timer is not None:  # it was this frame's
            self._frame_timer.cancel()
            self._frame_timer = None
        return body

    def _begin(self, body: bytes) -> None:
        hold, self._hold = self._hold, None
        release: Callable[[], None] = _nothing if hold is None else hold.release
        try:
            request = decode_request(body)
        except DsecError as error:
            release()
            self._send(encode_error(request_id_of(body), error))
            return
        if isinstance(request, Log):
            release()
            self._rate.charge(len(body) // self._limits.log_bytes_per_request)
            try:
                answer = encode_result(request.id, self._session.log(request))
            except DsecError as error:
                answer = encode_error(request.id, error)
            self._send(answer)
            return
        limits = self._limits
        # A tool's call is written down, too, refused or not.
        is_logged = isinstance(request, Tool)
        one_more = limits.log_bytes_per_request if is_logged else limits.bytes_per_request
        self._rate.charge(len(body) // one_more)
        task = self._loop.create_task(self._answer(request, release))
        self._tasks.add(task)
        task.add_done_callback(self._answered)
        if len(self._tasks) >= self._limits.in_flight:
            self._pause(_Pause.IN_FLIGHT)

    def _watch_frame(self) -> None:
        """Give a frame that has begun its time, counted from when it began."""
        waits = bool(self._received) and not self._paused and not self._closed
        if waits and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._limits.frame_timeout_s, self.close)
        elif not waits and self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    # --- At work ------------------------------------------------------------------------------

    async def _answer(self, request: AgentRequest, release: Callable[[], None]) -> None:
        request_id = request.id
        try:
            result = await self._session.answer(request, release, partial(self._part, request_id))
            frame = encode_result(request_id, result)
        except DsecError as error:
            frame = encode_error(request_id, error)
        except Exception:  # noqa: BLE001  told to the agent and to the log
            _log.exception("agent_request_failed", local=self.local)
            frame = encode_error(
                request_id,
                DsecError(ErrorCode.INTERNAL, "the node's daemon failed; its log says why"),
            )
        finally:
            release()
        self._send(frame)
        self._session.write_steps()

    async def _part(self, request_id: RequestId, data: bytes) -> None:
        """Send a piece of an answer once those before it are taken: they are not piled up here."""
        while self._unsent and not self._closed:
            if self._taken is None:
                self._taken = self._loop.create_future()
            await asyncio.shield(self._taken)
        self._send(encode_part(request_id, data))

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._closed:
            self._resume(_Pause.IN_FLIGHT)

    def _pause(self, why: _Pause) -> None:
        if not self._paused:
            self._loop.remove_reader(self._peer)
        self._paused |= why

    def _resume(self, why: _Pause) -> None:
        if self._closed or not self._paused & why:
            return
        self._paused &= ~why
        if not self._paused:
            self._loop.add_reader(self._peer, self._readable)
            self._take_frames()

    # --- Out ----------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        if self._closed:
            return
        if self._unsent:
            self._unsent += frame
        else:
            sent = self._write(frame)
            if self._closed or sent == len(frame):
                return
            self._unsent += memoryview(frame)[sent:]
            self._loop.add_writer(self._peer, self._writable)
            self._write_timer = self._loop.call_later(self._limits.write_timeout_s, self.close)
        if len(self._unsent) > self._limits.unsent_bytes:
            self._pause(_Pause.UNSENT)

    def _writable(self) -> None:
        sent = self._write(self._unsent)
        if self._closed:
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._peer)
            if self._taken is not None:
                self._taken.set_result(None)
                self._taken = None
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
            self._resume(_Pause.UNSENT)

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._peer.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.close()
            return 0

    def _refuse_and_close(self, error: DsecError) -> None:
        self._send(encode_error(None, error))
        self.close()


def _nothing() -> None:
    """Release nothing: the frame was small."""
