"""The core of a node's snapshots: which there are, which needs which, what is garbage. No I/O.

A *snapshot* is what a project knows: an id, its place in the tree, the layers below. Its files are
in a chain of *snapshot layers*, lowest first, the last of them its own: the writable layer as it
was copied. A sandbox made from it has the chain mounted between its layers and its own writable
one, so a snapshot taken of that sandbox has a chain one longer. Before a chain gets too long the
next copy folds all of it in and stands alone.

A snapshot can be deleted at any time. Its layer stays for as long as a snapshot has it in its
chain, or a sandbox has it mounted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.layer import CommandDefaults
from dsec_common.wire.sandbox import Limits
from dsec_common.wire.snapshot import SnapshotInfo

#: So many snapshot layers a sandbox has at most; the next copy folds them into one.
CHAIN_MAX: Final = 6
#: All layers of one sandbox: overlayfs takes many more, the spawner this many.
LAYERS_MAX: Final = 16


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One snapshot, as the StateDB keeps it.

    Attributes:
        local: its id on the node, and the name of its own layer.
        sandbox: the local id of the sandbox that it was taken of.
        parent: the local id of its parent in the tree, or empty.
        layer_references: the layers below, as they were named.
        layer_digests: what these are.
        chain: the snapshot layers, lowest first; the last is its own.
        limits: of the sandbox.
        env: of the sandbox.
        defaults: of the sandbox's commands.
        transient: nobody asked for it; it goes when nothing needs it any more.
        size_bytes: what its own layer takes: memory at first, then disk.
        memory_bytes: what it took in memory.
        inodes: in its own layer.
        hole_bytes: by which its layer's files are larger than what they take in memory.
        durable: its layer is on the disk.
        deleted: no project knows it any more, but its layer is needed.
    """

    local: str
    project: str
    sandbox: str
    created_at: float
    layer_references: tuple[str, ...]
    layer_digests: tuple[str, ...]
    chain: tuple[str, ...]
    limits: Limits
    parent: str = ""
    name: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    transient: bool = False
    size_bytes: int = 0
    inodes: int = 0
    hole_bytes: int = 0
    durable: bool = False
    deleted: bool = False
    frozen_ms: float = 0.0
    memory_bytes: int = 0
    defaults: CommandDefaults = msgspec.field(default_factory=CommandDefaults)

    @property
    def room_bytes(self) -> int:
        """How much a copy of its own layer may take, whatever it takes itself."""
        return max(self.size_bytes, self.memory_bytes)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How the next copy of a sandbox is made: what it folds in, and the chain that comes of it."""

    fold: tuple[str, ...]
    """Topmost first."""
    chain: tuple[str, ...]


def plan_copy(local: str, base_layers: int, chain: Sequence[str]) -> Plan:
    """Return how to copy a sandbox into the snapshot layer ``local``.

    Raises:
        DsecError: ``invalid`` when its layers leave no room for even one above them.
    """
    if base_layers >= LAYERS_MAX:
        raise invalid(
            f"the sandbox has {base_layers} layers; a snapshot is one more, and {LAYERS_MAX} are "
            "the most: use fewer toolkits",
            reason="too_many_layers",
        )
    if len(chain) + 1 > min(CHAIN_MAX, LAYERS_MAX - base_layers):
        return Plan(fold=tuple(reversed(chain)), chain=(local,))
    return Plan(fold=(), chain=(*chain, local))


class SnapshotTree:
    """All snapshots of one node. Methods return what has become garbage; the shell removes it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._records: dict[str, SnapshotRecord] = {}
        self._kept: dict[str, SnapshotRecord] = {}
        """Deleted, but their layer is still needed."""
        self._counts: Counter[str] = Counter()
        """By project: how many snapshots it has."""
        self._chained: Counter[str] = Counter()
        """By layer: how many snapshots have it in their chain."""
        self._mounted: Counter[str] = Counter()
        """By layer: how many sandboxes have it mounted, or are about to."""

    # --- Looking ------------------------------------------------------------------------------

    def find(self, project: str, local: str) -> SnapshotRecord:
        """Return the project's snapshot.

        Raises:
            DsecError: ``not_found`` when the project has none of that id, whoever else may.
        """
        record = self._records.get(local)
        if record is None or record.project != project:
            raise not_found(
                f"there is no snapshot {self.node}.{local} in this project; list the snapshots "
                "to see which are there",
                what="snapshot",
                snapshot_id=f"{self.node}.{local}",
            )
        return record

    def layer(self, layer: str) -> SnapshotRecord:
        """Return the record behind a snapshot layer, deleted or not.

        Raises:
            DsecError: ``layer_error`` when it is gone: it was lost with the node's daemon.
        """
        record = self._records.get(layer) or self._kept.get(layer)
        if record is None:
            raise DsecError(
                ErrorCode.LAYER_ERROR,
                f"the snapshot {self.node}.{layer} is needed and gone: it was not durable yet "
                "when the node's daemon died. Wait until a snapshot is durable before you build "
                "on it",
                details={"snapshot_id": f"{self.node}.{layer}", "reason": "snapshot_lost"},
            )
        return record

    def records(self, project: str) -> list[SnapshotRecord]:
        """Return the project's snapshots, oldest first."""
        found = [record for record in self._records.values() if record.project == project]
        return sorted(found, key=lambda record: (record.created_at, record.local))

    def count(self, project: str) -> int:
        """Return how many snapshots a project has."""
        return self._counts[project]

    def all_layers(self) -> list[SnapshotRecord]:
        """Return the records of all snapshot layers, those of deleted snapshots too."""
        return [*self._records.values(), *self._kept.values()]

    def references(self, record: SnapshotRecord) -> int:
        """Return how many sandboxes and other snapshots need a snapshot's layer."""
        own = record.local in self._records and record.local in record.chain
        return self._chained[record.local] - own + self._mounted[record.local]

    def info(self, record: SnapshotRecord, detail: str = "") -> SnapshotInfo:
        """Return what an inspection shows."""
        return SnapshotInfo(
            snapshot_id=f"{self.node}.{record.local}",
            sandbox_id=f"{self.node}.{record.sandbox}",
            created_at=record.created_at,
            parent=f"{self.node}.{record.parent}" if record.parent else "",
            name=record.name,
            labels=record.labels,
            layers=record.layer_references,
            limits=record.limits,
            size_bytes=record.size_bytes,
            durable=record.durable,
            depth=len(record.chain),
            references=self.references(record),
            frozen_ms=record.frozen_ms,
            detail=detail,
        )

    # --- Changing -----------------------------------------------------------------------------

    def add(self, record: SnapshotRecord) -> SnapshotRecord:
        """Take in a new snapshot; its parent becomes empty if that is not there (any more)."""
        if record.parent not in self._records:
            record = msgspec.structs.replace(record, parent="")
        self._records[record.local] = record
        self._counts[record.project] += 1
        self._chained.update(record.chain)
        return record

    def load(self, records: Iterable[SnapshotRecord]) -> list[SnapshotRecord]:
        """Take in what an earlier daemon kept; return those whose chain is not whole."""
        waiting = {record.local: record for record in records}
        broken = [
            record
            for record in waiting.values()
            if not all(layer in waiting for layer in record.chain)
        ]
        for record in broken:
            del waiting[record.local]
        for record in sorted(waiting.values(), key=lambda record: record.created_at):
            if record.deleted:
                self._kept[record.local] = record
            else:
                self.add(record)
        return broken

    def sweep(self) -> list[SnapshotRecord]:
        """Return the layers that nobody needs, once all sandboxes that live on are counted."""
        idle = [
            record.local
            for record in self._records.values()
            if record.transient and self.references(record) <= 0
        ]
        garbage = [lost for local in idle for lost in self.delete(local)[1]]
        return garbage + self._sweep(list(self._kept))

    def update(self, record: SnapshotRecord) -> None:
        """Replace a record by a newer one of the same snapshot, deleted or not."""
        if record.local in self._records:
            self._records[record.local] = record
        elif record.local in self._kept:
            self._kept[record.local] = record

    def delete(self, local: str) -> tuple[list[SnapshotRecord], list[SnapshotRecord]]:
        """Delete a snapshot.

        Returns:
            Which records have changed (children that have another parent now, the snapshot itself
            if its layer is still needed), and which layers nobody needs any more.
        """
        record = msgspec.structs.replace(self._records.pop(local), deleted=True)
        moved = []
        for child in list(self._records.values()):
            if child.parent == local:
                replaced = msgspec.structs.replace(child, parent=record.parent)
                self._records[child.local] = replaced
                moved.append(replaced)
        self._kept[local] = record
        self._counts[record.project] -= 1
        self._chained.subtract(record.chain)
        garbage = self._sweep(record.chain)
        if local in self._kept:
            moved.append(record)
        return moved, garbage

    def mount(self, layers: Sequence[str]) -> None:
        """Count a sandbox that has these layers mounted."""
        self._mounted.update(layers)

    def unmount(self, layers: Sequence[str]) -> list[SnapshotRecord]:
        """Count one less; return the layers that nobody needs any more."""
        self._mounted.subtract(layers)
        garbage: list[SnapshotRecord] = []
        for layer in reversed(layers):
            record = self._records.get(layer)
            if record is not None and record.transient and self.references(record) <= 0:
                garbage += self.delete(layer)[1]
        return garbage + self._sweep(layers)

    def _sweep(self, layers: Iterable[str]) -> list[SnapshotRecord]:
        garbage = []
        for layer in layers:
            if self._chained[layer] <= 0 and self._mounted[layer] <= 0:
                record = self._kept.pop(layer, None)
                if record is not None:
                    garbage.append(record)
                self._chained.pop(layer, None)
                self._mounted.pop(layer, None)
        return garbage

    def validate(self) -> None:
        """Return if every invariant holds; tests call it after each change.

        Raises:
            AssertionError: naming the invariant.
        """
        chained: Counter[str] = Counter()
        for record in self._records.values():
            chained.update(record.chain)
        assert chained == +self._chained, "chains are counted"  # noqa: S101  invariant
        counted = Counter(record.project for record in self._records.values())
        assert counted == +self._counts, "snapshots are counted"  # noqa: S101  invariant
        for layer in {*chained, *(+self._mounted)}:
            assert layer in self._records or layer in self._kept, "what is needed is there"  # noqa: S101  invariant
        for layer in self._kept:
            assert self._chained[layer] + self._mounted[layer] > 0, "what is kept is needed"  # noqa: S101  invariant
        for record in self._records.values():
            assert not record.parent or record.parent in self._records, "parents are there"  # noqa: S101  invariant
