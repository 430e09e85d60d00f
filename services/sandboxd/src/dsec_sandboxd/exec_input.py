"""What a command is given to read: in order, each byte once, however often it is sent.

Input is appended to a spool on the tmpfs and moved from there into the command's pipe by
``splice``, which moves the spool's position with it. PID 1 keeps the spool's descriptor beside the
pipe's, so a later daemon goes on at exactly the byte where a dead one stopped. A terminal is no
pipe; there a daemon's death between two lines may have the last piece typed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.exec_log import punch

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.process import Process

WINDOW_BYTES: Final = 1 << 20
"""How much input waits for a command that does not read it."""
_MOVED_BYTES: Final = 65_536
_PUNCHED_EVERY: Final = 1 << 20
_END_OF_FILE: Final = b"\x04"


class Input:
    """One command's standard input.

    Attributes:
        accepted: the offset behind the last byte taken from the caller.
        closed: nothing more is taken.
    """

    def __init__(self, process: Process, spool: int, on_closed: Callable[[], None]) -> None:
        """Take over a spool; its size is what was accepted, its position what was given.

        Args:
            process: has been started.
            spool: a descriptor, from now on this object's.
            on_closed: called once the caller's end of file was accepted.
        """
        self._process = process
        self._spool = spool
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self.accepted = os.fstat(spool).st_size
        self._given = self.accepted if process.terminal >= 0 else os.lseek(spool, 0, os.SEEK_CUR)
        self._punched = 0
        self._ended = False
        self._watched = -1
        self._room: list[asyncio.Future[None]] = []
        self.closed = process.input < 0 and process.terminal < 0

    def resume(self, *, ended: bool) -> None:
        """Go on where another daemon stopped."""
        self._ended = ended
        self.closed = self.closed or ended
        self._feed()

    async def write(self, offset: int, data: bytes, *, end: bool, wait_s: float) -> None:
        """Accept what fits of a piece; wait for room when nothing does.

        Raises:
            DsecError: ``conflict`` when bytes before ``offset`` are missing.
        """
        if offset > self.accepted:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"the input was accepted up to {self.accepted} and this piece begins at {offset}; "
                "send what is between first",
                details={"reason": "gap", "accepted": self.accepted},
            )
        deadline = self._loop.time() + wait_s
        while not self.closed:
            rest = data[self.accepted - offset :]
            if rest:
                self._accept(rest)
            if self.accepted >= offset + len(data):
                break
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                return
            await self._wait_for_room(left_s)
        if end and not self.closed:
            self._end()

    def _accept(self, data: bytes) -> None:
        if self._process.terminal >= 0:
            self._type(data)
            return
        room = WINDOW_BYTES - (self.accepted - self._given)
        if room > 0:
            with contextlib.suppress(OSError):  # the tmpfs is full: there is no room now
                self.accepted += os.pwrite(self._spool, data[:room], self.accepted)
        self._feed()

    def _type(self, data: bytes) -> None:
        try:
            written = os.write(self._process.terminal, data)
        except BlockingIOError:
            self._watch(self._process.terminal)
            return
        except OSError:
            self._break()
            return
        self.accepted += written
        with contextlib.suppress(OSError):
            os.ftruncate(self._spool, self.accepted)

    def _end(self) -> None:
        if self._process.terminal >= 0:
            self._type(_END_OF_FILE)
            return
        self._ended = self.closed = True
        self._on_closed()
        self._feed()

    def _feed(self) -> None:
        """Give the command what it takes now."""
        while self._given < self.accepted and self._process.input >= 0:
            try:
                moved = os.splice(
                    self._spool,
                    self._process.input,
                    min(_MOVED_BYTES, self.accepted - self._given),
                    flags=os.SPLICE_F_NONBLOCK,
                )
            except BlockingIOError:
                self._watch(self._process.input)
                return
            except OSError:
                moved = 0
            if moved <= 0:
                self._break()
                return
            self._given += moved
            if self._given - self._punched >= _PUNCHED_EVERY:
                with contextlib.suppress(OSError):
                    punch(self._spool, self._given)
                self._punched = self._given
            self._has_room()
            if moved == _MOVED_BYTES:
                self._watch(self._process.input)  # others have their turn
                return
        self._unwatch()
        if self._ended and self._process.input >= 0:
            self._process.close_stdin()

    def _break(self) -> None:
        """Take note that the command reads no more."""
        self._unwatch()
        self.closed = True
        self._has_room()
        if self._process.input >= 0:
            self._process.close_stdin()

    def _watch(self, descriptor: int) -> None:
        if self._watched < 0:
            self._watched = descriptor
            self._loop.add_writer(descriptor, self._on_writable)

    def _unwatch(self) -> None:
        if self._watched >= 0:
            self._loop.remove_writer(self._watched)
            self._watched = -1

    def _on_writable(self) -> None:
        if self._process.terminal >= 0:
            self._unwatch()
            self._has_room()
        else:
            self._feed()

    async def _wait_for_room(self, wait_s: float) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._room.append(waiter)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await waiter

    def _has_room(self) -> None:
        waiting, self._room = self._room, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Let go of the spool; waiting writers return. Idempotent."""
        self._unwatch()
        self.closed = True
        self._has_room()
        if self._spool >= 0:
            os.close(self._spool)
            self._spool = -1
