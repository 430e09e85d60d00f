"""This terminal, or this process's pipes, joined to a command in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from dsec.process import failure_of
from dsec_common.errors import DsecError
from dsec_common.wire.exec import ExecStream

if TYPE_CHECKING:
    from dsec.process import Process
    from dsec_common.wire.exec import ExecInfo

_PIECE_BYTES: Final = 65_536
_SIDE_MAX: Final = 1000
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of this terminal, or what is usual without one."""
    # The terminal before the environment: LINES and COLUMNS stay as they were when it is resized.
    for descriptor in (_STDIN, _STDOUT, _STDERR):
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(descriptor)
            if size.lines and size.columns:
                return min(size.lines, _SIDE_MAX), min(size.columns, _SIDE_MAX)
    columns, rows = shutil.get_terminal_size()
    return min(max(rows, 1), _SIDE_MAX), min(max(columns, 1), _SIDE_MAX)


async def attach(process: Process, *, terminal: bool, takes_input: bool = True) -> ExecInfo:
    """Pass input, if it takes any, and output until the command has ended; return how.

    With ``terminal`` every key goes to the command, interrupts too, and this terminal's size.

    Raises:
        DsecError: why the command never ran; what the platform lost.
    """
    with _raw() if terminal else contextlib.nullcontext():
        async with asyncio.TaskGroup() as tasks:
            typing = tasks.create_task(_pass_input(process)) if takes_input else None
            sizing = tasks.create_task(_pass_size(process)) if terminal else None
            async for event in process:
                if event.stream is not ExecStream.EXIT:
                    _write(_STDERR if event.stream is ExecStream.STDERR else _STDOUT, event.data)
            for task in (typing, sizing):
                if task is not None:
                    task.cancel()
    info = await process.wait()
    if (failure := failure_of(info)) is not None:
        raise failure
    return info


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Have each key read as it is typed; this terminal is put back in any case."""
    if not os.isatty(_STDIN):
        yield
        return
    before = termios.tcgetattr(_STDIN)
    try:
        tty.setraw(_STDIN)
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


async def _pass_input(process: Process) -> None:
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
    waits = _may_make_wait()

    def on_readable() -> None:
        loop.remove_reader(_STDIN)
        pieces.put_nowait(_read())

    # A command that reads no more is no failure: its end is told with its output.
    with contextlib.suppress(DsecError):
        while True:
            if not waits:
                data = _read()
            else:
                loop.add_reader(_STDIN, on_readable)
                try:
                    data = await pieces.get()
                finally:
                    loop.remove_reader(_STDIN)
            if not data:
                await process.close_stdin()
                return
            await process.write(data)


def _may_make_wait() -> bool:
    """Return whether input may come later: files and ``/dev/null`` are there, as epoll knows."""
    with select.epoll() as poll:
        try:
            poll.register(_STDIN, select.EPOLLIN)
        except PermissionError:
            return False
    return True


def _read() -> bytes:
    try:
        return os.read(_STDIN, _PIECE_BYTES)
    except OSError:  # the terminal is gone
        return b""


async def _pass_size(process: Process) -> None:
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while True:
            await changed.wait()
            changed.clear()
            with contextlib.suppress(DsecError):  # it has just ended
                await process.resize(*terminal_size())
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


def _write(descriptor: int, data: bytes) -> None:
    stream = sys.stderr if descriptor == _STDERR else sys.stdout
    stream.buffer.write(data)
    stream.buffer.flush()
