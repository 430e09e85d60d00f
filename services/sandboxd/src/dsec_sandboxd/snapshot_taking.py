"""Taking one snapshot of a running sandbox, and putting one back to a snapshot."""

from __future__ import annotations

import time
from typing import Final

import msgspec
import structlog

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.base import new_id
from dsec_sandboxd.events import SandboxPutBack, SandboxRebased
from dsec_sandboxd.kernel.interface import SandboxIdentity
from dsec_sandboxd.layers.folding import mounts_below_snapshots
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.making import Maker, RemakeError
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.snapshot_store import SnapshotStore
from dsec_sandboxd.snapshot_tree import LAYERS_MAX, SnapshotRecord, plan_copy

_log: Final = structlog.get_logger(__name__)
#: Inodes that a copy may need beyond those that its sources may have.
_INODES_SLACK: Final = 1024


class SnapshotMaker:
    """Takes snapshots of running sandboxes and puts sandboxes back to them."""

    def __init__(self, store: SnapshotStore, sandboxes: Sandboxes, maker: Maker) -> None:
        self._store = store
        self._tree = store.tree
        self._sandboxes = sandboxes
        self._maker = maker

    async def take(
        self,
        record: SandboxRecord,
        *,
        name: str = "",
        labels: dict[str, str] | None = None,
        transient: bool = False,
    ) -> SnapshotRecord:
        """Take a snapshot; the sandbox has its place in the tree there, unless it is transient.

        Raises:
            DsecError: ``exhausted`` when there is no room or the project has too many;
                ``invalid``; what the kernel refused. Then there is no snapshot.
        """
        tree, store = self._tree, self._store
        if tree.count(record.project) >= store.limits.per_project:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the project has {store.limits.per_project} snapshots on node "
                f"{self._sandboxes.node}, the most it may: delete some",
                retryable=False,
                details={"reason": "snapshot_count"},
            )
        started_at = time.perf_counter()
        local = new_id()
        base_layers = mounts_below_snapshots(len(record.layer_digests), LAYERS_MAX)
        plan = plan_copy(local, base_layers, record.snapshot_layers)
        below = [tree.layer(layer) for layer in record.snapshot_layers]
        # Counted as a user of the chain, so that none of it goes while the copy is made.
        hold = await store.hold(local, record.snapshot_layers)
        try:
            folded = below if plan.fold else []
            wanted = record.limits.disk_bytes + sum(layer.room_bytes for layer in folded)
            inodes = record.limits.inodes + sum(layer.inodes for layer in folded)
            async with store.room.for_copy(wanted) as size_bytes:
                copy = await self._sandboxes.parts.kernel.snapshot(
                    record.local,
                    fold=tuple(reversed(hold.digests)) if plan.fold else (),
                    size_bytes=size_bytes,
                    inodes=inodes + _INODES_SLACK,
                )
            snapshot = store.keep(
                SnapshotRecord(
                    local=local,
                    project=record.project,
                    sandbox=record.local,
                    created_at=self._sandboxes.parts.clock.now(),
                    layer_references=record.layer_references,
                    layer_digests=record.layer_digests,
                    chain=plan.chain,
                    limits=record.limits,
                    parent=record.snapshot,
                    name=name,
                    labels=labels or {},
                    env=record.env,
                    defaults=record.defaults,
                    agent=record.agent,
                    transient=transient,
                    size_bytes=copy.size_bytes,
                    memory_bytes=copy.size_bytes,
                    inodes=copy.inodes,
                    hole_bytes=copy.hole_bytes,
                    frozen_ms=copy.frozen_s * 1000,
                ),
                copy,
            )
        finally:
            hold.release()
        if not transient:
            self._sandboxes.handle(SandboxRebased(local=record.local, snapshot=local))
        self._sandboxes.parts.steps.step(
            record,
            "snapshot",
            latency_ms=(time.perf_counter() - started_at) * 1000,
            attributes={"snapshot": f"{self._sandboxes.node}.{local}"},
        )
        return snapshot

    async def roll_back(
        self, record: SandboxRecord, snapshot: SnapshotRecord, asked_by: str
    ) -> float:
        """Put a sandbox back to a snapshot; return how many milliseconds that took.

        Its record names the message that asked for it from the moment that there is no way back.

        Raises:
            DsecError: ``invalid`` for a snapshot of other layers, or why there can be no new
                sandbox; then nothing has changed. Only when the kernel refuses the last step has
                the sandbox ended, with ``rollback_failed`` as the cause.
        """
        if snapshot.layer_digests != record.layer_digests:
            raise invalid(
                f"the snapshot stands on other layers ({', '.join(snapshot.layer_references)}) "
                "than the sandbox: create a sandbox from it instead",
                reason="other_layers",
            )
        started_at = time.perf_counter()
        local = record.local

        def keep(identity: SandboxIdentity) -> None:
            self._sandboxes.handle(
                SandboxRebased(
                    local=local,
                    snapshot=snapshot.local,
                    layers=snapshot.chain,
                    identity=identity,
                    asked_by=asked_by,
                )
            )

        below = self._store.layers_below(record.project, record)
        try:
            await self._maker.remake(record, below, snapshot.chain, keep)
        except RemakeError as error:
            await self._sandboxes.not_put_back(local, error)
            raise error.error from error
        self._sandboxes.handle(SandboxPutBack(local=local))
        duration_ms = (time.perf_counter() - started_at) * 1000
        self._sandboxes.parts.steps.step(
            msgspec.structs.replace(record, snapshot=snapshot.local),
            "rollback",
            latency_ms=duration_ms,
            attributes={"snapshot": f"{self._sandboxes.node}.{snapshot.local}"},
        )
        return duration_ms
