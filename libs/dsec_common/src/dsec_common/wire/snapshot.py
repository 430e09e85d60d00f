"""Snapshots: what a sandbox changed, kept; sandboxes made of it, put back to it; layers of it."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.sandbox import Limits, SandboxCreated

FORK_CHILDREN_MAX: Final = 256
"""The most children of one fork: the answer that names them all fits one message."""


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Keep what a sandbox has changed over its layers; it stands still for some milliseconds.

    Attributes:
        name: the caller's own, for people; need not be unique.
        labels: the caller's own, returned in listings.
        memory: also the memory of its processes: ``unsupported``, with what CRIU says here.
        wait_durable_s: answer only once it is durable, or after so many seconds; ``durable`` says
            which. The sandbox runs on meanwhile.
    """

    name: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    memory: bool = False
    wait_durable_s: float = 0.0


class SnapshotInfo(Message, frozen=True, kw_only=True):
    """A snapshot as its node knows it.

    Attributes:
        snapshot_id: ``<node>.<local>``.
        sandbox_id: which sandbox it was taken of; it may be gone.
        parent: the snapshot that this sandbox was last taken of, put back to or made from; empty
            for a root of the tree.
        layers: the layers below, lowest first.
        limits: of the sandbox that it was taken of.
        size_bytes: what this snapshot itself takes, in memory or, once durable, on the disk.
        durable: it is on the node's disk, and outlives the node's daemon.
        depth: how many snapshots are mounted one on the other for a sandbox made from it.
        references: living sandboxes and other snapshots that need it.
        frozen_ms: how long the sandbox stood still for it.
        detail: why it is not durable yet, if that failed.
    """

    snapshot_id: str
    sandbox_id: str
    created_at: float
    parent: str = ""
    name: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    layers: tuple[str, ...] = ()
    limits: Limits = msgspec.field(default_factory=Limits)
    size_bytes: int = 0
    durable: bool = False
    depth: int = 1
    references: int = 0
    frozen_ms: float = 0.0
    detail: str = ""


class ForkSandbox(Message, frozen=True, kw_only=True):
    """Make children of a running sandbox, all from one snapshot of it, on its node.

    Each child is admitted by the node's books like any new sandbox. What is None is inherited.

    Attributes:
        count: how many, at most ``FORK_CHILDREN_MAX``.
        env: variables of every command; None inherits.
        labels: None inherits.
        limits: None inherits. Compute Units cannot be forked: create from a snapshot instead.
        agent: the agent type written into behaviour logs; None inherits.
        ttl_s: the node ends each child after so many seconds; 0 means never.
        timeout_s: how long all of it may take.
    """

    count: int
    env: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    limits: Limits | None = None
    agent: str | None = None
    ttl_s: float = 0.0
    timeout_s: float = 30.0


class ForkedChild(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one child: ``created``, or the ``error`` that says why there is none."""

    created: SandboxCreated | None = None
    error: ErrorReply | None = None


class SandboxForked(Message, frozen=True, kw_only=True):
    """The fork is done; ``children`` has one entry for each that was asked for.

    The snapshot goes by itself when the last child and everything else that needs it is gone.
    """

    snapshot_id: str
    children: tuple[ForkedChild, ...]


class RollBack(Message, frozen=True, kw_only=True):
    """Put a sandbox back to a snapshot of itself or of a relative.

    All its processes end and its files are those of the snapshot; its id, its limits and its
    environment stay. The same message again is the same rollback: it is done once, and what became
    of it is told again, until the sandbox is put back by another.
    """

    snapshot_id: str


class SandboxRolledBack(Message, frozen=True, kw_only=True):
    """The sandbox runs again, with the snapshot's files.

    ``duration_ms`` is 0 when it had been put back before, by the same message.
    """

    sandbox_id: str
    snapshot_id: str
    duration_ms: float


class ListSnapshots(Message, frozen=True, kw_only=True):
    """Ask a node for the project's snapshots, oldest first.

    Attributes:
        sandbox_id: only those taken of this sandbox; empty for all.
        labels: only those that carry all of these.
        after: the id of the last snapshot of the page before; empty for the first page.
    """

    sandbox_id: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    after: str = ""


class SnapshotList(Message, frozen=True, kw_only=True):
    """One page of a node's snapshots; ``more`` says that a further page exists."""

    snapshots: tuple[SnapshotInfo, ...] = ()
    more: bool = False


class InspectSnapshot(Message, frozen=True, kw_only=True):
    """Ask for one snapshot's :class:`SnapshotInfo`.

    Attributes:
        wait_durable_s: answer when it is durable, or after so many seconds; it is packed at once.
    """

    snapshot_id: str
    wait_durable_s: float = 0.0


class DeleteSnapshot(Message, frozen=True, kw_only=True):
    """Delete a snapshot.

    Its children in the tree become its parent's. Sandboxes and snapshots that were made from it
    keep what they need of it, and the node frees that with the last of them.
    """

    snapshot_id: str


class SnapshotDeleted(Message, frozen=True, kw_only=True):
    """The snapshot is gone. ``kept_bytes`` of it are still needed by others."""

    snapshot_id: str
    kept_bytes: int = 0


class PackSnapshot(Message, frozen=True, kw_only=True):
    """Make a layer ``name@version`` of what a snapshot changed over its own layers.

    The layer deletes, too: where the snapshot has removed a file of a lower layer, so does the new
    layer in sandboxes that have it above that one. The answer is a ``LayerInfo``.

    Attributes:
        kind: ``workspace`` or ``toolkit``.
        exclude: patterns of absolute paths that are left out: ``*`` is any text within one name,
            ``**`` any number of directories.
        clean: leave out what builds leave behind (caches, histories, temporary files).
        replace: let ``name@version`` mean this from now on.
    """

    snapshot_id: str
    name: str
    version: str
    kind: LayerKind = LayerKind.WORKSPACE
    exclude: tuple[str, ...] = ()
    clean: bool = False
    replace: bool = False
