"""Reading a directory of the host into a tree."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dsec_common.errors import from_os_error
from dsec_sandboxd.layers.names import shown
from dsec_sandboxd.layers.streams import CHUNK_BYTES
from dsec_sandboxd.layers.tree import Attributes, Parts, TreeWriter, refuse

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.limits import ImportWatch

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: a named pipe that took a file's place must not stop the import.
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_directory(path: Path, tree: TreeWriter, watch: ImportWatch) -> tuple[str, ...]:
    """Write the content of ``path`` into ``tree``; return warnings, in sentences.

    Symbolic links are copied as links, hard links stay hard links, sockets are left out. The
    directory should not change meanwhile; a file that does is noticed and refused.

    Raises:
        DsecError: ``layer_error`` for a device node or a changed file; ``not_found`` and others
            when the directory cannot be read.
    """
    try:
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error("open directory", error, str(path)) from None
    try:
        copy = _DirectoryCopy(tree, watch, _total_bytes(path))
        copy.directory(root, ())
    finally:
        os.close(root)
    if copy.sockets:
        return (f"left out {copy.sockets} sockets, which mean nothing without their process",)
    return ()


def _total_bytes(path: Path) -> int:
    total = 0
    for _, _, names, descriptor in os.fwalk(path):
        for name in names:
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _attributes(status: os.stat_result) -> Attributes:
    return Attributes(
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
    )


@dataclass(slots=True)
class _DirectoryCopy:
    tree: TreeWriter
    watch: ImportWatch
    total_bytes: int
    sockets: int = 0
    #: First name of every file that has more than one, by device and inode.
    _first_names: dict[tuple[int, int], Parts] = field(default_factory=dict)

    def directory(self, descriptor: int, parts: Parts) -> None:
        self.tree.add_directory(parts, _attributes(os.fstat(descriptor)))
        for name in sorted(os.listdir(descriptor)):
            self._entry(descriptor, name, self.tree.parts("/".join((*parts, name))))

    def _entry(self, parent: int, name: str, parts: Parts) -> None:
        self.watch.advance("read", self.tree.written_bytes, self.total_bytes)
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        mode = status.st_mode
        identity = (status.st_dev, status.st_ino)
        if stat.S_ISSOCK(mode):
            self.sockets += 1
        elif stat.S_ISDIR(mode):
            descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
            try:
                self.directory(descriptor, parts)
            finally:
                os.close(descriptor)
        elif identity in self._first_names:
            self.tree.add_hard_link(parts, self._first_names[identity])
        else:
            if status.st_nlink > 1:
                self._first_names[identity] = parts
            self._leaf(parent, name, parts, status)

    def _leaf(self, parent: int, name: str, parts: Parts, status: os.stat_result) -> None:
        attributes = _attributes(status)
        if stat.S_ISLNK(status.st_mode):
            self.tree.add_symbolic_link(parts, attributes, os.readlink(name, dir_fd=parent))
        elif stat.S_ISREG(status.st_mode):
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=parent)
            try:
                self.tree.add_file(parts, attributes, self._content(descriptor, parts, status))
            finally:
                os.close(descriptor)
        elif stat.S_ISFIFO(status.st_mode):
            self.tree.add_fifo(parts, attributes)
        else:
            raise refuse(
                f"{shown('/'.join(parts))} is a device node; leave /dev out of the directory, a "
                "sandbox gets its own"
            )

    def _content(self, descriptor: int, parts: Parts, expected: os.stat_result) -> Iterator[bytes]:
        while chunk := os.read(descriptor, CHUNK_BYTES):
            yield chunk
            self.watch.advance("read", self.tree.written_bytes, self.total_bytes)
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size, found.st_mtime_ns) != (
            expected.st_ino,
            expected.st_size,
            expected.st_mtime_ns,
        ):
            raise refuse(
                f"{shown('/'.join(parts))} changed while it was read; import again when nothing "
                "writes there"
            )
