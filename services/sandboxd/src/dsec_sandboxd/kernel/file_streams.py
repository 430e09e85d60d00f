"""Streams to a process of the sandbox that goes on after its answer: uploads, trees, watches.

What comes from it is never trusted: sizes are bounded, numbers are looked up, text is only text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Final, NoReturn, Self

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.file_errors import file_error
from dsec_sandboxd.kernel.file_ports import TreeCount, WatchChange, WatchEvent

if TYPE_CHECKING:
    from types import TracebackType

_FRAME_BYTES_MAX: Final = 65_536
_FRAME_RESULT: Final = 0x8000_0000
_RESULT: Final = struct.Struct("=iIQQ")
_EVENT: Final = struct.Struct("=II")
_LENGTH: Final = struct.Struct("=I")
_COMMIT: Final = struct.Struct("=I")
_PUT_CHANGE_MODE: Final = 1 << 16
#: A result is followed by a path.
_RESULT_BYTES_MAX: Final = _RESULT.size + 4096
#: How long the sandbox may take for a piece: it may be out of CPU time, but not for ever.
STREAM_TIMEOUT_S: Final = 30.0

_MOVED_TO: Final = 0x80
_OVERFLOW: Final = 0x4000
_IS_DIRECTORY: Final = 0x4000_0000
_CHANGES: Final = (
    (0x100, WatchChange.CREATED),
    (0x200, WatchChange.DELETED),
    (0x40, WatchChange.MOVED_FROM),
    (_MOVED_TO, WatchChange.MOVED_TO),
    (0x2, WatchChange.MODIFIED),
    (0x4, WatchChange.ATTRIBUTES),
    (_OVERFLOW, WatchChange.OVERFLOW),
)


class _Result:
    """How the process ended its work."""

    def __init__(self, data: bytes) -> None:
        self.error, self.step, self.entries, self.content_bytes = _RESULT.unpack_from(data)
        self.path = os.fsdecode(data[_RESULT.size :])


class FileStream:
    """One stream socket. Frames come out of it whole; a stream without a last word was cut."""

    def __init__(self, descriptor: int, path: str, user: str) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._path = path
        self._user = user
        self._buffer = bytearray()
        self.result: _Result | None = None
        self.closed = False
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the process, which then ends; who waits for it is told. Idempotent."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._let_go()

    def _let_go(self) -> None:
        # Its number may be another's a moment later, so whoever waits for it closes it.
        if self.closed and not self._waiting:
            self._socket.close()

    def _cut(self) -> DsecError:
        return DsecError(
            ErrorCode.UNAVAILABLE,
            f"{self._path!r}: the sandbox, or a process in it, ended the operation: try again",
            details={"operation": "file_stream", "what": "path", "path": self._path},
        )

    def refuse(self, result: _Result) -> NoReturn:
        """Raise the typed error of a failed operation."""
        path = self._path
        if result.path:
            path = f"{path.rstrip('/')}/{result.path}"
        raise file_error(path, self._user, result.step, result.error)

    async def _more(self, timeout_s: float | None) -> bool:
        """Read what is there; false at the end of the stream."""
        if self.closed:
            raise self._cut()
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                data = await asyncio.get_running_loop().sock_recv(
                    self._socket, 2 * _FRAME_BYTES_MAX
                )
        except TimeoutError:
            raise self._slow() from None
        except OSError:
            data = b""
        finally:
            self._waiting -= 1
            self._let_go()
        self._buffer += data
        return bool(data)

    def _slow(self) -> DsecError:
        return DsecError(
            ErrorCode.TIMEOUT,
            f"{self._path!r}: the sandbox did not go on within {STREAM_TIMEOUT_S:g} s: look at "
            "what its processes do",
            details={"operation": "file_stream", "path": self._path},
        )

    async def frame(self, timeout_s: float | None = STREAM_TIMEOUT_S) -> bytes | None:
        """Return the next frame, or None when the process has said its last word (``result``).

        Raises:
            DsecError: ``unavailable`` when the stream was cut, ``timeout``.
        """
        while self.result is None:
            if len(self._buffer) >= _LENGTH.size:
                (marked,) = _LENGTH.unpack_from(self._buffer)
                size = marked & ~_FRAME_RESULT
                is_result = bool(marked & _FRAME_RESULT)
                if size > (_RESULT_BYTES_MAX if is_result else _FRAME_BYTES_MAX + _EVENT.size) or (
                    is_result and size < _RESULT.size
                ):
                    raise self._cut()
                end = _LENGTH.size + size
                if len(self._buffer) >= end:
                    data = bytes(memoryview(self._buffer)[_LENGTH.size : end])
                    del self._buffer[:end]
                    if not is_result:
                        return data
                    self.result = _Result(data)
                    break
            if not await self._more(timeout_s):
                raise self._cut()
        return None

    async def last_word(self) -> _Result:
        """Return the result once the process has said it; other frames are dropped.

        Raises:
            DsecError: what went wrong inside, or ``unavailable`` when the stream was cut.
        """
        while await self.frame() is not None:
            pass
        assert self.result is not None  # noqa: S101  a frame of None says so
        if self.result.error:
            self.refuse(self.result)
        return self.result

    async def send(self, data: bytes) -> None:
        """Return when all of ``data`` is on its way.

        Raises:
            DsecError: why the process takes no more.
        """
        if self.closed:
            raise self._cut()
        self._waiting += 1
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except TimeoutError:
            raise self._slow() from None
        except OSError:
            await self.last_word()
            raise self._cut() from None
        finally:
            self._waiting -= 1
            self._let_go()

    def end(self) -> None:
        """Say that nothing more will be sent."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has gone; its last word says why


class StreamUpload(FileStream):
    """See ``file_ports.FileUpload``."""

    def __init__(self, stream_fd: int, file_fd: int, path: str, user: str) -> None:
        super().__init__(stream_fd, path, user)
        self._file_fd = file_fd

    @property
    def descriptor(self) -> int:
        """Where its content is written."""
        return self._file_fd

    def close(self) -> None:
        """Let go of it. Idempotent."""
        super().close()
        if self._file_fd >= 0:
            os.close(self._file_fd)
            self._file_fd = -1

    async def commit(self, permissions: int, *, change_mode: bool = False) -> None:
        """Give it its name."""
        await self.send(_COMMIT.pack(permissions | (_PUT_CHANGE_MODE if change_mode else 0)))
        await self.last_word()


class StreamTreeSink(FileStream):
    """See ``file_ports.TreeSink``."""

    async def finish(self) -> TreeCount:
        """End the stream and return when all of it is in its place."""
        self.end()
        result = await self.last_word()
        return TreeCount(entries=result.entries, content_bytes=result.content_bytes)


class StreamTreeSource(FileStream):
    """See ``file_ports.TreeSource``."""

    async def receive(self) -> bytes:
        """Return the next piece; empty at the end."""
        data = await self.frame()
        if data is None:
            await self.last_word()
            return b""
        return data


class StreamWatcher(FileStream):
    """See ``file_ports.Watcher``."""

    async def next(self) -> WatchEvent | None:
        """Return the next event; None when what was watched is gone."""
        while (data := await self.frame(None)) is not None:
            if len(data) < _EVENT.size:
                raise self._cut()
            mask, cookie = _EVENT.unpack_from(data)
            for bit, change in _CHANGES:
                if mask & bit:
                    return WatchEvent(
                        change=change,
                        path=os.fsdecode(data[_EVENT.size :]),
                        is_directory=bool(mask & _IS_DIRECTORY),
                        move_id=cookie,
                    )
        await self.last_word()
        return None
