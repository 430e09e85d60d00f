"""The parts that deal with snapshots, put together for the daemon's shell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.wire.snapshot import (
    DeleteSnapshot,
    ForkSandbox,
    InspectSnapshot,
    ListSnapshots,
    PackSnapshot,
    RollBack,
    TakeSnapshot,
)
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.forking import Forks
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.store import LayerStore
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.making import Maker
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.snapshot_packing import SnapshotPacker
from dsec_sandboxd.snapshot_records import SnapshotRecords
from dsec_sandboxd.snapshot_room import SnapshotLimits
from dsec_sandboxd.snapshot_store import SnapshotStore
from dsec_sandboxd.snapshot_taking import SnapshotMaker
from dsec_sandboxd.snapshot_tree import SnapshotTree
from dsec_sandboxd.snapshots import Snapshots


class SnapshotService:
    """A node's snapshots. Open first, then recover the sandboxes, then serve; close last."""

    def __init__(
        self,
        config: SandboxdConfig,
        sandboxes: Sandboxes,
        maker: Maker,
        *,
        kernel: Kernel,
        records: RecordStore,
        holds: LayerHolds,
        layers: LayerStore,
    ) -> None:
        self.store = SnapshotStore(
            SnapshotTree(sandboxes.node),
            kernel,
            SnapshotRecords(records.database),
            holds,
            directory=config.snapshots_path,
            limits=SnapshotLimits(
                memory_bytes=config.snapshot_memory_bytes,
                disk_bytes=config.snapshot_disk_bytes,
                disk_reserve_bytes=config.disk_reserve_bytes,
                per_project=config.snapshots_max,
            ),
            image_of=layers.image_path,
        )
        taking = SnapshotMaker(self.store, sandboxes, maker)
        packer = SnapshotPacker(self.store, layers, kernel)
        self.doors = Snapshots(self.store, taking, packer, sandboxes)
        self.forks = Forks(taking, self.store, sandboxes, maker)
        self._node = sandboxes.node
        maker.use_snapshots(self.store)
        sandboxes.use_snapshots(self.store)

    def open(self) -> None:
        """Load what an earlier daemon kept; see ``SnapshotStore.open``."""
        self.store.open()

    def recovered(self) -> None:
        """Collect garbage, now that every sandbox that lives on is known."""
        self.store.sweep()

    async def serve(
        self,
        bus: Bus,
        verb: Callable[[str], str],
        inside: Callable[[Any], Any],
        concurrency: int,
    ) -> None:
        """Take requests.

        Args:
            bus: where they come from.
            verb: gives the subject of a request about a sandbox.
            inside: has the sandbox run for a request.
            concurrency: as many as there may be sandboxes.
        """
        doors, many = self.doors, concurrency
        await bus.serve(verb("snapshot"), TakeSnapshot, inside(doors.take), concurrency=many)
        await bus.serve(verb("fork"), ForkSandbox, inside(self.forks.fork), concurrency=many)
        await bus.serve(verb("rollback"), RollBack, inside(doors.roll_back), concurrency=many)

        def snapshot(name: str) -> str:
            return subjects.any_project_snapshot(self._node, name)

        await bus.serve(snapshot("list"), ListSnapshots, doors.list)
        # Some wait until a snapshot is durable.
        await bus.serve(snapshot("inspect"), InspectSnapshot, doors.inspect, concurrency=many)
        await bus.serve(snapshot("delete"), DeleteSnapshot, doors.delete)
        await bus.serve(snapshot("pack"), PackSnapshot, doors.pack)

    async def close(self) -> None:
        """Finish rollbacks and packing; let go of everything."""
        await self.doors.finished()
        await self.store.close()
