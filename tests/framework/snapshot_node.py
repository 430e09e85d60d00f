"""A node's snapshots as a project's user asks for them."""

from __future__ import annotations

from typing import Any, TypeVar

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.wire.base import Message
from dsec_common.wire.layer import LayerInfo, LayerKind
from dsec_common.wire.sandbox import CreateSandbox, DeleteSandbox, SandboxDeleted
from dsec_common.wire.snapshot import (
    DeleteSnapshot,
    ForkSandbox,
    InspectSnapshot,
    ListSnapshots,
    PackSnapshot,
    RollBack,
    SandboxForked,
    SandboxRolledBack,
    SnapshotDeleted,
    SnapshotInfo,
    SnapshotList,
    TakeSnapshot,
)
from sandboxd_node import NODE, NodeForTests

R = TypeVar("R", bound=Message)

#: Prints each file below /srv with its content, for a shell without find.
TREE = 'cd /srv && for f in * */* */*/*; do [ -f "$f" ] && echo "$f $(cat "$f")"; done; true'


class Asker:
    """Asks for snapshots on one node."""

    def __init__(self, node: NodeForTests) -> None:
        self.node = node

    async def shell(self, sandbox_id: str, text: str) -> str:
        """Run a shell line that must succeed; return its output."""
        result = await self.node.exec(sandbox_id, "sh", "-c", text)
        assert result.exit_code == 0, result
        return result.stdout.decode()

    async def tree(self, sandbox_id: str) -> dict[str, str]:
        """Return the files below /srv with their content."""
        lines = (await self.shell(sandbox_id, TREE)).splitlines()
        return {name: content for name, _, content in (line.partition(" ") for line in lines)}

    async def take(self, sandbox_id: str, **fields: Any) -> SnapshotInfo:
        """Take a snapshot."""
        return await self.node.ask(sandbox_id, "snapshot", TakeSnapshot(**fields), SnapshotInfo)

    async def fork(self, sandbox_id: str, count: int, **fields: Any) -> SandboxForked:
        """Fork a sandbox."""
        message = ForkSandbox(count=count, **fields)
        return await self.node.ask(sandbox_id, "fork", message, SandboxForked)

    async def roll_back(
        self, sandbox_id: str, snapshot_id: str, *, timeout_s: float | None = None, **fields: Any
    ) -> SandboxRolledBack:
        """Put a sandbox back."""
        message = RollBack(snapshot_id=snapshot_id, **fields)
        return await self.node.ask(
            sandbox_id, "rollback", message, SandboxRolledBack, timeout_s=timeout_s
        )

    async def restore(self, snapshot_id: str, **fields: Any) -> str:
        """Create a sandbox from a snapshot; return its id."""
        created = await self.node.place(CreateSandbox(base="", snapshot=snapshot_id, **fields))
        return created.sandbox_id

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox."""
        await self.node.ask(sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)

    async def _about(
        self, verb: str, message: Message, reply: type[R], project: str = "default"
    ) -> R:
        bus: Bus = self.node.project if project == "default" else self.node.other
        subject = subjects.snapshot(project, NODE, verb)
        return await bus.request(subject, message, reply, timeout_s=60.0)

    async def inspect(self, snapshot_id: str, wait_s: float = 0.0, **where: Any) -> SnapshotInfo:
        """Inspect a snapshot, or wait until it is durable."""
        message = InspectSnapshot(snapshot_id=snapshot_id, wait_durable_s=wait_s)
        return await self._about("inspect", message, SnapshotInfo, **where)

    async def drop(self, snapshot_id: str, **where: Any) -> SnapshotDeleted:
        """Delete a snapshot."""
        message = DeleteSnapshot(snapshot_id=snapshot_id)
        return await self._about("delete", message, SnapshotDeleted, **where)

    async def list(self, **fields: Any) -> list[SnapshotInfo]:
        """List the snapshots."""
        page = await self._about("list", ListSnapshots(**fields), SnapshotList)
        assert not page.more
        return list(page.snapshots)

    async def pack(self, snapshot_id: str, version: str, **fields: Any) -> LayerInfo:
        """Make a layer of a snapshot."""
        message = PackSnapshot(
            snapshot_id=snapshot_id,
            name="packed",
            version=version,
            **({"kind": LayerKind.TOOLKIT} | fields),
        )
        return await self._about("pack", message, LayerInfo)
