"""Files of sandboxes beyond one file's content: moving, deleting, whole directories, watching."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from dsec_common.wire.base import Message


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
