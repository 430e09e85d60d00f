"""What nodes keep for checkpoints that are kept no more, and how it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import structlog

from dsec_chronus.effects import Collect, DropCheckpoint
from dsec_chronus.node_asking import NodeAsking
from dsec_chronus.node_watch import NodesSeen
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message
from dsec_common.wire.layer import LayerRemoved, RemoveLayer
from dsec_common.wire.snapshot import (
    DeleteSnapshot,
    ListSnapshots,
    SnapshotDeleted,
    SnapshotInfo,
    SnapshotList,
)

log = structlog.get_logger()

ROLLOUT_LABEL: Final = "dsec-rollout"
ACTION_LABEL: Final = "dsec-action"
SHARD_LABEL: Final = "dsec-shard"

WAITING_MAX: Final = 4096
"""Checkpoints of one shard that are still to be dropped, most of them on nodes that are gone."""

_gone: Final = frozenset({ErrorCode.NOT_FOUND})
#: A version that somebody's tag means is theirs now.
_gone_or_used: Final = frozenset({ErrorCode.NOT_FOUND, ErrorCode.CONFLICT})


class Twins(NamedTuple):
    """Snapshots that one action may have left beside the one that it came to."""

    project: str
    kept: str
    labels: dict[str, str]


class Leavings:
    """Deletes what no checkpoint of one shard needs.

    Args:
        shard: its name.
        asking: asks nodes.
        is_owner: whether the shard's lease still runs.
        needs: whether a checkpoint of a rollout has this snapshot, or soon may.
    """

    def __init__(
        self,
        shard: str,
        asking: NodeAsking,
        is_owner: Callable[[], bool],
        needs: Callable[[str, str], bool],
    ) -> None:
        self._shard = shard
        self._asking = asking
        self._is_owner = is_owner
        self._needs = needs
        self._waiting: deque[DropCheckpoint | Twins] = deque(maxlen=WAITING_MAX)
        self.seen = NodesSeen()

    @property
    def nodes(self) -> set[str]:
        """The nodes that still have something to drop."""
        return {_node_of(it) for it in self._waiting}

    def later(self, it: DropCheckpoint | Twins) -> None:
        """Have something dropped at the next sweep."""
        self._waiting.append(it)

    def due(self) -> list[DropCheckpoint | Twins]:
        """Return what is to be tried now.

        A node that is gone is asked for nothing until it is heard again; what it had alone is most
        likely gone with it, but its layers are in a store that others share.
        """
        due: list[DropCheckpoint | Twins] = []
        waiting, self._waiting = self._waiting, deque(maxlen=WAITING_MAX)
        for it in waiting:
            has_layer = isinstance(it, DropCheckpoint) and bool(it.taken.layer)
            if _node_of(it) in self.seen.lost and not (has_layer and self.seen.living):
                self._waiting.append(it)
            else:
                due.append(it)
        return due

    async def drop(self, it: DropCheckpoint) -> None:
        """Delete what is kept for a checkpoint, or have it tried again at the next sweep."""
        try:
            it = await self._drop_layer(it)
            await self._delete(it.project, it.taken.snapshot_id)
        except DsecError as error:
            snapshot_id = it.taken.snapshot_id
            log.warning("a checkpoint was not dropped", snapshot=snapshot_id, error=error.message)
            self.later(it)

    async def _drop_layer(self, it: DropCheckpoint) -> DropCheckpoint:
        """Return what is left to drop: with the snapshot, by which the rest is found, last."""
        if not it.taken.layer:
            return it
        node = _node_of(it)
        if node in self.seen.lost and self.seen.living:
            node = min(self.seen.living)
        await self._remove(it.project, node, it.taken.layer)
        return msgspec.structs.replace(it, taken=msgspec.structs.replace(it.taken, layer=""))

    async def drop_twins(self, it: Twins) -> None:
        """Delete the snapshots of an action but for the one that it came to."""
        try:
            for info in await self._listed(it.project, _node_of(it), it.labels, ""):
                if info.snapshot_id != it.kept:
                    await self._delete(it.project, info.snapshot_id)
        except DsecError as error:
            log.warning("a snapshot may be left", beside=it.kept, error=error.message)
            self.later(it)

    async def collect(self, it: Collect) -> None:
        """Delete what nodes keep for checkpoints of this shard that do not exist."""
        for project, nodes in it.nodes.items():
            for node in nodes:
                try:
                    await self._collect_on(project, node)
                except DsecError as error:
                    log.warning("leavings were not collected", node=node, error=error.message)

    async def _collect_on(self, project: str, node: str) -> None:
        after = ""
        while page := await self._listed(project, node, {SHARD_LABEL: self._shard}, after):
            for info in page:
                # Another owner has checkpoints that nobody here knows of.
                if not self._is_owner():
                    raise unavailable(f"shard {self._shard} may be another's by now")
                rollout_id = info.labels.get(ROLLOUT_LABEL, "")
                if not self._needs(rollout_id.partition(".")[2], info.snapshot_id):
                    number = info.labels.get(ACTION_LABEL, "")
                    await self._remove(project, node, f"{layer_name(rollout_id)}@{number}")
                    await self._delete(project, info.snapshot_id)
            after = page[-1].snapshot_id

    async def _listed(
        self, project: str, node: str, labels: dict[str, str], after: str
    ) -> tuple[SnapshotInfo, ...]:
        asked = ListSnapshots(labels=labels, after=after)
        subject = subjects.snapshot(project, node, "list")
        return (await self._asking.once(subject, asked, SnapshotList)).snapshots

    async def _remove(self, project: str, node: str, layer: str) -> None:
        subject = subjects.layer(project, node, "remove")
        await self._forget(subject, RemoveLayer(reference=layer), LayerRemoved, _gone_or_used)

    async def _delete(self, project: str, snapshot_id: str) -> None:
        subject = subjects.snapshot(project, ScopedId.parse(snapshot_id).owner, "delete")
        await self._forget(subject, DeleteSnapshot(snapshot_id=snapshot_id), SnapshotDeleted, _gone)

    async def _forget(
        self, subject: str, message: Message, reply: type[Message], done: frozenset[ErrorCode]
    ) -> None:
        """Have something deleted that may be gone already."""
        try:
            await self._asking.once(subject, message, reply)
        except DsecError as error:
            if error.code not in done:
                raise


def layer_name(rollout_id: str) -> str:
    """Return the name of the layers that are made of a rollout's snapshots."""
    return f"checkpoint-{rollout_id.replace('.', '-')}"


def _node_of(it: DropCheckpoint | Twins) -> str:
    snapshot_id = it.kept if isinstance(it, Twins) else it.taken.snapshot_id
    return ScopedId.parse(snapshot_id).owner
