"""Files of sandboxes: contents, listing, moving, deleting, whole directories, watching."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.wire.base import Message

FILE_CHUNK_BYTES: Final = 128 * 1024
"""The most file content that one message carries."""


class ReadFile(Message, frozen=True, kw_only=True):
    """Read a piece of a regular file; symlinks are followed inside the sandbox only.

    Attributes:
        download_id: the same for all pieces of one download: the file is opened once for them.
        final: all pieces have been asked for; the answer carries their hash and ends the download.
    """

    path: str
    offset: int = 0
    length: int = FILE_CHUNK_BYTES
    user: str = "root"
    download_id: str = ""
    final: bool = False


class FileChunk(Message, frozen=True, kw_only=True):
    """A piece of a file. ``version`` changes when the file does, so a reader sees a torn read."""

    data: bytes
    offset: int
    size_bytes: int
    end_of_file: bool
    mode: int = 0o644
    version: str = ""
    sha256: str = ""


class WriteFile(Message, frozen=True, kw_only=True):
    """Write a piece of a file that appears at ``path`` when the last piece is in and verified.

    Attributes:
        upload_id: the same for all pieces of one file.
        final: this is the last piece; ``size_bytes`` and ``sha256`` are then checked and the file
            takes its place by a rename, or nothing changes.
        mode: permission bits of a new file. One that is replaced keeps its own, and its owner.
        make_parents: create missing parent directories.
        change_mode: a file that is replaced gets ``mode``, too.
    """

    path: str
    upload_id: str
    data: bytes = b""
    offset: int = 0
    final: bool = True
    size_bytes: int = 0
    sha256: str = ""
    mode: int = 0o644
    user: str = "root"
    make_parents: bool = True
    change_mode: bool = False


class FileWritten(Message, frozen=True, kw_only=True):
    """The piece, or with ``complete`` the whole file, is in the sandbox."""

    received_bytes: int
    complete: bool = False


class FileKind(StrEnum):
    """What a path is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class FileInfo(Message, frozen=True, kw_only=True):
    """What ``lstat`` says of a path inside the sandbox."""

    path: str
    kind: FileKind
    size_bytes: int = 0
    mode: int = 0
    modified_at: float = 0.0
    link_target: str = ""
    user_id: int = 0
    group_id: int = 0


class StatFile(Message, frozen=True, kw_only=True):
    """Ask what a path is."""

    path: str
    user: str = "root"


class ListDirectory(Message, frozen=True, kw_only=True):
    """Ask for a directory's entries, sorted by name.

    Attributes:
        after: only names after this one.
        cursor: what the page before said; goes before ``after``, and works for any bytes in names.
    """

    path: str
    after: str = ""
    limit: int = 1000
    user: str = "root"
    cursor: str = ""


class DirectoryListing(Message, frozen=True, kw_only=True):
    """Entries of one directory; ``more`` says that a further page exists, at ``cursor``."""

    entries: tuple[FileInfo, ...] = ()
    more: bool = False
    cursor: str = ""


class MakeDirectory(Message, frozen=True, kw_only=True):
    """Create a directory.

    Attributes:
        parents: those above it, too; then an existing one is fine, otherwise it is ``conflict``.
    """

    path: str
    mode: int = 0o755
    user: str = "root"
    parents: bool = True


class DirectoryMade(Message, frozen=True, kw_only=True):
    """The directory exists."""

    path: str


class MoveFile(Message, frozen=True, kw_only=True):
    """Move a file or a directory inside the sandbox.

    In one step; but a directory that a layer brought, or a target on another mount, is copied, put
    at ``target`` whole, and then removed from ``path``.

    Attributes:
        target: the path that it is to have; ending in a slash, the directory that it goes into.
        replace: a file, link or empty directory at ``target`` is replaced; otherwise it is
            ``conflict``.
    """

    path: str
    target: str
    replace: bool = True
    user: str = "root"


class FileMoved(Message, frozen=True, kw_only=True):
    """What was at the one path is at the other."""

    path: str
    target: str


