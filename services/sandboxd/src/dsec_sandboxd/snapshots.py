"""What projects ask about snapshots: take, roll back, list, inspect, delete, pack as a layer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from dsec_common.bus_types import Request
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError
from dsec_common.wire.base import new_id
from dsec_common.wire.layer import LayerInfo
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES
from dsec_common.wire.snapshot import (
    DeleteSnapshot,
    InspectSnapshot,
    ListSnapshots,
    PackSnapshot,
    RollBack,
    SandboxRolledBack,
    SnapshotDeleted,
    SnapshotInfo,
    SnapshotList,
    TakeSnapshot,
)
from dsec_sandboxd.admission import check_labels
from dsec_sandboxd.criu import Criu
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.lifecycle import Sandboxes, local_of
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.snapshot_packing import SnapshotPacker
from dsec_sandboxd.snapshot_store import SnapshotStore
from dsec_sandboxd.snapshot_taking import SnapshotMaker
from dsec_sandboxd.snapshot_tree import SnapshotRecord

NAME_MAX: Final = 128
"""Characters of a snapshot's name."""
WAIT_MAX_S: Final = 300.0
"""How long one request may wait for a snapshot to be durable."""
_PACK_WAIT_S: Final = 60.0

_encoder: Final = msgspec.msgpack.Encoder()


