"""The one place where imported content becomes files: a writer that cannot leave its directory.

Every source (directory, archive, image) goes through :class:`TreeWriter`, so one set of rules
holds for all:

- A path is relative, without ``..``, and none of its parents is a symbolic link: parents are opened
  component by component with ``O_NOFOLLOW``. Links, absolute ones too, are kept as content.
- Device nodes and sockets are never made.
- Set-user-id and set-group-id bits are removed: a sandbox runs without them anyway.
- Owners from 65536 up become 0, since a sandbox has only that many ids.
- Extended attributes are not kept; ``trusted.*`` would steer overlayfs, ``security.*`` give power.
- Among members of the same name the last wins.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.names import shown

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.limits import ImportLimits

#: Path components below the tree's root; the root itself is the empty tuple.
Parts = tuple[str, ...]

SANDBOX_IDS: Final = 65536
_MODE_KEPT: Final = 0o1777
#: What ext4 (2446) and the EROFS build time can hold, with room.
_MTIME_MAX_NS: Final = (1 << 33) * 1_000_000_000
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Attributes:
    """Permission bits, owner, group and modification time of one entry."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


#: What a directory gets that no member describes: fixed, so that equal input gives equal images.
IMPLIED_DIRECTORY: Final = Attributes(mode=0o755, uid=0, gid=0, mtime_ns=0)


def refuse(message: str) -> DsecError:
    """Return the error for content that must not become a layer."""
    return DsecError(ErrorCode.LAYER_ERROR, f"{message}; nothing was imported")


