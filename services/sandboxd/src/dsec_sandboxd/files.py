"""Files of sandboxes: read, written and changed by processes of the sandbox itself.

Paths mean what they mean inside the sandbox, links included, and every operation has the rights of
the user it names: a path can never lead out of the sandbox. The content goes straight through a
descriptor or a stream, at most 128 KiB at a time: it does not wait for the sandbox's first process.
"""

from __future__ import annotations

import base64
import binascii
import os
import time
from collections.abc import Callable
from typing import Final

from dsec_common.bus import Bus
from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.wire.files import (
    CopyFile,
    DeleteFile,
    DirectoryListing,
    DirectoryMade,
    FileChunk,
    FileCopied,
    FileDeleted,
    FileEvents,
    FileInfo,
    FileMoved,
    FileWritten,
    ListDirectory,
    MakeDirectory,
    MoveFile,
    ReadFile,
    ReadTree,
    StatFile,
    TreeChunk,
    TreeWritten,
    WatchFiles,
    WriteFile,
    WriteTree,
)
from dsec_sandboxd.commands import kernel_user
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.file_copies import Copies
from dsec_sandboxd.file_desk import KIND_OF, FileDesk, as_text, file_info, permissions
from dsec_sandboxd.file_downloads import Downloads
from dsec_sandboxd.file_trees import Trees
from dsec_sandboxd.file_uploads import Uploads
from dsec_sandboxd.file_watch import Watches
from dsec_sandboxd.gate import Guard
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

LISTING_MAX: Final = 1000
#: How long one request goes on deleting; the client asks again for the rest.
DELETE_BUDGET_S: Final = 1.0


