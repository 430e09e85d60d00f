"""Running a program of the host without stopping the daemon for it.

The event loop's own way to start a process copies the daemon's page tables: tens of milliseconds in
which every sandbox waits. ``subprocess`` starts one by vfork(2), in half of one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from dsec_sandboxd.kernel.spawner import readable

_LAST_WORDS: Final = 4096


async def run_program(
    arguments: Sequence[str],
    *,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    listen: bool = False,
) -> tuple[int, bytes]:
    """Run a program until it has ended; it does not outlive a cancelled or late caller.

    Args:
        arguments: the program and what it is given.
        deadline_s: it is killed after so many seconds.
        environment: instead of the daemon's.
        descriptors: that it inherits, under their numbers.
        listen: to its output, too, and not to its errors alone.

    Returns:
        Its exit code, negative for the signal that ended it, and the last 4 KiB of what it said.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it took too long.
    """
    said = os.memfd_create("output", os.MFD_CLOEXEC)
    try:
        process = subprocess.Popen(  # noqa: ASYNC220  as the module says
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=said if listen else subprocess.DEVNULL,
            stderr=said,
            pass_fds=tuple(descriptors),
            env=environment,
        )
        try:
            await _ended(process.pid, deadline_s)
        finally:
            if process.poll() is None:
                process.kill()
                await asyncio.to_thread(process.wait)  # it may hang in the kernel
        size = os.fstat(said).st_size
        return process.returncode, os.pread(said, _LAST_WORDS, max(size - _LAST_WORDS, 0))
    finally:
        os.close(said)


async def _ended(pid: int, deadline_s: float) -> None:
    pidfd = os.pidfd_open(pid)  # a child that nobody has waited for: the number is its own
    try:
        async with asyncio.timeout(deadline_s):
            await readable(pidfd)
    finally:
        os.close(pidfd)
