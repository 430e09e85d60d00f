"""Locks on ranges of files: the kernel has no limit for them and charges them to nobody.

A process takes half a million in a few seconds, 192 bytes each. So the kernel tells us of one in
``EVERY``, by a tracepoint; how many there are is read from its cache of them, and only when there
are too many is counted whose they are. A node that takes no locks is never woken.

Counted are the locks that the tables of open files of living threads have. The sandboxes' filter
refuses the one kind that would outlive them, locks of an open file description.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path
from typing import Final

from dsec_sandboxd.kernel.tracepoints import Tracepoint

SANDBOX_LOCKS_MAX: Final = 4096
"""One sandbox has no more than these, when the node has too many."""
NODE_LOCKS_MAX: Final = 32768
"""A node that has fewer asks nobody how many it has."""
EVERY: Final = 4096
"""So many locks, taken or given back on one processor, are told of once."""

_COUNT: Final = "/sys/kernel/slab/file_lock_cache/total_objects"
_KCMP: Final = {"x86_64": 312, "aarch64": 272}
_KCMP_FILES: Final = 2
_KCMP_DIFFERENT: Final = frozenset({1, 2, 3})
_BLOCK_BYTES: Final = 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


class LockWatch:
    """Tells who takes locks while the node has too many.

    Raises:
        OSError: a kernel without the tracepoint, or without the count of its cache.
    """

    def __init__(self) -> None:
        self._count = os.open(_COUNT, os.O_RDONLY | os.O_CLOEXEC)
        self._bound = NODE_LOCKS_MAX
        try:
            self._events = Tracepoint("filelock/posix_lock_inode", ("common_pid",), every=EVERY)
        except OSError:
            os.close(self._count)
            raise

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when ``read`` has news."""
        return self._events.fileno()

    def read(self) -> set[int]:
        """Return the users of the host that took locks since the last call. Never waits."""
        threads = {record.number("common_pid") for record in self._events.read()}
        return {user for thread in threads if (user := _user_of(thread)) >= 0}

    def too_many(self) -> bool:
        """Return whether the node has so many that it is worth to ask whose they are."""
        count = self._locks()
        if count <= NODE_LOCKS_MAX:
            self._bound = NODE_LOCKS_MAX
        return count > self._bound

    def nobody_found(self) -> None:
        """Ask again only when there are half as many more: they are the host's own, or many's."""
        self._bound = max(self._bound, self._locks() * 3 // 2)

    def close(self) -> None:
        """Close every descriptor."""
        self._events.close()
        os.close(self._count)

    def _locks(self) -> int:
        """Return how many the kernel has room for; free ones and others of their size count."""
        return int(os.pread(self._count, 64, 0).split()[0])


def count_locks(processes: list[int], at_most: int) -> int:
    """Return how many locks processes have, as soon as it is more than ``at_most``.

    Args:
        processes: by their ids in this process's namespace; those that are gone have none.
        at_most: ends the counting.
    """
    found = 0
    for process in processes:
        for thread in _with_files_of_their_own(process):
            found += _locks_of(thread, at_most - found)
            if found > at_most:
                return found
    return found


def _with_files_of_their_own(process: int) -> list[int]:
    """Return one thread for each table of open files: most processes have one table."""
    try:
        threads = [int(task.name) for task in Path(f"/proc/{process}/task").iterdir()]
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        if all(_have_different_files(thread, other) for other in found):
            found.append(thread)
    return found


def _have_different_files(one: int, other: int) -> bool:
    number = _KCMP[platform.machine()]
    return _libc.syscall(number, one, other, _KCMP_FILES, 0, 0) in _KCMP_DIFFERENT


def _locks_of(thread: int, at_most: int) -> int:
    found = 0
    try:
        for descriptor in Path(f"/proc/{thread}/fdinfo").iterdir():
            found += _locks_by(descriptor, at_most - found)
            if found > at_most:
                break
    except OSError:  # it has ended
        pass
    return found


def _locks_by(path: Path, at_most: int) -> int:
    """Return how many locks were taken by one descriptor."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # closed meanwhile
        return 0
    found = 0
    try:
        while found <= at_most and (block := os.read(descriptor, _BLOCK_BYTES)):
            found += block.count(b"\nlock:")
    except OSError:
        return found
    finally:
        os.close(descriptor)
    return found


def _user_of(thread: int) -> int:
    """Return a thread's user on the host; -1 when it is gone."""
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except OSError:
        return -1
    found = re.search(r"^Uid:\s*(\d+)", status, re.MULTILINE)
    return int(found.group(1)) if found else -1