class CopyFile(Message, frozen=True, kw_only=True):
    """Copy a file or a directory with all in it inside the sandbox; it appears whole.

    No link is followed. Modes, owners, times, hard links, holes and attributes are kept.

    Attributes:
        target: the path that it is to have; ending in a slash, the directory that it goes into.
        replace: a file, link or empty directory at ``target`` is replaced; otherwise it is
            ``conflict``.
    """

    path: str
    target: str
    replace: bool = True
    user: str = "root"


class FileCopied(Message, frozen=True, kw_only=True):
    """What is at the one path is at the other, too."""

    path: str
    target: str
    entries: int
    content_bytes: int


class DeleteFile(Message, frozen=True, kw_only=True):
    """Delete a file, a link or an empty directory; with ``recursive`` a directory and all in it.

    No link is followed. A request works for about a second: ask again until ``complete``.
    """

    path: str
    recursive: bool = False
    user: str = "root"


class FileDeleted(Message, frozen=True, kw_only=True):
    """How many names are gone; without ``complete`` there are more."""

    removed: int
    complete: bool = True


class WriteTree(Message, frozen=True, kw_only=True):
    """A piece of a tar archive that is unpacked below ``path`` while it arrives.

    Attributes:
        upload_id: the same for all pieces of one archive.
        final: the last piece; ``size_bytes`` and ``sha256`` of the archive are then checked.
        keep_set_id: keep set-id and sticky bits, which are dropped otherwise.
    """

    path: str
    upload_id: str
    data: bytes = b""
    offset: int = 0
    final: bool = True
    size_bytes: int = 0
    sha256: str = ""
    keep_set_id: bool = False
    user: str = "root"


class TreeWritten(Message, frozen=True, kw_only=True):
    """The piece, or with ``complete`` the whole tree, is in the sandbox."""

    received_bytes: int
    complete: bool = False
    entries: int = 0
    content_bytes: int = 0


class ReadTree(Message, frozen=True, kw_only=True):
    """Ask for the piece at ``offset`` of a directory as a tar archive.

    Attributes:
        download_id: the same for all pieces of one archive.
        offset: a multiple of the piece size; at most 16 pieces past the last one asked for.
        close: nothing more will be asked.
    """

    path: str
    download_id: str
    offset: int = 0
    close: bool = False
    user: str = "root"


class TreeChunk(Message, frozen=True, kw_only=True):
    """A piece of an archive; the last one carries size and hash of the whole."""

    data: bytes = b""
    offset: int = 0
    end: bool = False
    size_bytes: int = 0
    sha256: str = ""


class FileChange(StrEnum):
    """What happened to a path."""

    CREATED = "created"
    MODIFIED = "modified"
    ATTRIBUTES = "attributes"
    DELETED = "deleted"
    MOVED_FROM = "moved_from"
    MOVED_TO = "moved_to"
    OVERFLOW = "overflow"


class FileEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change.

    Attributes:
        seq: counts from 1 in each watch, without a gap.
        path: below what is watched; empty for itself.
        move_id: the same for the two events of one move; 0 otherwise.
    """

    seq: int
    change: FileChange
    path: str
    is_directory: bool = False
    move_id: int = 0


class WatchFiles(Message, frozen=True, kw_only=True):
    """Ask for what changed below a directory after event ``after``; wait for it up to ``wait_s``.

    The first request of a ``watch_id``, with ``after`` 0, begins the watch and is answered as soon
    as it stands. A watch that nobody asks about for two minutes ends.

    Attributes:
        recursive: directories below, too, also those made later.
        close: end the watch.
        begun: an answer about this watch has come before, so one that the node does not know is
            over, and is not begun anew: what changed in between would be missing.
    """

    path: str
    watch_id: str
    recursive: bool = False
    after: int = 0
    wait_s: float = 20.0
    close: bool = False
    user: str = "root"
    begun: bool = False


class FileEvents(Message, frozen=True, kw_only=True):
    """Events in order; none when nothing changed in time.

    Attributes:
        lost: events between ``after`` and the first one here are gone: look at the files.
        ended: what was watched is gone; nothing more will come.
    """

    events: tuple[FileEvent, ...] = ()
    lost: bool = False
    ended: bool = False