class Snapshots:
    """Serves requests about snapshots."""

    def __init__(
        self,
        store: SnapshotStore,
        maker: SnapshotMaker,
        packer: SnapshotPacker,
        sandboxes: Sandboxes,
    ) -> None:
        self._store = store
        self._tree = store.tree
        self._maker = maker
        self._packer = packer
        self._sandboxes = sandboxes
        self._node = sandboxes.node
        self._criu = Criu()
        self._rollbacks: dict[tuple[str, str], asyncio.Task[float]] = {}

    async def take(self, request: Request[TakeSnapshot]) -> SnapshotInfo:
        """Take a snapshot of a running sandbox; wait for it to be durable if asked to.

        Raises:
            DsecError: ``unsupported`` with ``memory``; see :meth:`SnapshotMaker.take`.
        """
        asked = request.message
        _check_wait(asked.wait_durable_s)
        if len(asked.name) > NAME_MAX or not asked.name.isprintable():
            raise invalid_field("name", f"use at most {NAME_MAX} printable characters")
        check_labels(asked.labels)
        if asked.memory:
            raise await self._criu.refusal()
        record = self._sandboxes.state.find(request.project, local_of(request))
        snapshot = await self._maker.take(record, name=asked.name, labels=asked.labels)
        if asked.wait_durable_s:
            await self._store.durable(snapshot.local, asked.wait_durable_s)
            snapshot = self._tree.find(request.project, snapshot.local)
        return self._info(snapshot, asked.message_id)

    async def roll_back(self, request: Request[RollBack]) -> SandboxRolledBack:
        """Put a running sandbox back to a snapshot.

        Once begun it is carried to its end, whoever waits for it. The same message again waits for
        the same end, and does nothing when that was the sandbox's last rollback.

        Raises:
            DsecError: ``not_found``, ``invalid``; see :meth:`SnapshotMaker.roll_back`. Where it
                says that nothing ``may_have_happened``, that holds for the message before, too.
        """
        asked = request.message
        record = self._sandboxes.state.find(request.project, local_of(request))
        try:
            duration_ms = await self._once(record, asked)
        except DsecError as error:
            if self._sandboxes.state.is_living(record.local):
                error.details.setdefault(MAY_HAVE_HAPPENED, False)
            raise
        return SandboxRolledBack(
            cause_id=asked.message_id,
            sandbox_id=f"{self._node}.{record.local}",
            snapshot_id=asked.snapshot_id,
            duration_ms=duration_ms,
        )

    async def _once(self, record: SandboxRecord, asked: RollBack) -> float:
        message_id = asked.message_id or new_id()
        key = (record.local, message_id)
        task = self._rollbacks.get(key)
        if task is None:
            if record.put_back_by == message_id:
                return 0.0
            snapshot = self._store.find(record.project, asked.snapshot_id)
            work = self._maker.roll_back(record, snapshot, message_id)
            task = self._rollbacks[key] = asyncio.create_task(work, name="rollback")
            task.add_done_callback(lambda _: self._rollbacks.pop(key))
        return await asyncio.shield(task)

    async def finished(self) -> None:
        """Return when no rollback is on its way."""
        while self._rollbacks:
            await asyncio.wait(set(self._rollbacks.values()))

    async def inspect(self, request: Request[InspectSnapshot]) -> SnapshotInfo:
        """Return one snapshot; wait for it to be durable if asked to.

        Raises:
            DsecError: ``not_found``, also when it is deleted meanwhile; ``invalid``.
        """
        asked = request.message
        _check_wait(asked.wait_durable_s)
        record = self._store.find(request.project, asked.snapshot_id)
        if asked.wait_durable_s and not record.durable:
            await self._store.durable(record.local, asked.wait_durable_s)
            record = self._store.find(request.project, asked.snapshot_id)
        return self._info(record, asked.message_id)

    async def delete(self, request: Request[DeleteSnapshot]) -> SnapshotDeleted:
        """Delete a snapshot; whoever needs its files keeps them.

        Raises:
            DsecError: ``not_found``; ``unavailable`` when the StateDB refuses.
        """
        asked = request.message
        record = self._store.find(request.project, asked.snapshot_id)
        kept_bytes = self._store.delete(record.local)
        return SnapshotDeleted(
            cause_id=asked.message_id, snapshot_id=asked.snapshot_id, kept_bytes=kept_bytes
        )

    async def pack(self, request: Request[PackSnapshot]) -> LayerInfo:
        """Make a layer of what a snapshot changed.

        Raises:
            DsecError: ``not_found``, ``invalid``, ``conflict`` for a name that means something
                else, ``exhausted``; what mkfs.erofs refused.
        """
        asked = request.message
        record = self._store.find(request.project, asked.snapshot_id)
        async with asyncio.timeout(WAIT_MAX_S):
            layer = await self._packer.pack(record, asked)
        return LayerInfo(
            cause_id=asked.message_id,
            reference=layer.reference,
            digest=layer.digest,
            kind=layer.kind,
            size_bytes=layer.size_bytes,
            created_at=layer.created_at,
            entries=layer.entries,
            nodes=(self._node,),
        )

    async def list(self, request: Request[ListSnapshots]) -> SnapshotList:
        """Return a page of the project's snapshots on this node, oldest first."""
        asked = request.message
        page: tuple[SnapshotInfo, ...] = ()
        left_bytes = LISTING_PAGE_BYTES
        for record in self._wanted(request.project, asked):
            info = self._info(record, "")
            left_bytes -= len(_encoder.encode(info))
            if page and left_bytes < 0:
                return SnapshotList(cause_id=asked.message_id, snapshots=page, more=True)
            page = (*page, info)
        return SnapshotList(cause_id=asked.message_id, snapshots=page)

    def _wanted(self, project: str, asked: ListSnapshots) -> Sequence[SnapshotRecord]:
        after = asked.after.partition(".")[2]
        # Local ids sort by time.
        return sorted(
            (
                record
                for record in self._tree.records(project)
                if record.local > after
                and (not asked.sandbox_id or asked.sandbox_id == f"{self._node}.{record.sandbox}")
                and asked.labels.items() <= record.labels.items()
            ),
            key=lambda record: record.local,
        )

    def _info(self, record: SnapshotRecord, cause_id: str) -> SnapshotInfo:
        info = self._tree.info(record, self._store.detail(record.local))
        return msgspec.structs.replace(info, cause_id=cause_id)


def _check_wait(wait_durable_s: float) -> None:
    if not 0 <= wait_durable_s <= WAIT_MAX_S:
        raise invalid_field("wait_durable_s", f"from 0 to {WAIT_MAX_S:g} seconds")
