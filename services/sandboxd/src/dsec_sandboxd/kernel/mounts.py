"""The one mount that the daemon itself makes: a detached copy of a sandbox's run directory."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, Final

from dsec_common.errors import from_os_error

if TYPE_CHECKING:
    from pathlib import Path

_OPEN_TREE: Final = 428  # the same number on every machine
_MOUNT_SETATTR: Final = 442
_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_READ_ONLY_NOSUID_NODEV_NOEXEC: Final = 0x1 | 0x2 | 0x4 | 0x8

_libc = ctypes.CDLL(None, use_errno=True)


def clone_read_only(directory: Path) -> int:
    """Return a detached, read-only mount of ``directory``; the caller closes it.

    A descriptor's mount belongs to no path, so nothing of the host's names goes along with it.

    Raises:
        DsecError: ``not_found`` when the directory is absent, ``internal`` otherwise.
    """
    path = os.fsencode(directory)
    descriptor: int = _libc.syscall(
        _OPEN_TREE, _AT_FDCWD, path, _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    )
    if descriptor < 0:
        raise _last_error("open_tree", directory)
    attributes = struct.pack("=4Q", _READ_ONLY_NOSUID_NODEV_NOEXEC, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, descriptor, b"", _AT_EMPTY_PATH, attributes, len(attributes)
    )
    if result < 0:
        failure = _last_error("mount_setattr", directory)
        os.close(descriptor)
        raise failure
    return descriptor


def extra_mounts(run_directory: Path | None, mps_pipes: Path | None) -> list[int]:
    """Return detached mounts of what a sandbox sees of the host, in order; the caller closes them.

    Raises:
        DsecError: as :func:`clone_read_only`; then nothing stays open.
    """
    if run_directory is None:
        return []
    run = clone_read_only(run_directory)
    if mps_pipes is None:
        return [run]
    try:
        return [run, clone_read_only(mps_pipes)]
    except BaseException:
        os.close(run)
        raise


def _last_error(operation: str, directory: Path) -> Exception:
    number = ctypes.get_errno()
    return from_os_error(operation, OSError(number, os.strerror(number)), str(directory))
