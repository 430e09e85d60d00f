"""Snapshots: what a sandbox changed, kept; sandboxes made of it, put back to it, layers of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec.handle import OfSandbox
from dsec.inventory import list_nodes
from dsec_common import subjects
from dsec_common.bus_types import ReplyT
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message
from dsec_common.wire.layer import LayerInfo, LayerKind
from dsec_common.wire.sandbox import Limits, SandboxCreated
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

_TIMEOUT_S: Final = 30.0
_PACK_TIMEOUT_S: Final = 300.0
#: The node answers within the caller's time; its answer says more than our giving up.
_ANSWER_MARGIN_S: Final = 5.0


class Snapshot:
    """A snapshot of a sandbox; it never changes.

    Attributes:
        id: ``<node>.<local>``.
        info: as the node told it when this handle was made; None for one made from an id.
    """

    def __init__(self, channel: Channel, snapshot_id: str, info: SnapshotInfo | None) -> None:
        self._channel = channel
        self._scoped = ScopedId.parse(snapshot_id, "snapshot id")
        self.id = snapshot_id
        self.info = info

    def __repr__(self) -> str:
        return f"Snapshot({self.id!r})"

    @property
    def node(self) -> str:
        """The node that has it; only there sandboxes can be made from it."""
        return self._scoped.owner

    async def inspect(self) -> SnapshotInfo:
        """Return it as its node knows it.

        Raises:
            DsecError: ``not_found`` when it is deleted.
        """
        return await self._ask("inspect", InspectSnapshot(snapshot_id=self.id), SnapshotInfo)

    async def wait_durable(self, timeout_s: float = 60.0) -> SnapshotInfo:
        """Have it packed now and return when it is on the node's disk.

        From then on it outlives the node's daemon and takes no memory once nothing uses that.

        Raises:
            DsecError: ``not_found``; ``exhausted`` and others as packing failed; ``timeout``.
        """
        info = await self._ask(
            "inspect",
            InspectSnapshot(snapshot_id=self.id, wait_durable_s=timeout_s),
            SnapshotInfo,
            timeout_s=timeout_s,
        )
        self.info = _durable(info, timeout_s)
        return self.info

    async def pack_diff(
        self,
        name: str,
        version: str,
        *,
        kind: LayerKind | str = LayerKind.WORKSPACE,
        exclude: Iterable[str] = (),
        clean: bool = False,
        replace: bool = False,
    ) -> LayerInfo:
        """Make a layer ``name@version`` of what it changed over its own layers.

        Args:
            name: of the layer.
            version: of the layer.
            kind: ``workspace`` or ``toolkit``.
            exclude: absolute paths to leave out; ``*`` is any text within one name, ``**`` any
                number of directories.
            clean: leave out what builds leave behind: caches, histories, temporary files.
            replace: let ``name@version`` mean this from now on.

        Raises:
            DsecError: ``not_found``, ``invalid``; ``conflict`` when the name means other content.
        """
        message = PackSnapshot(
            snapshot_id=self.id,
            name=name,
            version=version,
            kind=LayerKind(kind),
            exclude=tuple(exclude),
            clean=clean,
            replace=replace,
        )
        return await self._ask("pack", message, LayerInfo, timeout_s=_PACK_TIMEOUT_S)

    async def delete(self) -> None:
        """Delete it; any number of times. What was made from it keeps what it needs."""
        try:
            await self._ask("delete", DeleteSnapshot(snapshot_id=self.id), SnapshotDeleted)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise

    async def _ask(
        self, verb: str, message: Message, reply: type[ReplyT], *, timeout_s: float = _TIMEOUT_S
    ) -> ReplyT:
        return await self._channel.ask(
            subjects.snapshot(self._channel.project, self.node, verb),
            message,
            reply,
            timeout_s=timeout_s + _ANSWER_MARGIN_S,
            repeatable=True,
            patience_s=timeout_s + ANSWER_PATIENCE_S,
        )


def _durable(info: SnapshotInfo, waited_s: float) -> SnapshotInfo:
    """Return it if it is durable; else raise why it is not."""
    if info.durable:
        return info
    if info.detail:
        code, why = ErrorCode.UNAVAILABLE, f"is not durable: {info.detail}"
    else:
        code, why = ErrorCode.TIMEOUT, f"was not durable within {waited_s:g} s"
    told = f"the snapshot {info.snapshot_id} {why}"
    raise DsecError(code, told, details={"snapshot_id": info.snapshot_id})


class Snapshots:
    """A project's snapshots on all nodes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def get(self, snapshot_id: str) -> Snapshot:
        """Return the handle of a snapshot by its id; nothing is asked.

        Raises:
            DsecError: ``invalid`` when it is no snapshot id.
        """
        return Snapshot(self._channel, snapshot_id, None)

    async def list(
        self,
        *,
        sandbox_id: str = "",
        labels: Mapping[str, str] | None = None,
        node: str = "",
    ) -> list[Snapshot]:
        """Return the snapshots, oldest first; ``info.parent`` makes a tree of them.

        Args:
            sandbox_id: only those taken of this sandbox.
            labels: only those that carry all of these.
            node: only those on this node.

        Raises:
            DsecError: ``unavailable`` when a node does not answer: a listing that leaves snapshots
                out must not look whole.
        """
        asked = ListSnapshots(sandbox_id=sandbox_id, labels=dict(labels or {}))
        if sandbox_id:
            nodes = [ScopedId.parse(sandbox_id).owner]
        else:
            nodes = [node] if node else [*await self._nodes()]
        pages = await asyncio.gather(*(self._of_node(name, asked) for name in nodes))
        found = [info for page in pages for info in page]
        found.sort(key=lambda info: (info.created_at, info.snapshot_id))
        return [Snapshot(self._channel, info.snapshot_id, info) for info in found]

    async def _nodes(self) -> Sequence[str]:
        reply = await list_nodes(self._channel)
        return [node.node for node in reply.nodes if node.ready or node.heartbeat.draining]

    async def _of_node(self, node: str, asked: ListSnapshots) -> Iterable[SnapshotInfo]:
        found: tuple[SnapshotInfo, ...] = ()
        while True:
            after = found[-1].snapshot_id if found else ""
            page = await self._channel.ask(
                subjects.snapshot(self._channel.project, node, "list"),
                ListSnapshots(sandbox_id=asked.sandbox_id, labels=asked.labels, after=after),
                SnapshotList,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
            found += page.snapshots
            if not page.more or not page.snapshots:
                return found


class Snapshotted(OfSandbox, ABC):
    """What a sandbox's handle does with snapshots; part of :class:`~dsec.sandbox.Sandbox`."""

    id: str

    @abstractmethod
    def __init__(self, channel: Channel, sandbox_id: str, created: SandboxCreated | None) -> None:
        """Be the handle of the sandbox with this id."""

    async def snapshot(
        self,
        name: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        memory: bool = False,
        wait_durable: bool = False,
        timeout_s: float = 60.0,
    ) -> Snapshot:
        """Keep what the sandbox has changed; it stands still for some milliseconds.

        Make sandboxes from it with ``create_sandbox(snapshot=…)``, put this one back with
        :meth:`roll_back`. It is in memory, and lost if the node's daemon is killed, until it is
        durable, which comes a second later by itself.

        Args:
            name: for people; need not be unique.
            labels: the caller's own, for listings.
            memory: also the memory of its processes: ``unsupported``.
            wait_durable: return only once it is on the node's disk.
            timeout_s: how long to wait for that.

        Raises:
            DsecError: ``unsupported`` with ``memory``; ``exhausted`` when the node has no room for
                it; ``expired`` when the sandbox is over; with ``wait_durable`` what
                :meth:`Snapshot.wait_durable` raises: the snapshot named in ``details`` is there
                then, in memory.
        """
        message = TakeSnapshot(
            name=name,
            labels=dict(labels or {}),
            memory=memory,
            wait_durable_s=timeout_s if wait_durable else 0.0,
        )
        waited_s = _TIMEOUT_S + message.wait_durable_s
        info = await self._about_snapshots("snapshot", message, SnapshotInfo, timeout_s=waited_s)
        if wait_durable:
            _durable(info, timeout_s)
        return Snapshot(self._channel, info.snapshot_id, info)

    async def fork(
        self,
        count: int,
        *,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        agent: str | None = None,
        ttl_s: float = 0.0,
        timeout_s: float = 30.0,
    ) -> list[Self | DsecError]:
        """Make children with the files that it has now, all on its node, all at once.

        Returns:
            For each of the ``count`` children its handle, or why it could not be made. What is
            None they inherit.

        Raises:
            DsecError: ``invalid``; ``exhausted`` when the node has no room for the snapshot.
        """
        message = ForkSandbox(
            count=count,
            env=None if env is None else dict(env),
            labels=None if labels is None else dict(labels),
            limits=limits,
            agent=agent,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
        )
        reply = await self._about_snapshots("fork", message, SandboxForked, timeout_s=timeout_s)
        children: list[Self | DsecError] = []
        for child in reply.children:
            if child.created is not None:
                made = type(self)(self._channel, child.created.sandbox_id, child.created)
                children.append(made)
            elif child.error is not None:
                children.append(child.error.to_error())
        return children

    async def roll_back(self, snapshot: Snapshot | str) -> float:
        """Put it back to a snapshot of itself or a relative; return how many ms that took.

        All its processes end; its id, environment and limits stay.

        Raises:
            DsecError: ``not_found``; ``invalid`` for a snapshot of other layers; why there can be
                no new sandbox. Nothing has changed then, unless ``end_cause`` says
                ``rollback_failed``.
        """
        snapshot_id = snapshot if isinstance(snapshot, str) else snapshot.id
        message = RollBack(snapshot_id=snapshot_id)
        reply = await self._about_snapshots("rollback", message, SandboxRolledBack)
        return reply.duration_ms

    async def _about_snapshots(
        self, verb: str, message: Message, reply: type[ReplyT], *, timeout_s: float = _TIMEOUT_S
    ) -> ReplyT:
        return await self._channel.ask(
            self._subject(verb),
            message,
            reply,
            timeout_s=timeout_s + _ANSWER_MARGIN_S,
        )
