"""Private working directories of running imports, and the removal of dead ones.

An import works in ``staging/<id>/`` and holds a file lock on ``staging/<id>.lock`` as long as it
lives. The kernel drops the lock with the process, however it ends, so whoever can take the lock
knows that the directory belongs to nobody, on every node that shares the store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path

_LOCK_SUFFIX: Final = ".lock"
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK_POLL_S: Final = 0.01


@contextmanager
def staging_directory(staging: Path) -> Iterator[Path]:
    """Yield a new empty directory that only root can enter; it is gone afterwards."""
    while True:
        directory = staging / uuid.uuid4().hex
        lock_path = staging / (directory.name + _LOCK_SUFFIX)
        descriptor = os.open(lock_path, _LOCK_FLAGS | os.O_EXCL, 0o600)
        # A recovery may have found the file before it was locked: then another one is made.
        if _take_lock(descriptor) and os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)
    try:
        directory.mkdir(mode=0o700)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def remove_dead(staging: Path, before: Callable[[Path], None]) -> int:
    """Remove what crashed imports left and return how many there were.

    ``before`` is called with each dead directory, so that what it was about to publish can be
    looked at. Living imports, of other processes and hosts too, are left alone.
    """
    removed = 0
    for lock_path in sorted(staging.glob(f"*{_LOCK_SUFFIX}")):
        try:
            descriptor = os.open(lock_path, _LOCK_FLAGS & ~os.O_CREAT)
        except FileNotFoundError:
            continue
        try:
            if not _take_lock(descriptor):
                continue
            directory = lock_path.with_suffix("")
            before(directory)
            shutil.rmtree(directory, ignore_errors=True)
            # A program that the dead import had started may still have added a file: another time.
            if not directory.exists():
                lock_path.unlink(missing_ok=True)
            removed += 1
        finally:
            os.close(descriptor)
    return removed


@contextmanager
def exclusive(lock_path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the store's lock against all other threads, processes and hosts.

    Raises:
        DsecError: ``unavailable`` when another holds it for longer than ``timeout_s``.
    """
    descriptor = os.open(lock_path, _LOCK_FLAGS, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        # Polled, because a lock that blocks cannot be given up.
        while not _take_lock(descriptor):
            if time.monotonic() >= deadline:
                raise DsecError(
                    ErrorCode.UNAVAILABLE,
                    f"the layer store's lock {lock_path} has been held for {timeout_s:g} s; look "
                    "for a stopped process that uses this store",
                    retry_after_s=1.0,
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, staging: Path) -> None:
    """Put ``data`` at ``path``, whole or not at all, also after a power cut."""
    temporary = staging / f"{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