class Files:
    """The file verbs of this node's sandboxes."""

    def __init__(
        self, state: NodeState, kernel: Kernel, steps: StepLog, clock: Clock, *, idle_s: float
    ) -> None:
        self._desk = FileDesk(state, kernel, steps, clock)
        self._uploads = Uploads(self._desk, idle_s)
        self._downloads = Downloads(self._desk, idle_s)
        self._trees = Trees(self._desk, idle_s)
        self._watches = Watches(self._desk, idle_s)
        self._copies = Copies(self._desk)
        self._sessions = (
            self._uploads.sessions,
            self._downloads.sessions,
            self._trees.inbound,
            self._trees.outbound,
            self._watches.sessions,
        )

    async def serve(
        self, bus: Bus, verb: Callable[[str], str], inside: Guard, concurrency: int
    ) -> None:
        """Take requests; ``verb`` makes subjects, and ``inside`` has the sandbox run meanwhile."""
        many = concurrency
        await bus.serve(verb("read_file"), ReadFile, inside(self.read_file), max_pending=many)
        # The last piece of a file waits for the others, each of which needs a place too.
        await bus.serve(verb("write_file"), WriteFile, inside(self.write_file), concurrency=many)
        await bus.serve(verb("stat_file"), StatFile, inside(self.stat_file))
        await bus.serve(verb("list_directory"), ListDirectory, inside(self.list_directory))
        await bus.serve(verb("make_directory"), MakeDirectory, inside(self.make_directory))
        await bus.serve(verb("move_file"), MoveFile, inside(self.move_file))
        await bus.serve(verb("copy_file"), CopyFile, inside(self.copy_file))
        await bus.serve(verb("delete_file"), DeleteFile, inside(self.delete_file))
        # Pieces wait for those in front of them, and watches for something to happen.
        await bus.serve(verb("write_tree"), WriteTree, inside(self.write_tree), concurrency=many)
        await bus.serve(verb("read_tree"), ReadTree, inside(self.read_tree), concurrency=many)
        await bus.serve(verb("watch_files"), WatchFiles, inside(self.watch_files), concurrency=many)

    async def read_file(self, request: Request[ReadFile]) -> FileChunk:
        """See ``Downloads.read_file``."""
        return await self._downloads.read_file(request)

    async def write_file(self, request: Request[WriteFile]) -> FileWritten:
        """See ``Uploads.write_file``."""
        return await self._uploads.write_file(request)

    async def write_tree(self, request: Request[WriteTree]) -> TreeWritten:
        """See ``Trees.write_tree``."""
        return await self._trees.write_tree(request)

    async def read_tree(self, request: Request[ReadTree]) -> TreeChunk:
        """See ``Trees.read_tree``."""
        return await self._trees.read_tree(request)

    async def watch_files(self, request: Request[WatchFiles]) -> FileEvents:
        """See ``Watches.watch_files``."""
        return await self._watches.watch_files(request)

    async def stat_file(self, request: Request[StatFile]) -> FileInfo:
        """Return what a path is; a last link is not followed.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        try:
            found = await self._desk.kernel.stat(
                record.local, message.path, user=kernel_user(message.user)
            )
        except DsecError as error:
            raise self._desk.told(record, "stat_file", message.path, error) from error
        return file_info(message.path, found, message.message_id)

    async def list_directory(self, request: Request[ListDirectory]) -> DirectoryListing:
        """Return one page of a directory of any size, sorted by the bytes of its names.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        if not 0 < message.limit <= LISTING_MAX:
            raise invalid_field("limit", f"{message.limit} is not between 1 and {LISTING_MAX}")
        try:
            page = await self._desk.kernel.list_page(
                record.local,
                message.path,
                after=_name_of(message.cursor) if message.cursor else message.after,
                limit=message.limit,
                user=kernel_user(message.user),
            )
        except DsecError as error:
            raise self._desk.told(record, "list_directory", message.path, error) from error
        infos = tuple(
            # It went meanwhile, or may not be looked at: its name is known.
            FileInfo(path=as_text(entry.name), kind=KIND_OF[entry.kind])
            if entry.stat is None
            else file_info(as_text(entry.name), entry.stat, message.message_id)
            for entry in page.entries
        )
        return DirectoryListing(
            cause_id=message.message_id,
            entries=infos,
            more=page.more,
            cursor=_cursor_of(page.entries[-1].name) if page.more else "",
        )

    async def make_directory(self, request: Request[MakeDirectory]) -> DirectoryMade:
        """Create a directory; with ``parents`` those above it, and an existing one is fine.

        Raises:
            DsecError: ``denied``, ``invalid`` or ``exhausted``, with ``details["reason"]``;
                ``conflict`` for an existing path.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        try:
            await self._desk.kernel.make_directory(
                record.local,
                message.path,
                parents=message.parents,
                permissions=permissions(message.mode),
                user=kernel_user(message.user),
            )
        except DsecError as error:
            raise self._desk.told(record, "make_directory", message.path, error) from error
        return DirectoryMade(cause_id=message.message_id, path=message.path)

    async def move_file(self, request: Request[MoveFile]) -> FileMoved:
        """See ``Copies.move_file``."""
        return await self._copies.move_file(request)

    async def copy_file(self, request: Request[CopyFile]) -> FileCopied:
        """See ``Copies.copy_file``."""
        return await self._copies.copy_file(request)

    async def delete_file(self, request: Request[DeleteFile]) -> FileDeleted:
        """Delete a path, and with ``recursive`` all below it, for about a second.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``;
                ``conflict`` for a directory that is not empty, or that is moved meanwhile.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        user = kernel_user(message.user)
        started_at = time.perf_counter()
        try:
            if message.recursive:
                removal = await self._desk.kernel.remove_tree(
                    record.local, message.path, user=user, budget_s=DELETE_BUDGET_S
                )
                removed, complete = removal.removed, removal.complete
            else:
                await self._desk.kernel.unlink(record.local, message.path, user=user)
                removed, complete = 1, True
        except DsecError as error:
            raise self._desk.told(record, "delete_file", message.path, error) from error
        self._desk.log(record, request, "delete_file", 0, started_at, removed=str(removed))
        return FileDeleted(cause_id=message.message_id, removed=removed, complete=complete)

    # --- Ends ---------------------------------------------------------------------------------

    async def remove_idle(self) -> None:
        """End uploads, downloads and watches that nobody goes on with."""
        for sessions in self._sessions:
            await sessions.remove_idle()

    async def sandbox_put_back(self, local: str) -> None:
        """Let go of all that goes in or out of a sandbox that is put back, and say so.

        A download that asks on finds another file, and is told that it changed.
        """
        for sessions in self._sessions:
            if sessions is self._downloads.sessions:
                await sessions.sandbox_ending(local)
            else:
                await sessions.sandbox_put_back(local)

    async def sandbox_ending(self, local: str) -> None:
        """Let go of all that goes in or out of a sandbox; its files go with it."""
        for sessions in self._sessions:
            await sessions.sandbox_ending(local)


def _cursor_of(name: str) -> str:
    return base64.urlsafe_b64encode(os.fsencode(name)).decode()


def _name_of(cursor: str) -> str:
    try:
        name = os.fsdecode(base64.b64decode(cursor, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error):
        name = ""
    if not name or "\0" in name:
        raise invalid_field("cursor", "it is not one that a listing gave")
    return name
