"""What files and processes keep in memory: page cache residency, proportional shares, charges."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache (mincore); nothing is read in by asking.

    Raises:
        OSError: when the kernel does not say.
    """
    size = path.stat().st_size
    if size == 0:
        return 0
    pages = -(-size // _PAGE_BYTES)
    states = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file:
        _libc.mmap.restype = ctypes.c_void_p
        arguments = (None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno())
        address = _libc.mmap(*arguments, ctypes.c_long(0))
        if address in {None, ctypes.c_void_p(-1).value}:
            raise OSError(ctypes.get_errno(), "mmap", str(path))
        try:
            mapped = ctypes.c_void_p(address)
            if _libc.mincore(mapped, ctypes.c_size_t(size), states):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
        finally:
            _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(state & 1 for state in states) * _PAGE_BYTES


def forget(path: Path) -> None:
    """Let go of a file's clean pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_bytes() -> int:
    """Return the page cache of the whole machine."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("Cached:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no line Cached")


def shares_of_mapping(pids: Iterable[int], name: str) -> tuple[int, int]:
    """Return the sums of resident and proportional bytes of one file's mappings, over processes.

    ``name`` is the end of the mapped file's path as the processes see it.
    """
    resident = proportional = 0
    for pid in pids:
        inside = False
        for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                inside = line.endswith(name)
            elif inside and words[0] == "Rss:":
                resident += int(words[1]) * 1024
            elif inside and words[0] == "Pss:":
                proportional += int(words[1]) * 1024
    return resident, proportional


def processes_named(marker: str) -> list[int]:
    """Return the processes one of whose arguments is ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker.encode() in arguments:
            found.append(int(entry.name))
    return found


def charged_bytes(pid: int) -> int:
    """Return what the memory cgroup of a process is charged with, v1 or v2."""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return int(_read(f"/sys/fs/cgroup/memory{path}/memory.usage_in_bytes"))
        if not controllers:
            unified = Path(f"/sys/fs/cgroup{path}/memory.current")
            if unified.exists():
                return int(unified.read_text(encoding="ascii"))
    raise ValueError(f"process {pid} is in no memory cgroup")


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii")
