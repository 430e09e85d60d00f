"""What the real kernel does with the files of one living sandbox, beyond opening one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_sandboxd.kernel.part import KernelPart
from dsec_sandboxd.kernel.protocol import LIST_NAMES_MAX

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.file_ports import (
        DirectoryEntry,
        DirectoryPage,
        FileUpload,
        Removal,
        TreeCount,
        TreeSink,
        TreeSource,
        Watcher,
    )


class InsideFiles(KernelPart):
    """``FileKernel``, and the part of ``Kernel`` that lists and moves. See the interface."""

    async def list_directory(
        self, local: str, path: str, *, user: str = "0"
    ) -> list[DirectoryEntry]:
        """List a directory; at most 10,000 names, the first in byte order."""
        return (await self.list_page(local, path, limit=LIST_NAMES_MAX, user=user)).entries

    async def list_page(
        self, local: str, path: str, *, after: str = "", limit: int, user: str = "0"
    ) -> DirectoryPage:
        """Return up to ``limit`` names after ``after``, each with its stat."""
        return await self._require(local).list_page(path, after, limit, user)

    async def rename(
        self, local: str, source: str, target: str, *, replace: bool = True, user: str = "0"
    ) -> None:
        """Move a path inside the sandbox."""
        await self._require(local).rename(source, target, user, replace=replace)

    async def put_file(
        self, local: str, path: str, *, parents: bool = False, user: str = "0"
    ) -> FileUpload:
        """Begin a file that will be at ``path``."""
        return await self._require(local).put_file(path, user, parents=parents)

    async def remove_tree(
        self, local: str, path: str, *, user: str = "0", budget_s: float = 1.0
    ) -> Removal:
        """Remove a path and all below it, for about ``budget_s``."""
        return await self._require(local).remove_tree(path, user, budget_s)

    async def unpack_tree(
        self, local: str, path: str, *, keep_set_id: bool = False, user: str = "0"
    ) -> TreeSink:
        """Begin to unpack a tar stream below ``path``."""
        return await self._require(local).unpack_tree(path, user, keep_set_id=keep_set_id)

    async def pack_tree(self, local: str, path: str, *, user: str = "0") -> TreeSource:
        """Begin to read a directory as a tar stream."""
        return await self._require(local).pack_tree(path, user)

    async def copy_path(
        self, local: str, source: str, target: str, *, user: str = "0"
    ) -> TreeCount:
        """Copy a path to a new one."""
        return await self._require(local).copy_path(source, target, user)

    async def watch(
        self, local: str, path: str, *, recursive: bool = False, user: str = "0"
    ) -> Watcher:
        """Watch a directory."""
        return await self._require(local).watch(path, user, recursive=recursive)
