"""A command that is started and left running: its descriptors, its signals, how it ended.

A one-shot command (:mod:`dsec_sandboxd.kernel.command`) is over when its call returns. A process
here outlives calls, and daemons: PID 1 keeps its descriptors until :meth:`Process.finish`, and a
later daemon gets it back from ``Kernel.processes``.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from dsec_sandboxd.kernel.interface import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dsec_common.errors import DsecError
    from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, OomVictim

TERMINAL_SIDE_MAX: Final = 1000
"""The most rows and the most columns of a terminal."""


class SignalScope(StrEnum):
    """Which processes of a command a signal goes to."""

    MAIN = "main"
    TREE = "tree"
    DESCENDANTS = "descendants"
    """The tree without the main process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExit:
    """How a command's main process ended. Exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    oom: bool = False
    oom_victim: OomVictim | None = None

    @classmethod
    def of(
        cls, status: int, *, oom: bool = False, oom_victim: OomVictim | None = None
    ) -> ProcessExit:
        """Return what a wait status says."""
        code = os.waitstatus_to_exitcode(status)
        return cls(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            oom=oom,
            oom_victim=oom_victim,
        )


class OutputSink(Protocol):
    """Takes a stream's bytes out of their pipe."""

    truncated: bool

    def take(self, descriptor: int) -> int:
        """Move what is there now, at most 64 KiB; return how much, 0 at the stream's end.

        Raises:
            BlockingIOError: nothing is there.
            OSError: the stream is broken, which is its end, too.
        """
        ...

    def kept(self) -> bytes:
        """Return what is kept of the stream."""
        ...

    def close(self) -> None:
        """Let go of what the sink holds. Idempotent."""
        ...


class OutputKeeper(Protocol):
    """Is asked for a better place for a one-shot command's output once it lasts."""

    def asked(self, run_id: int) -> None:
        """Take note of the command's number before anything of it runs."""
        ...

    def lasting(self, *, fed: bool) -> Mapping[Stream, OutputSink] | None:
        """Return where its output goes from now on; None leaves it in memory.

        ``fed`` says that it has been given all of its input.
        """
        ...

    def fed(self) -> None:
        """Take note that it has been given all of its input."""
        ...

    def over(self, result: CommandResult) -> None:
        """Take note of how it ended, before PID 1 may forget it."""
        ...


