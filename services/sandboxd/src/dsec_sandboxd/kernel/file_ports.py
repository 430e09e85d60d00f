"""What the file side of the kernel seam speaks of: entries, uploads, trees, watches.

An upload, a tree and a watcher each hold descriptors of the daemon and one process of the sandbox
until they are closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType


class FileKind(StrEnum):
    """What a path leads to."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStat:
    """A file as the sandbox sees it (ids inside its user namespace)."""

    kind: FileKind
    size_bytes: int
    mode: int
    """Permission bits only."""
    user_id: int
    group_id: int
    modified_at: float
    """Unix seconds."""
    link_target: str = ""
    """Where a link leads, as it says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryEntry:
    """One name in a directory; links are not followed."""

    name: str
    kind: FileKind
    stat: FileStat | None = None
    """None when it could not be looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryPage:
    """Names of a directory in byte order; ``more`` says that others follow the last one."""

    entries: list[DirectoryEntry]
    more: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What one request removed; without ``complete`` its time was over: ask again."""

    removed: int
    complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeCount:
    """What went through a tree stream."""

    entries: int
    """Files, directories and links."""
    content_bytes: int


class WatchChange(StrEnum):
    """What happened to a watched path."""

    CREATED = "created"
    MODIFIED = "modified"
    ATTRIBUTES = "attributes"
    DELETED = "deleted"
    MOVED_FROM = "moved_from"
    MOVED_TO = "moved_to"
    OVERFLOW = "overflow"
    """Events were lost: look at the files themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchEvent:
    """One change below a watched directory."""

    change: WatchChange
    path: str
    """Relative to what is watched; empty for itself."""
    is_directory: bool = False
    move_id: int = 0
    """The same for the two events of one move."""


class Held(Protocol):
    """Something that is closed when its ``with`` block is left."""

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...

    def __enter__(self) -> Self:
        """Return itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        ...


class FileUpload(Held, Protocol):
    """A file without a name. Closed before ``commit``, nothing of it is left."""

    @property
    def descriptor(self) -> int:
        """Where its content is written; it belongs to the upload."""
        ...

    async def commit(self, permissions: int, *, change_mode: bool = False) -> None:
        """Give it its name, in the place of what has it: readers see the one or the other.

        A file that is replaced leaves it its mode (but for set-id bits), unless ``change_mode``,
        and its owner, if the user may give files away; other names of it keep the old content.

        Raises:
            DsecError: as ``put_file``; the old file stays.
        """
        ...


class TreeSink(Held, Protocol):
    """A tar stream on its way into a directory. What came before a failure stays there."""

    async def send(self, data: bytes) -> None:
        """Return when the sandbox has room for more.

        Raises:
            DsecError: for the entry that could not be made, with its path; ``invalid`` with reason
                ``invalid_archive`` for what is no tar archive or holds what may not be made.
        """
        ...

    async def finish(self) -> TreeCount:
        """End the stream and return when all of it is in its place.

        Raises:
            DsecError: as ``send``.
        """
        ...


class TreeSource(Held, Protocol):
    """A directory on its way out, as a tar stream."""

    async def receive(self) -> bytes:
        """Return the next piece, of at most 64 KiB; empty at the end, which says all is there.

        Raises:
            DsecError: ``conflict`` when a file became shorter, or what it held another, while it
                was read; ``denied`` for what may not be read; ``unavailable`` when the stream was
                cut.
        """
        ...


class Watcher(Held, Protocol):
    """Changes below a directory, from the moment it was made."""

    async def next(self) -> WatchEvent | None:
        """Return the next event; None when what was watched is gone.

        Raises:
            DsecError: ``exhausted`` when new directories need more watches than there are;
                ``unavailable`` when the sandbox ended it.
        """
        ...


class FileKernel(Protocol):
    """The kernel's file operations beyond the plain ones; errors as in ``Kernel``."""

    async def list_page(
        self, local: str, path: str, *, after: str = "", limit: int, user: str = "0"
    ) -> DirectoryPage:
        """Return up to ``limit`` (at most 10,000) names after ``after``, each with its stat."""
        ...

    async def put_file(
        self, local: str, path: str, *, parents: bool = False, user: str = "0"
    ) -> FileUpload:
        """Begin a file that will be at ``path``; with ``parents`` directories above it are made.

        A link at ``path`` is followed, also one that leads to nothing yet.
        """
        ...

    async def remove_tree(
        self, local: str, path: str, *, user: str = "0", budget_s: float = 1.0
    ) -> Removal:
        """Remove a path and all below it, for about ``budget_s``; no link is followed.

        Other mounts are not entered. ``conflict`` when a directory was moved meanwhile.
        """
        ...

    async def unpack_tree(
        self, local: str, path: str, *, keep_set_id: bool = False, user: str = "0"
    ) -> TreeSink:
        """Begin to unpack a tar stream below ``path``, which is made with those above it."""
        ...

    async def pack_tree(self, local: str, path: str, *, user: str = "0") -> TreeSource:
        """Begin to read a directory as a tar stream, without sockets, pipes and other mounts."""
        ...

    async def copy_path(
        self, local: str, source: str, target: str, *, user: str = "0"
    ) -> TreeCount:
        """Copy a file or a tree to ``target``, where nothing may be; no link is followed.

        Other mounts are not entered. What was copied before a failure stays. A caller that is
        cancelled ends it.
        """
        ...

    async def watch(
        self, local: str, path: str, *, recursive: bool = False, user: str = "0"
    ) -> Watcher:
        """Watch a directory, and with ``recursive`` all below it; ready when this returns."""
        ...
