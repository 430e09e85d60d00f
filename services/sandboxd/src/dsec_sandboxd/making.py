"""Making one sandbox and taking it apart again: what it holds, in which order.

Taken in this order, each let go of by :meth:`Maker.let_go` or, after a crash of the daemon, by the
next one's recovery:

1. a user of each layer (in this process only);
2. the run directory, on a tmpfs (:meth:`RunDirectory.open`);
3. the sandbox in the kernel (``kernel.destroy``; ``kernel.recover``);
4. the agent's socket in the run directory (with it).

The intent was written to the StateDB before the first of them, so whatever line a crash comes
after, the restarted daemon knows of the sandbox and tells its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.interface import Kernel, SandboxSpec
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.ports import AgentSockets, EndListener
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.run_directory import RunDirectory

_log: Final = structlog.get_logger(__name__)


class Maker:
    """Puts sandboxes together from kernel, layers, run directory and agent socket."""

    def __init__(
        self,
        kernel: Kernel,
        holds: LayerHolds,
        agent_sockets: AgentSockets,
        directories: RunDirectory,
    ) -> None:
        self._kernel = kernel
        self._holds = holds
        self._agent_sockets = agent_sockets
        self._directories = directories
        self._held: dict[str, list[str]] = {}
        self._end_listeners: list[EndListener] = []

    def on_end(self, listener: EndListener) -> None:
        """Tell ``listener`` of every sandbox that is about to be removed."""
        self._end_listeners.append(listener)

    async def make(self, record: SandboxRecord, layers: Sequence[Layer]) -> None:
        """Make a sandbox; on return it answers commands.

        Raises:
            DsecError: what the kernel or the layers refused; then nothing of it is left, unless
                the log says otherwise.
        """
        try:
            await self._take(record, layers)
        except BaseException:
            try:
                await self._kernel.destroy(record.local)
            except DsecError as error:
                _log.error("half_made_sandbox_left", local=record.local, error=str(error))
            await self.let_go(record.local)
            raise

    async def _take(self, record: SandboxRecord, layers: Sequence[Layer]) -> None:
        await self._holds.hold([(layer.digest, layer.image_path) for layer in layers])
        self._held[record.local] = [layer.digest for layer in layers]
        directory = self._directories.make(record.local)
        creating = asyncio.create_task(
            self._kernel.create(_spec(record, directory)), name=f"kernel create {record.local}"
        )
        # The spawner works on the sandbox while this process makes the socket.
        await asyncio.sleep(0)
        try:
            await self._agent_sockets.open(record, directory)
        finally:
            await creating

    async def unmake(self, local: str) -> None:
        """Take a sandbox apart; on return nothing of it is left. Idempotent.

        Raises:
            DsecError: when the kernel does not let go of it.
        """
        await self._tell_ending(local)  # a descriptor in it would keep its memory
        await self._kernel.destroy(local)
        await self.let_go(local)

    async def let_go(self, local: str) -> None:
        """Let go of what a sandbox holds outside the kernel. Idempotent."""
        await self._tell_ending(local)
        await self._agent_sockets.close(local)
        self._directories.remove(local)
        digests = self._held.pop(local, None)
        if digests:
            self._holds.release(digests)

    async def _tell_ending(self, local: str) -> None:
        for listener in self._end_listeners:
            await listener.sandbox_ending(local)


def _spec(record: SandboxRecord, directory: Path) -> SandboxSpec:
    limits = record.limits
    return SandboxSpec(
        local=record.local,
        layers=record.layer_digests,
        memory_bytes=limits.memory_bytes,
        cpus=limits.cpus,
        pids=limits.pids,
        disk_bytes=limits.disk_bytes,
        inodes=limits.inodes,
        hostname=record.local.lower().replace("_", "-"),
        run_directory=directory,
    )