class ProcessControl(Protocol):
    """What a process asks of the sandbox that it runs in."""

    def signal(self, run_id: int, number: int, scope: SignalScope) -> None:
        """Signal processes of the command."""
        ...

    def kill(self) -> None:
        """End every process of the command at once."""
        ...

    def alive(self) -> bool:
        """Return whether a process of the command lives."""
        ...

    def close_stdin(self, run_id: int) -> None:
        """Have PID 1 let go of the input's end."""
        ...

    def finish(self, run_id: int) -> None:
        """Have PID 1 read on into nothing, and forget the command."""
        ...

    def abandon(self) -> None:
        """Let go of what belongs to the command here; PID 1 and a later daemon keep theirs."""
        ...

    def ended(self, status: int) -> ProcessExit:
        """Return how it ended, with whether memory ran out meanwhile."""
        ...

    def countdown(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call after ``delay_s`` seconds in which the sandbox runs; return how to forget it."""
        ...


class Process:
    """One command that runs, or did. Its descriptors are this object's until :meth:`finish`.

    Attributes:
        run_id: its number at PID 1, the same for every daemon.
        started: resolves when its descriptors are here, or raises why it never ran.
        exited: resolves when its main process has ended.
        outputs: from which its output is taken; of a terminal, a pipe that :meth:`relay` fills.
        input: the writing end of its standard input, or -1.
        terminal: the master of its terminal, or -1.
        spool: see ``Kernel.launch``; -1 without one.
        is_unread: nobody has taken anything of its output who has not written down that it lasts.
    """

    keeps_streams: Final = True

    def __init__(self, run_id: int, spec: CommandSpec, control: ProcessControl) -> None:
        loop = asyncio.get_running_loop()
        self.run_id = run_id
        self.spec = spec
        self.started: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[ProcessExit] = loop.create_future()
        self.was_started = False
        self.outputs: dict[Stream, int] = {}
        self.input = -1
        self.terminal = -1
        self.spool = -1
        self.is_unread = False
        self._relay_in = -1
        self._control = control
        self._finished = False

    # -- told by the client of PID 1

    def take_streams(self, descriptors: list[int]) -> bool:
        """Take over what PID 1 sent; False, and all closed, when something is missing."""
        self.was_started = True
        wanted = (
            3 if self.spec.terminal else 1 + self.spec.with_input + (not self.spec.merge_stderr)
        )
        if len(descriptors) != wanted:
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        remaining = list(descriptors)
        if self.spec.terminal:
            self.terminal, self.outputs[Stream.STDOUT], self._relay_in = remaining
            return True
        if self.spec.with_input:
            self.input = remaining.pop(0)
        self.outputs = dict(zip(Stream, remaining, strict=False))
        return True

    def is_started(self) -> None:
        """Resolve ``started``."""
        if not self.started.done():
            self.started.set_result(None)

    def is_over(self, status: int) -> None:
        """Resolve ``exited``."""
        if not self.exited.done():
            self.exited.set_result(self._control.ended(status))

    def has_failed(self, error: DsecError) -> None:
        """Resolve what is open with an error."""
        for future in (self.started, self.exited):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting

    # -- asked by the service

    def relay(self) -> int:
        """Move what a terminal printed to where it is taken from; return how much.

        Raises:
            BlockingIOError: nothing is there, or the pipe is full.
            OSError: every process has let go of the terminal.
        """
        return os.splice(self.terminal, self._relay_in, 65536, flags=os.SPLICE_F_NONBLOCK)

    def resize(self, rows: int, columns: int) -> None:
        """Tell a terminal its size; its foreground processes get SIGWINCH.

        Raises:
            OSError: the terminal is gone.
        """
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("=4H", rows, columns, 0, 0))

    def signal(self, number: int, scope: SignalScope) -> None:
        """Send a signal inside; without effect on what has ended.

        Raises:
            DsecError: ``unavailable`` when the sandbox has ended.
        """
        if not self._finished:
            self._control.signal(self.run_id, number, scope)

    def kill(self) -> None:
        """End every process that the command started, at once."""
        if not self._finished:
            self._control.kill()

    def has_processes(self) -> bool:
        """Return whether a process that the command started lives, or is still dying.

        Raises:
            DsecError: ``exhausted`` without free descriptors.
        """
        return not self._finished and self._control.alive()

    def close_stdin(self) -> None:
        """Let the command's input end. Idempotent."""
        if self.input >= 0:
            os.close(self.input)
            self.input = -1
            self._control.close_stdin(self.run_id)

    def countdown(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call after so many seconds in which the sandbox runs; return how to forget it."""
        return self._control.countdown(delay_s, callback)

    def finish(self) -> None:
        """Let go: what it still prints is dropped, a terminal hangs up. Idempotent."""
        if not self._finished:
            self._close()
            self._control.finish(self.run_id)

    def abandon(self) -> None:
        """Let go here alone: it goes on, and a later daemon gets it. Idempotent."""
        if not self._finished:
            self._close()
            self._control.abandon()

    def take_spool(self) -> int:
        """Return the spool's descriptor, which is the caller's now; -1 without one."""
        spool, self.spool = self.spool, -1
        return spool

    def _close(self) -> None:
        self._finished = True
        for descriptor in (
            *self.outputs.values(),
            self.input,
            self.terminal,
            self._relay_in,
            self.spool,
        ):
            if descriptor >= 0:
                os.close(descriptor)
        self.outputs.clear()
        self.input = self.terminal = self._relay_in = self.spool = -1
