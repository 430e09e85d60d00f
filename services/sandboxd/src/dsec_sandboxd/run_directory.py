"""One small directory per sandbox, bind-mounted into it at ``/run/dsec``; they live in memory.

Making and removing a directory on a disk costs up to some milliseconds each, and both are on the
path of every sandbox. Where the place is not on a tmpfs already, one is mounted there; it stays
while the daemon is away, so that its successor finds the directories.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path
from typing import Final

from dsec_common.errors import from_os_error

#: The agent's socket in a run directory.
SOCKET_NAME: Final = "agent.sock"
_TMPFS_MAGIC: Final = 0x01021994
_NOSUID_NODEV_NOEXEC: Final = 0x2 | 0x4 | 0x8
_MNT_DETACH: Final = 2
#: A directory and a socket each, for more sandboxes than a node can have.
_OPTIONS: Final = b"mode=0755,size=16m,nr_inodes=16384"

_libc: Final = ctypes.CDLL(None, use_errno=True)


class RunDirectory:
    """The run directories of one node's sandboxes, below ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path / "s"

    def open(self) -> None:
        """Make the place, on a tmpfs; what an earlier daemon left in it stays for now.

        Raises:
            DsecError: naming the call that failed.
        """
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            if _file_system_of(self.path) != _TMPFS_MAGIC:
                _mount_tmpfs(self.path)
        except OSError as error:
            raise from_os_error("preparing", error, str(self.path)) from error

    def close(self) -> None:
        """Remove the place, and its tmpfs if it has one of its own, unless a sandbox needs it.

        Idempotent.
        """
        if self.names():
            return
        with contextlib.suppress(OSError):  # what is left is an empty directory
            if self.path.is_mount():
                _libc.umount2(os.fsencode(self.path), _MNT_DETACH)
            self.path.rmdir()

    def make(self, local: str) -> Path:
        """Make a sandbox's directory; only root may write it.

        Raises:
            DsecError: naming the call that failed.
        """
        directory = self.path / local
        try:
            directory.mkdir(mode=0o755)
        except OSError as error:
            raise from_os_error("mkdir", error, str(directory)) from error
        return directory

    def rename(self, handle: str, local: str) -> Path:
        """Give a sandbox's directory another name; where it is mounted it is seen by that one too.

        Raises:
            DsecError: naming the call that failed.
        """
        directory = self.path / local
        try:
            (self.path / handle).rename(directory)
        except OSError as error:
            raise from_os_error("rename", error, str(directory)) from error
        return directory

    def find(self, local: str) -> Path | None:
        """Return the directory of a sandbox that an earlier daemon made; None when it is gone."""
        directory = self.path / local
        return directory if directory.is_dir() and not directory.is_symlink() else None

    def names(self) -> list[str]:
        """Return whose directories there are, sorted."""
        try:
            return sorted(os.listdir(self.path))  # noqa: PTH208  thousands, and only their names
        except OSError:
            return []

    def remove(self, local: str) -> None:
        """Remove a sandbox's directory, in which only this daemon makes entries. Idempotent."""
        place = f"{self.path}/{local}"
        try:  # nearly always there is one socket and nothing else, and each call counts
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{place}/{SOCKET_NAME}")  # noqa: PTH108  as above
            os.rmdir(place)  # noqa: PTH106  as above
        except FileNotFoundError:
            return
        except OSError:
            self._remove_all(local)

    def _remove_all(self, local: str) -> None:
        directory = self.path / local
        with contextlib.suppress(FileNotFoundError):
            if directory.is_symlink() or not directory.is_dir():
                directory.unlink()  # none of ours
                return
            for entry in directory.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            directory.rmdir()


def _file_system_of(path: Path) -> int:
    """Return the magic number of the file system, which ``os.statvfs`` does not tell."""
    buffer = (ctypes.c_long * 32)()  # struct statfs begins with the type and is smaller
    if _libc.statfs(os.fsencode(path), buffer) < 0:
        _raise_errno(path)
    return buffer[0]


def _mount_tmpfs(path: Path) -> None:
    if _libc.mount(b"dsec-run", os.fsencode(path), b"tmpfs", _NOSUID_NODEV_NOEXEC, _OPTIONS) < 0:
        _raise_errno(path)


def _raise_errno(path: Path) -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), str(path))
