"""Processes named so that a recycled pid is never mistaken for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from pathlib import Path
from typing import Final

import msgspec

_KILL_AFTER_S: Final = 30.0
_START_TIME_FIELD: Final = 19
"""Of ``/proc/<pid>/stat``, counted after the command's closing parenthesis (field 22 in all)."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process: its pid and the kernel's clock tick at which it started."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a living process; None when there is none (or a zombie)."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else cls(pid, int(fields[_START_TIME_FIELD]))

    @property
    def alive(self) -> bool:
        """Whether this very process is still there."""
        return ProcessIdentity.of(self.pid) == self

    def signal(self, number: int) -> bool:
        """Send a signal to this very process; return False when it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The descriptor holds the process; only now does the comparison mean anything.
            if not self.alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def wait_gone(self, timeout_s: float) -> bool:
        """Block until the process has ended; return False when it still runs after the timeout."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            return bool(poller.poll(timeout_s * 1000))
        finally:
            os.close(descriptor)

    def end(self, timeout_s: float = _KILL_AFTER_S) -> bool:
        """End the process: TERM, then KILL after ``timeout_s``. Return whether it was there."""
        if not self.signal(signal.SIGTERM):
            return False
        if not self.wait_gone(timeout_s):
            self.signal(signal.SIGKILL)
            self.wait_gone(timeout_s)
        return True


async def wait_exit(pid: int) -> None:
    """Return when a child of ours has ended, without a thread and without reaping it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    descriptor = os.pidfd_open(pid)

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, tell)
    try:
        await ended
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_reader(descriptor)
        os.close(descriptor)