class TreeWriter:
    """Writes one tree below ``root``, an empty directory that nobody else writes to.

    A context manager: leaving it closes descriptors. :meth:`finish` must be called last, since
    directories get their modes and times only when their content is complete.

    Every method raises ``DsecError``: ``layer_error`` for forbidden content, ``exhausted`` when a
    limit or the disk is full.
    """

    def __init__(self, root: Path, limits: ImportLimits) -> None:
        self._limits = limits
        self._root_fd = os.open(root, _DIRECTORY_FLAGS)
        self._directories: dict[Parts, Attributes] = {(): IMPLIED_DIRECTORY}
        self._parent: Parts = ()
        self._parent_fd = self._root_fd
        self._bytes = 0
        self._entries = 0
        self._latest_mtime_ns = 0
        self._stripped_set_id = 0
        self._reowned = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._forget_parent()
        os.close(self._root_fd)

    @property
    def written_bytes(self) -> int:
        """File content written so far."""
        return self._bytes

    @property
    def latest_mtime_s(self) -> int:
        """The newest modification time of the tree, in whole seconds, rounded up."""
        return -(-self._latest_mtime_ns // 1_000_000_000)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was changed on the way in, in sentences."""
        found = []
        if self._stripped_set_id:
            found.append(f"removed set-user-id or set-group-id from {self._stripped_set_id} files")
        if self._reowned:
            found.append(f"gave {self._reowned} entries owned by ids from 65536 up to id 0")
        return tuple(found)

    def parts(self, name: str) -> Parts:
        """Return the components of a member's name; ``.`` and empty ones are dropped.

        Raises:
            DsecError: ``layer_error`` for an absolute name, ``..``, NUL, or a length over a limit.
        """
        limits = self._limits
        if "\0" in name:
            raise refuse(f"the name {shown(name)} holds a NUL byte")
        if name.startswith("/"):
            raise refuse(f"the name {shown(name)} is absolute; make names relative to the root")
        parts = tuple(part for part in name.split("/") if part not in {"", "."})
        if ".." in parts:
            raise refuse(f"the name {shown(name)} climbs out of the layer with '..'")
        if (
            len(os.fsencode(name)) > limits.path_bytes_max
            or len(parts) > limits.depth_max
            or any(len(os.fsencode(part)) > limits.name_bytes_max for part in parts)
        ):
            raise refuse(
                f"the name {shown(name)} is too long: at most {limits.name_bytes_max} bytes a "
                f"component, {limits.path_bytes_max} in all, {limits.depth_max} components"
            )
        return parts

    def add_directory(self, parts: Parts, attributes: Attributes) -> None:
        """Make a directory, or give an existing one these attributes."""
        self._count_entry()
        if parts:
            parent = self._open_parent(parts)
            try:
                os.mkdir(parts[-1], 0o700, dir_fd=parent)
            except FileExistsError:
                mode = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode
                if not stat.S_ISDIR(mode):
                    os.unlink(parts[-1], dir_fd=parent)
                    os.mkdir(parts[-1], 0o700, dir_fd=parent)
        self._directories[parts] = self._allowed(attributes)

    def add_file(self, parts: Parts, attributes: Attributes, chunks: Iterable[bytes]) -> None:
        """Make a regular file of ``chunks``."""
        self._count_entry()
        parent = self._clear(parts)
        allowed = self._allowed(attributes)
        descriptor = os.open(parts[-1], _NEW_FILE_FLAGS, 0o600, dir_fd=parent)
        try:
            for chunk in chunks:
                self._count_bytes(len(chunk))
                view = memoryview(chunk)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fchown(descriptor, allowed.uid, allowed.gid)
            os.fchmod(descriptor, allowed.mode)
            os.utime(descriptor, ns=(allowed.mtime_ns, allowed.mtime_ns))
        finally:
            os.close(descriptor)

    def add_symbolic_link(self, parts: Parts, attributes: Attributes, target: str) -> None:
        """Make a symbolic link to any ``target``; it means something only in the sandbox."""
        self._count_entry()
        if not target or "\0" in target or len(os.fsencode(target)) > self._limits.link_bytes_max:
            raise refuse(
                f"the symbolic link {shown('/'.join(parts))} has the target {shown(target)}, which "
                f"is empty, holds a NUL byte or is over {self._limits.link_bytes_max} bytes"
            )
        parent = self._clear(parts)
        os.symlink(target, parts[-1], dir_fd=parent)
        self._apply_by_name(parent, parts[-1], self._allowed(attributes))

    def add_hard_link(self, parts: Parts, target: Parts) -> None:
        """Make another name for the entry ``target``, which must exist in the tree already."""
        self._count_entry()
        if parts == target:
            return
        what = f"the hard link {shown('/'.join(parts))} to {shown('/'.join(target))}"
        if not target:
            raise refuse(f"{what} names a directory")
        # Held apart from the cached parent, which the link's own parent is about to replace.
        source = os.dup(self._open_parent(target, create=False))
        try:
            try:
                mode = os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode
            except FileNotFoundError:
                raise refuse(f"{what} names nothing that came before it") from None
            if stat.S_ISDIR(mode):
                raise refuse(f"{what} names a directory")
            parent = self._clear(parts)
            try:
                os.link(
                    target[-1],
                    parts[-1],
                    src_dir_fd=source,
                    dst_dir_fd=parent,
                    follow_symlinks=False,
                )
            except FileNotFoundError:
                raise refuse(f"{what} replaces its own target") from None
        finally:
            os.close(source)

    def add_fifo(self, parts: Parts, attributes: Attributes) -> None:
        """Make a named pipe."""
        self._count_entry()
        parent = self._clear(parts)
        os.mkfifo(parts[-1], 0o600, dir_fd=parent)
        allowed = self._allowed(attributes)
        self._apply_by_name(parent, parts[-1], allowed)
        os.chmod(parts[-1], allowed.mode, dir_fd=parent)

    def remove(self, parts: Parts, *, keep: frozenset[Parts] | set[Parts] = frozenset()) -> None:
        """Remove an entry with all below it, except for the paths in ``keep``.

        ``keep`` holds every ancestor of a kept path as well. Nothing happens when there is none.
        """
        if parts in keep:
            self.remove_children(parts, keep=keep)
        elif (parent := self._find_parent(parts)) is not None:
            self._remove_entry(parent, parts[-1])

    def remove_children(self, parts: Parts, *, keep: frozenset[Parts] | set[Parts]) -> None:
        """Empty a directory, except for the paths in ``keep``; anything else is left alone."""
        parent = self._find_parent((*parts, "."))
        if parent is None:
            return
        for name in os.listdir(parent):  # noqa: PTH208  a descriptor, not a path
            self.remove((*parts, name), keep=keep)

    def attributes_of(self, parts: Parts) -> Attributes:
        """Return what a directory of the tree will have."""
        return self._directories[parts]

    def measure_again(self) -> None:
        """Learn the newest modification time anew: something that counted is no part of it now."""
        newest = 0
        for path, directories, files, descriptor in os.fwalk(".", dir_fd=self._root_fd):
            newest = max(newest, self._directories[tuple(path.split("/")[1:])].mtime_ns)
            for name in (*directories, *files):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    newest = max(newest, status.st_mtime_ns)
        self._latest_mtime_ns = newest

    def finish(self) -> None:
        """Give every directory its attributes, deepest first."""
        self._forget_parent()
        root = len("./")
        for path, _, _, descriptor in os.fwalk(".", topdown=False, dir_fd=self._root_fd):
            parts = tuple(path[root:].split("/")) if path != "." else ()
            attributes = self._directories[parts]
            os.fchown(descriptor, attributes.uid, attributes.gid)
            os.fchmod(descriptor, attributes.mode)
            os.utime(descriptor, ns=(attributes.mtime_ns, attributes.mtime_ns))

    def _count_entry(self) -> None:
        self._entries += 1
        if self._entries > self._limits.entries_max:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the source has more than {self._limits.entries_max} entries, the limit of one "
                "layer; nothing was imported. Split it, or raise the limit",
                retryable=False,
                details={"entries_max": self._limits.entries_max},
            )

    def _count_bytes(self, count: int) -> None:
        self._bytes += count
        if self._bytes > self._limits.bytes_max:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the source unpacks to more than {self._limits.bytes_max} bytes, the limit of one "
                "layer; nothing was imported. Split it, or raise the limit",
                retryable=False,
                details={"bytes_max": self._limits.bytes_max},
            )

    def _allowed(self, wanted: Attributes) -> Attributes:
        if wanted.mode & (stat.S_ISUID | stat.S_ISGID):
            self._stripped_set_id += 1
        owned = all(0 <= number < SANDBOX_IDS for number in (wanted.uid, wanted.gid))
        if not owned:
            self._reowned += 1
        mtime_ns = min(max(wanted.mtime_ns, 0), _MTIME_MAX_NS)
        self._latest_mtime_ns = max(self._latest_mtime_ns, mtime_ns)
        return Attributes(
            mode=wanted.mode & _MODE_KEPT,
            uid=wanted.uid if 0 <= wanted.uid < SANDBOX_IDS else 0,
            gid=wanted.gid if 0 <= wanted.gid < SANDBOX_IDS else 0,
            mtime_ns=mtime_ns,
        )

    def _open_parent(self, parts: Parts, *, create: bool = True) -> int:
        """Return a descriptor of the directory that holds ``parts``, without following links.

        It belongs to the writer and lives until the next call.
        """
        parents = parts[:-1]
        if parents == self._parent:
            return self._parent_fd
        self._forget_parent()
        current = os.dup(self._root_fd)
        for depth in range(1, len(parents) + 1):
            try:
                following = self._enter(current, parents[:depth], create=create)
            except OSError as error:
                raise refuse(
                    f"{shown('/'.join(parts))} goes through {shown('/'.join(parents[:depth]))}, "
                    f"which is not a directory here ({error.strerror})"
                ) from None
            finally:
                os.close(current)
            current = following
        self._parent, self._parent_fd = parents, current
        return current

    def _enter(self, descriptor: int, parts: Parts, *, create: bool) -> int:
        name = parts[-1]
        try:
            return os.open(name, _DIRECTORY_FLAGS, dir_fd=descriptor)
        except FileNotFoundError:
            if not create:
                raise
        self._count_entry()
        os.mkdir(name, 0o700, dir_fd=descriptor)
        self._directories[parts] = IMPLIED_DIRECTORY
        return os.open(name, _DIRECTORY_FLAGS, dir_fd=descriptor)

    def _find_parent(self, parts: Parts) -> int | None:
        try:
            return self._open_parent(parts, create=False)
        except DsecError:
            return None

    def _forget_parent(self) -> None:
        if self._parent_fd != self._root_fd:
            os.close(self._parent_fd)
        self._parent, self._parent_fd = (), self._root_fd

    def _clear(self, parts: Parts) -> int:
        """Remove what has this name and return its parent's descriptor."""
        if not parts:
            raise refuse("the source's root is not a directory")
        parent = self._open_parent(parts)
        return self._remove_entry(parent, parts[-1])

    def _remove_entry(self, parent: int, name: str) -> int:
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            # The cached parent is never below what goes: it is the directory that holds it.
            shutil.rmtree(name, dir_fd=parent)
        return parent

    def _apply_by_name(self, parent: int, name: str, allowed: Attributes) -> None:
        os.chown(name, allowed.uid, allowed.gid, dir_fd=parent, follow_symlinks=False)
        os.utime(
            name,
            ns=(allowed.mtime_ns, allowed.mtime_ns),
            dir_fd=parent,
            follow_symlinks=False,
        )
