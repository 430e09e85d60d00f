"""A command that is started and runs on: its events, its input, its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Self, TypeVar

from dsec.channel import Channel
from dsec.handle import Closing, OfSandbox
from dsec.results import ExecResult
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message
from dsec_common.wire.exec import (
    STDIN_CHUNK_BYTES,
    CancelExec,
    ExecChanged,
    ExecEvent,
    ExecEvents,
    ExecInfo,
    ExecList,
    ExecState,
    ExecStream,
    InspectExec,
    ListExecs,
    ReadExec,
    ResizeExec,
    SignalExec,
    SignalTarget,
    StdinWritten,
    TerminalSize,
    WriteStdin,
)
from dsec_common.wire.sandbox import MAX_OUTPUT_BYTES

__all__ = ["ExecEvent", "ExecInfo", "ExecStream", "Process", "SignalTarget"]

_WAIT_S: Final = 20.0
#: Beyond the time that the node may take: it may have to be started again meanwhile.
_MARGIN_S: Final = 30.0
_PATIENCE_S: Final = 5.0
_R = TypeVar("_R", bound=Message)


class Process(Closing, OfSandbox):
    """An exec of a sandbox, and how far this handle has read it.

    It goes on whatever becomes of this handle, its connection or its node's daemon; a handle made
    again by its id reads it from the beginning. As an async context manager it is cancelled at the
    end. Iterating yields its events, the exit last::

        async with await sandbox.start("make test") as process:
            async for event in process:
                print(event.stream, event.data)

    Output is kept to a bound that the node sets, and its oldest part dropped beyond it:
    :attr:`truncated` says when this handle has missed some.

    Attributes:
        id: the exec's id.
        sandbox_id: where it runs.
        truncated: events were dropped before this handle read them.
    """

    def __init__(self, channel: Channel, scoped: ScopedId, exec_id: str) -> None:
        super().__init__(channel, scoped)
        self.id = exec_id
        self.sandbox_id = str(scoped)
        self.truncated = False
        self._paused_s = 0.0
        self._after = 0
        self._unread: deque[ExecEvent] = deque()
        self._written = -1
        self._writing = asyncio.Lock()
        self._ended: ExecInfo | None = None
        self._over: ExecInfo | None = None

    def __repr__(self) -> str:
        return f"Process({self.sandbox_id!r}, {self.id!r})"

    async def _leave(self) -> None:
        if self._over is None:
            # The sandbox may be over, and its execs with it.
            with contextlib.suppress(DsecError):
                await self.cancel()

    async def _ask_for(
        self,
        verb: str,
        message: Message,
        reply: type[_R],
        *,
        wait_s: float = 0.0,
        again: bool = True,
    ) -> _R:
        return await self._channel.ask(
            self._subject(verb),
            message,
            reply,
            timeout_s=wait_s + _MARGIN_S,
            repeatable=again,
            attempts_max=1000,
            patience_s=wait_s + _PATIENCE_S if again else math.inf,
        )

    # --- Output -------------------------------------------------------------------------------

    async def read(self, *, wait_s: float = _WAIT_S) -> list[ExecEvent]:
        """Return events after those already read; none when nothing comes in time.

        Of what iterating has fetched and not yielded yet, it knows nothing: use one of the two.

        Raises:
            DsecError: ``not_found`` when the exec is no longer kept; ``expired`` with the sandbox.
        """
        if self._ended is not None:
            return []
        page = await self._page(self._after, wait_s)
        self.truncated = self.truncated or page.truncated
        if page.events:
            self._after = page.events[-1].seq
        self._ended = page.ended
        return list(page.events)

    async def _page(self, after: int, wait_s: float) -> ExecEvents:
        page = await self._ask_for(
            "read_exec",
            ReadExec(exec_id=self.id, after=after, wait_s=wait_s),
            ExecEvents,
            wait_s=wait_s,
        )
        self._over = page.ended or self._over
        self._paused_s = max(self._paused_s, page.paused_s)
        return page

    @property
    def paused_s(self) -> float:
        """How long its sandbox has stood still in all, as far as this handle has heard."""
        return self._paused_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ExecEvent:
        """Return the next event, waiting for it; what is after the exit is the end."""
        while not self._unread:
            if self._ended is not None:
                raise StopAsyncIteration
            self._unread.extend(await self.read())
        return self._unread.popleft()

    def rewind(self, after: int = 0) -> None:
        """Read on after event ``after``; what is no longer kept is missing."""
        self._after = after
        self._unread.clear()
        self._ended = None

    async def wait(self, timeout_s: float | None = None) -> ExecInfo:
        """Return how it ended, once it has; what it printed can still be read, if it is kept.

        Raises:
            DsecError: ``timeout`` when it runs on after ``timeout_s``; ``not_found``, ``expired``.
        """
        after = self._after
        try:
            async with asyncio.timeout(timeout_s):
                while self._over is None:
                    page = await self._page(after, _WAIT_S)
                    after = page.events[-1].seq if page.events else after
        except TimeoutError:
            raise self._runs_on(timeout_s) from None
        return self._over

    async def output(
        self, timeout_s: float | None = None, *, output_limit_bytes: int = MAX_OUTPUT_BYTES
    ) -> ExecResult:
        """Return how it ended with what it printed from here on, the beginning of each stream.

        Raises:
            DsecError: as :meth:`wait`, and why it never ran.
        """
        kept = {ExecStream.STDOUT: bytearray(), ExecStream.STDERR: bytearray()}
        cut = dict.fromkeys(kept, False)
        try:
            async with asyncio.timeout(timeout_s):
                async for event in self:
                    if event.stream in kept:
                        room = output_limit_bytes - len(kept[event.stream])
                        kept[event.stream] += event.data[: max(room, 0)]
                        cut[event.stream] = cut[event.stream] or len(event.data) > room
        except TimeoutError:
            raise self._runs_on(timeout_s) from None
        info = self._ended or await self.inspect()
        if (failure := failure_of(info)) is not None:
            raise failure
        return ExecResult(
            sandbox_id=self.sandbox_id,
            argv=info.argv,
            exit_code=info.exit_code,
            signal=info.signal,
            stdout=bytes(kept[ExecStream.STDOUT]),
            stderr=bytes(kept[ExecStream.STDERR]),
            stdout_truncated=cut[ExecStream.STDOUT] or self.truncated,
            stderr_truncated=cut[ExecStream.STDERR] or self.truncated,
            timed_out=info.timed_out,
            oom=info.oom,
            duration_s=info.duration_s,
        )

    def _runs_on(self, timeout_s: float | None) -> DsecError:
        return DsecError(
            ErrorCode.TIMEOUT,
            f"exec {self.id} still runs after {timeout_s} s; cancel it, or wait longer",
            details={"exec_id": self.id},
        )

    # --- Input --------------------------------------------------------------------------------

    async def write(self, data: bytes | str, *, timeout_s: float | None = None) -> None:
        """Give it input; return when its node has taken all of it, each byte once.

        Raises:
            DsecError: ``conflict`` when the command has closed its input, or ended; ``invalid``
                when it was started without; ``timeout`` when it does not read.
        """
        body = data.encode() if isinstance(data, str) else data
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(body, end=False)
        except TimeoutError:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"exec {self.id} has not read its input within {timeout_s} s",
                details={"exec_id": self.id, "accepted": self._written},
            ) from None

    async def close_stdin(self) -> None:
        """End its input; on a terminal, type the end-of-file character. Idempotent on pipes."""
        await self._write(b"", end=True)

    async def _write(self, body: bytes, *, end: bool) -> None:
        async with self._writing:
            if self._written < 0:
                self._written = (await self._write_piece(0, b"", end=False)).accepted
            begin = self._written
            while True:
                piece = body[self._written - begin :][:STDIN_CHUNK_BYTES]
                last = self._written - begin + len(piece) == len(body)
                reply = await self._write_piece(self._written, piece, end=end and last)
                self._written = max(self._written, reply.accepted)
                if self._written - begin >= len(body):
                    return
                if reply.closed:
                    raise DsecError(
                        ErrorCode.CONFLICT,
                        f"exec {self.id} has closed its input, or ended",
                        details={"exec_id": self.id, "reason": "stdin_closed"},
                    )

    async def _write_piece(self, offset: int, piece: bytes, *, end: bool) -> StdinWritten:
        message = WriteStdin(exec_id=self.id, offset=offset, data=piece, end=end, wait_s=_WAIT_S)
        written = await self._ask_for("write_stdin", message, StdinWritten, wait_s=_WAIT_S)
        self._paused_s = max(self._paused_s, written.paused_s)
        return written

    # --- Control ------------------------------------------------------------------------------

    async def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size, 1 to 1,000 each."""
        size = TerminalSize(rows=rows, columns=columns)
        await self._ask_for("resize_exec", ResizeExec(exec_id=self.id, size=size), ExecChanged)

    async def signal(self, number: int, *, target: SignalTarget | str = SignalTarget.TREE) -> None:
        """Send a signal to its whole tree, its ``main`` process, or its ``descendants``.

        Raises:
            DsecError: ``conflict`` when it has ended; ``invalid``.
        """
        message = SignalExec(exec_id=self.id, signal=number, target=SignalTarget(target))
        await self._ask_for("signal_exec", message, ExecChanged, again=False)

    async def cancel(self, *, grace_s: float = 2.0) -> ExecInfo:
        """End its whole tree: TERM, and KILL after ``grace_s``; return when it is over."""
        message = CancelExec(exec_id=self.id, grace_s=grace_s)
        return await self._ask_for("cancel_exec", message, ExecInfo, wait_s=grace_s + _PATIENCE_S)

    async def kill(self) -> ExecInfo:
        """End its whole tree at once; return when it is over."""
        return await self.cancel(grace_s=0.0)

    async def inspect(self) -> ExecInfo:
        """Return what its node knows of it."""
        return await self._ask_for("inspect_exec", InspectExec(exec_id=self.id), ExecInfo)


def failure_of(info: ExecInfo) -> DsecError | None:
    """Return why an exec never ran, or why its end is not known; None for any other."""
    if info.state is not ExecState.FAILED:
        return None
    told = {"what": info.error_what, "reason": info.error_reason}
    return DsecError(
        ErrorCode(info.error_code),
        info.error_message,
        retryable=False,
        details={name: value for name, value in told.items() if value},
    )


async def list_processes(
    ask: Callable[[ListExecs], Awaitable[ExecList]],
    labels: Mapping[str, str] | None,
    include_ended: bool,
) -> list[ExecInfo]:
    """Return all pages of a listing together."""
    found: list[ExecInfo] = []
    while True:
        after = found[-1].exec_id if found else ""
        page = await ask(
            ListExecs(labels=dict(labels or {}), include_ended=include_ended, after=after)
        )
        found += page.execs
        if not page.more or not page.execs:
            return found
