"""How much memory RocksDB's buffers get: a part of what this process may use at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MIB: Final = 1024 * 1024
WRITE_BUFFER_PART: Final = 0.15
"""Of the memory that this process may use."""

WRITE_BUFFER_BYTES_MIN: Final = 8 * _MIB
WRITE_BUFFER_MAX_BYTES: Final = 512 * _MIB
"""What is in them is read back from the log when a database is opened: a second or two."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")


def write_buffer_bytes(memory_bytes: int) -> int:
    """Return the size of the write buffers in bytes, for a process that may use so much."""
    part = int(memory_bytes * WRITE_BUFFER_PART)
    return min(max(part, WRITE_BUFFER_BYTES_MIN), WRITE_BUFFER_MAX_BYTES)


def usable_memory_bytes(process: Path = Path("/proc/self"), cgroups: Path = _CGROUPS) -> int:
    """Return the least of the machine's memory and the limits of this process's cgroups, in bytes.

    Limits are those of cgroup v1 and v2, of the process's own cgroup and of all above it.
    """
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _text(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        own = root / path.lstrip("/")
        for directory in (own, *own.parents):
            for name in _LIMITS:
                text = _text(directory / name).strip()
                if text.isdecimal():
                    limit = min(limit, int(text))
            if directory == root:
                break
    return limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
