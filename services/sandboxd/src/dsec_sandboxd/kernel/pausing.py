"""Stopping a sandbox's processes, and the time limits that stand still with them.

Several may want a sandbox to stand still at once: its owner paused it, and a snapshot is being
taken. It goes on when the last of them lets go. In one that is paused a command of the platform's
may run alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from dsec_common.errors import DsecError, unavailable
from dsec_common.timers import Timer, timers_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dsec_sandboxd.kernel.cgroups import Cgroup
    from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec

#: Why a sandbox stands still: each reason holds it once.
PAUSED: Final = "paused"

ALONE: Final = "alone"
"""Name of a directory beside those of commands, which is there while a command runs alone: by it
the next daemon knows that what is not stopped ran alone, also where there was nothing to stop."""


class AloneKernel(Protocol):
    """The part of the kernel seam that does something in a paused sandbox."""

    async def run_alone(self, local: str, command: CommandSpec) -> CommandResult:
        """Run a command in a paused sandbox; whatever ran in it stands still all the while.

        Over its ``timeout_s`` the command's tree is killed, and ``timed_out`` is all that is told.
        Cancelling the call kills it, too. What it leaves behind stands still with the others.

        Raises:
            DsecError: ``not_found``; ``unavailable`` when the sandbox is not paused, stands still
                for another reason, too, or has ended meanwhile; what a command may fail with.
        """
        ...


class Countdown:
    """Calls back once, after seconds of which those do not count that it was held for.

    Args:
        delay_s: how long from now.
        callback: called on the event loop.
        held: begin held.
    """

    __slots__ = ("_callback", "_handle", "_left_s", "_loop")

    def __init__(self, delay_s: float, callback: Callable[[], None], *, held: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._left_s = delay_s
        self._callback: Callable[[], None] | None = callback
        self._handle: Timer | None = None
        if not held:
            self.go_on()

    def hold(self) -> None:
        """Stop counting. Idempotent."""
        if self._handle is not None:
            self._left_s = max(self._handle.when - self._loop.time(), 0.0)
            self._handle.cancel()
            self._handle = None

    def go_on(self) -> None:
        """Count on from where it was held. Idempotent."""
        if self._handle is None and self._callback is not None:
            self._handle = timers_of(self._loop).call_later(self._left_s, self._fire)

    def cancel(self) -> None:
        """Never call back any more. Idempotent."""
        self._callback = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        callback, self._callback, self._handle = self._callback, None, None
        if callback is not None:
            callback()


class Freezer:
    """Stops a sandbox's processes for as long as anyone has a reason, and its time limits too."""

    __slots__ = ("_borrowed", "_cgroup", "_counting", "_lock", "_reasons", "_stopped")

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._reasons: set[str] = set()
        self._counting: set[Countdown] = set()
        self._lock = asyncio.Lock()
        self._borrowed = 0
        self._stopped: list[str] = []  # commands that stand still by themselves

    @property
    def frozen(self) -> bool:
        """Whether the processes stand still."""
        return bool(self._reasons)

    def holds(self, reason: str) -> bool:
        """Return whether this reason holds the sandbox."""
        return reason in self._reasons

    async def hold(self, reason: str) -> None:
        """Stop every process; on return all stand still. Idempotent.

        Raises:
            DsecError: ``timeout`` when one is in a call that cannot be interrupted; the sandbox
                then runs on.
        """
        async with self._lock:
            if not self._reasons or self._stopped:
                # Also where another process has done so: that may be about to let go.
                await self._cgroup.freeze()
                for countdown in self._counting:
                    countdown.hold()
            if self._stopped:
                self._let_commands_go()
            self._reasons.add(reason)

    def pause_commands(self) -> None:
        """Hold a sandbox that an earlier daemon had paused, but for its PID 1, until it is held.

        Not one of its commands runs in between.

        Raises:
            DsecError: ``not_found`` when the sandbox is gone.
        """
        self._reasons.add(PAUSED)
        for name in self._cgroup.exec_ids():
            # Empty or not: PID 1 may be about to begin what the dead daemon had asked for.
            self._cgroup.stop_exec(name)
            self._stopped.append(name)
        self._cgroup.thaw()

    def let_all_go(self) -> None:
        """Let go on whatever an earlier daemon stopped.

        Raises:
            DsecError: ``not_found`` when the sandbox is gone.
        """
        self._cgroup.thaw()
        for name in self._cgroup.exec_ids():
            if self._cgroup.exec_stopped(name):
                self._cgroup.let_exec_go(name)

    def release(self, reason: str) -> None:
        """Let the processes go on unless another reason holds them. Idempotent.

        Raises:
            DsecError: ``not_found`` when the sandbox is gone.
        """
        if reason not in self._reasons:
            return
        if len(self._reasons) == 1:
            self._let_commands_go()
            if not self._borrowed:
                self._cgroup.thaw()
            for countdown in self._counting:
                countdown.go_on()
        self._reasons.discard(reason)

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """Leave stopping and letting go to another process while the context lasts.

        Whatever that does, and should it be killed in the middle, the sandbox then stands still
        only if somebody here has a reason.
        """
        async with self._lock:  # nobody runs alone in it
            self._borrowed += 1
        try:
            yield
        finally:
            self._borrowed -= 1
            with contextlib.suppress(DsecError):  # it has ended meanwhile
                if self._reasons:
                    await self._cgroup.freeze()
                elif not self._borrowed:
                    self._cgroup.thaw()

    @asynccontextmanager
    async def alone(self, is_free: Callable[[str], bool]) -> AsyncIterator[None]:
        """Let what begins while the context lasts run, and nothing that was begun before.

        Args:
            is_free: says of a command's directory whether it is there for another one to begin in.

        Raises:
            DsecError: ``unavailable`` when the sandbox is not paused, or stands still for somebody
                else, too; then nothing has changed.
        """
        async with self._lock:
            if self._borrowed or self._reasons != {PAUSED}:
                raise unavailable("the sandbox is not paused, or is just being copied: try again")
            cgroup = self._cgroup
            try:
                names = cgroup.exec_ids()
                for name in names:
                    # Also one that PID 1 was told to begin and was stopped before it did: it will.
                    if name != ALONE and (cgroup.exec_populated(name) or not is_free(name)):
                        cgroup.stop_exec(name)
                        self._stopped.append(name)
                if ALONE not in names:
                    os.close(cgroup.create_exec(ALONE))
                cgroup.thaw()
                yield
            finally:
                # It has ended meanwhile, or something hangs in the kernel: that runs on. What ran
                # before stands still all the same until the sandbox goes on.
                with contextlib.suppress(DsecError):
                    await cgroup.freeze()
                    self._let_commands_go()

    def _let_commands_go(self) -> None:
        self._cgroup.remove_exec(ALONE)  # first: what is let go did not run alone
        while self._stopped:
            self._cgroup.let_exec_go(self._stopped[-1])
            self._stopped.pop()

    def countdown(self, delay_s: float, callback: Callable[[], None]) -> Countdown:
        """Return a countdown that stands still with the sandbox; see :meth:`forget`."""
        made = Countdown(delay_s, callback, held=self.frozen)
        self._counting.add(made)
        return made

    def forget(self, countdown: Countdown) -> None:
        """Cancel a countdown. Idempotent."""
        countdown.cancel()
        self._counting.discard(countdown)
