"""Starts real processes inside a sandbox's cgroups, the way the spawner and PID 1 do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dsec_sandboxd.kernel.cgroups import Cgroup, CgroupDriver, CgroupLimits

_CLONE3: Final = 435
_CLONE_INTO_CGROUP: Final = 0x200000000
_ARGUMENT_WORDS: Final = 11
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def clone_into(directory_fd: int) -> int:
    """Fork into the cgroup behind ``directory_fd``; return as ``os.fork`` does.

    Raises:
        OSError: what the kernel answered.
    """
    words = (ctypes.c_uint64 * _ARGUMENT_WORDS)()
    words[0], words[4], words[10] = _CLONE_INTO_CGROUP, signal.SIGCHLD, directory_fd
    result = _libc.syscall(_CLONE3, ctypes.byref(words), ctypes.sizeof(words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def make_cgroup(driver: CgroupDriver, local: str, limits: CgroupLimits) -> Cgroup:
    """Make a sandbox's cgroups with its limits as the spawner does, and have them watched."""
    cgroup = driver.adopt(local)
    directories = [Path(parent) / local for parent in driver.parents()]
    for directory in directories:
        directory.mkdir()
    for tree, file, text in driver.limit_texts(limits):
        write_text(directories[tree], file, text)
    cgroup.watch_oom(end_all=limits.end_all_on_oom)
    return cgroup


def write_text(directory: Path, file: str, text: bytes) -> None:
    """Write to a file that must be there, in one call."""
    descriptor = os.open(directory / file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def start(cgroup: Cgroup, script: str) -> subprocess.Popen[str]:
    """Start ``script`` (Python) in a sandbox's cgroups."""
    return _start(script, lambda: enter(cgroup, Path(cgroup.directory)))


def start_exec(cgroup: Cgroup, directory_fd: int, script: str) -> subprocess.Popen[str]:
    """Start ``script`` (Python) in a command's cgroup of a new sandbox."""
    return _start(script, lambda: enter(cgroup, Path(f"/proc/self/fd/{directory_fd}")))


def enter(cgroup: Cgroup, directory: Path) -> None:
    """Move the calling process into the sandbox's limits and a v2 directory."""
    for limited in v1_directories(cgroup):
        write_text(limited, "tasks", b"0")
    write_text(directory, "cgroup.procs", b"0")


def v1_directories(cgroup: Cgroup) -> list[Path]:
    """Return the sandbox's directories in v1 hierarchies; none on a pure v2 host."""
    return [Path(directory) for directory in getattr(cgroup, "v1", {}).values()]


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process prints; waits for it."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def ended(process: subprocess.Popen[str]) -> int:
    """Return the exit code once the process has ended, without blocking the loop."""
    pidfd = os.pidfd_open(process.pid)
    try:
        await readable(pidfd)
    finally:
        os.close(pidfd)
    return process.wait()


async def readable(descriptor: int, timeout_s: float = 20.0) -> None:
    """Return once the descriptor is readable; raise TimeoutError when it does not become so."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    finally:
        loop.remove_reader(descriptor)


async def next_ooms(driver: CgroupDriver) -> list[str]:
    """Return the next sandboxes that the driver says ran out of memory."""
    while True:
        await readable(driver.oom_fileno())
        if found := driver.read_ooms():
            return found


@contextlib.contextmanager
def ending(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Kill and reap the processes at the end, whatever happened."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def _start(script: str, before_exec: Callable[[], None]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-S", "-u", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=before_exec,  # noqa: PLW1509  the child must enter the cgroup by itself
    )
