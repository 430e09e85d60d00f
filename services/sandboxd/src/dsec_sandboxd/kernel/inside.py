"""What the real kernel does inside one living sandbox: commands and files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.alone import RunningAlone
from dsec_sandboxd.kernel.inside_files import InsideFiles
from dsec_sandboxd.kernel.interface import SandboxUsage
from dsec_sandboxd.kernel.pausing import PAUSED

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.file_ports import FileStat
    from dsec_sandboxd.kernel.interface import (
        CommandResult,
        CommandSpec,
        OpenMode,
        Stream,
    )
    from dsec_sandboxd.kernel.process import OutputKeeper, Process


class Inside(InsideFiles, RunningAlone):
    """The part of ``Kernel`` that needs nothing but the sandbox. See the interface."""

    def __init__(self) -> None:
        super().__init__()
        self._reclaiming = asyncio.Lock()

    async def exec(
        self,
        local: str,
        command: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None = None,
        keeper: OutputKeeper | None = None,
    ) -> CommandResult:
        """Run a command and return when its main process has ended."""
        return await self._require(local).begin(command, on_output, self._read_ooms, keeper)

    def begin(
        self, local: str, command: CommandSpec, keeper: OutputKeeper | None = None
    ) -> asyncio.Future[CommandResult]:
        """Start a command whose output is wanted at its end."""
        return self._require(local).begin(command, None, self._read_ooms, keeper)

    def launch(
        self, local: str, command: CommandSpec, *, spool_fd: int, before: Callable[[int], None]
    ) -> Process:
        """Start a command and return at once; it runs until it ends or is ended."""
        return self._require(local).launch(command, self._read_ooms, spool_fd, before)

    async def processes(self, local: str) -> list[Process]:
        """Return every command that an earlier daemon started in an adopted sandbox."""
        return await self._require(local).processes(self._read_ooms)

    def overheard(self, local: str) -> dict[int, CommandResult]:
        """Return the ends of commands that an earlier daemon did not hear of."""
        return self._require(local).init.overheard.take()

    async def open_file(
        self,
        local: str,
        path: str,
        mode: OpenMode,
        *,
        permissions: int = 0o644,
        user: str = "0",
    ) -> int:
        """Open a regular file inside the sandbox; the caller closes the descriptor."""
        return await self._require(local).open_file(path, mode, permissions, user)

    async def stat(self, local: str, path: str, *, user: str = "0") -> FileStat:
        """Describe a path without following a last link."""
        return await self._require(local).stat(path, user)

    async def make_directory(
        self,
        local: str,
        path: str,
        *,
        parents: bool = False,
        permissions: int = 0o755,
        user: str = "0",
    ) -> None:
        """Create a directory; with ``parents`` also those above it."""
        sandbox = self._require(local)
        await sandbox.make_directory(path, parents=parents, permissions=permissions, user=user)

    async def unlink(self, local: str, path: str, *, user: str = "0") -> None:
        """Remove a file, a link or an empty directory."""
        await self._require(local).unlink(path, user)

    async def pause(self, local: str) -> None:
        """Stop every process of the sandbox; on return all stand still."""
        while True:
            sandbox = self._require(local)
            try:
                await sandbox.freezer.hold(PAUSED)
            except DsecError:
                if self._sandboxes.get(local) in {sandbox, None}:
                    raise
            if self._sandboxes.get(local) is sandbox:
                return
            # Another has its id by now, and is to stand still for it.

    async def resume(self, local: str) -> None:
        """Let a paused sandbox go on."""
        self._require(local).freezer.release(PAUSED)

    async def reclaim(self, local: str) -> None:
        """Give back what memory of a paused sandbox can be had without it."""
        sandbox = self._require(local)
        async with self._reclaiming:  # one at a time: each may keep a processor busy for a while
            if sandbox.freezer.holds(PAUSED):
                await asyncio.to_thread(sandbox.cgroup.reclaim)

    async def usage(self, local: str) -> SandboxUsage:
        """Return what the sandbox uses now."""
        cgroup = self._require(local).cgroup
        return SandboxUsage(
            memory_bytes=cgroup.memory_bytes_current(),
            memory_peak_bytes=cgroup.memory_bytes_peak(),
            cpu_s=cgroup.cpu_usage_s(),
            pids=cgroup.pids_current(),
        )
