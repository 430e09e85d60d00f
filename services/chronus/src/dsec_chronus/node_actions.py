"""A shard's hands: what its rollouts' actions ask of nodes, and of the scheduler.

Every intent is in the journal before anything is asked here. What an earlier attempt, or an earlier
owner of the shard, may have done is looked for before it is done: a snapshot carries the rollout
and the number of its action, a new sandbox is known by its idempotency key, and putting a sandbox
back twice is putting it back once, since its rollout takes nothing in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, assert_never

import msgspec
import structlog

from dsec_chronus import templates
from dsec_chronus.effects import Collect, Deed, DropCheckpoint, Perform
from dsec_chronus.errors import node_silent
from dsec_chronus.events import ActionDone, Moment
from dsec_chronus.keys import branch_local
from dsec_chronus.records import ActionBegun, ActionKind, Child, Taken
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.bus_types import ReplyT
from dsec_common.clock import Clock
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode, unavailable
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.layer import LayerInfo, LayerKind, LayerRemoved, RemoveLayer
from dsec_common.wire.sandbox import CreateSandbox, InspectSandbox, SandboxCreated, SandboxInfo
from dsec_common.wire.snapshot import (
    DeleteSnapshot,
    ListSnapshots,
    PackSnapshot,
    RollBack,
    SandboxRolledBack,
    SnapshotDeleted,
    SnapshotInfo,
    SnapshotList,
    TakeSnapshot,
)

log = structlog.get_logger()

ROLLOUT_LABEL: Final = "dsec-rollout"
ACTION_LABEL: Final = "dsec-action"
SHARD_LABEL: Final = "dsec-shard"

PATIENCE_S: Final = 20.0
"""A node's daemon that was killed is back before that; beyond it the node counts as gone."""

_ATTEMPT_S: Final = 10.0
_CREATE_S: Final = 30.0
_PACK_S: Final = 120.0
_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 1.0
_CREATES_AT_ONCE: Final = 16
_gone: Final = frozenset({ErrorCode.NOT_FOUND, ErrorCode.EXPIRED})


class NodeActions:
    """Does what the core of one shard wants done, each deed in a task of its own.

    Args:
        shard: its name.
        bus: a connected bus.
        clock: for pauses and deadlines.
        tell: takes the end of each action to the core.
        needs: whether a checkpoint of a rollout has this snapshot, or soon may.
    """

    def __init__(
        self,
        shard: str,
        bus: Bus,
        clock: Clock,
        tell: Callable[[ActionDone], Awaitable[None]],
        needs: Callable[[str, str], bool],
    ) -> None:
        self._shard = shard
        self._bus = bus
        self._clock = clock
        self._tell = tell
        self._needs = needs
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating = asyncio.Semaphore(_CREATES_AT_ONCE)
        self._not_dropped: list[DropCheckpoint] = []

    def do(self, deed: Deed) -> None:
        """Begin a deed."""
        match deed:
            case Perform():
                self._start(self._perform(deed), f"{deed.begun.kind} of {deed.begun.local}")
            case DropCheckpoint():
                self._start(self._drop(deed), f"drop {deed.taken.snapshot_id}")
            case Collect():
                self._start(self._collect(deed), f"collect in {self._shard}")
            case _:
                assert_never(deed)

    def sweep(self) -> None:
        """Try once more to drop what could not be dropped."""
        again, self._not_dropped = self._not_dropped, []
        for deed in again:
            self.do(deed)

    async def end(self) -> None:
        """Stop at once; the shard's next owner goes on."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- Actions ------------------------------------------------------------------------------

    async def _perform(self, it: Perform) -> None:
        try:
            done = await self._done(it)
        except DsecError as error:
            log.warning("an action failed", action=it.begun.kind, error=error.message)
            done = self._end_of(it, error=error)
        except Exception:
            log.exception("an action failed", action=it.begun.kind, rollout=self._id(it.begun))
            why = f"the {it.begun.kind} of rollout {self._id(it.begun)} failed"
            done = self._end_of(it, error=DsecError(ErrorCode.INTERNAL, why))
        await self._tell(done)

    async def _done(self, it: Perform) -> ActionDone:
        match it.begun.kind:
            case ActionKind.CHECKPOINT:
                return self._end_of(it, taken=await self._take(it))
            case ActionKind.ROLLBACK:
                return self._end_of(it, sandbox_id=await self._put_back(it))
            case ActionKind.BRANCH:
                numbers = range(it.begun.count)
                children = await asyncio.gather(*(self._branch(it, number) for number in numbers))
                return self._end_of(it, children=tuple(children))

    def _end_of(self, it: Perform, **what: Any) -> ActionDone:
        return ActionDone(
            request_id=0,
            project=it.project,
            local=it.begun.local,
            at=Moment(self._clock.now(), self._clock.monotonic()),
            number=it.begun.number,
            **what,
        )

    def _id(self, begun: ActionBegun) -> str:
        return f"{self._shard}.{begun.local}"

    # --- Checkpoints --------------------------------------------------------------------------

    async def _take(self, it: Perform) -> Taken:
        """Return what the sandbox's node keeps from now on; it is on its disk."""
        sandbox_id = ScopedId.parse(it.begun.sandbox_id)
        snapshot, template = await asyncio.gather(
            self._snapshot(it, sandbox_id), self._template(it.project, sandbox_id)
        )
        taken = Taken(
            snapshot_id=snapshot.snapshot_id,
            layers=snapshot.layers,
            template=template,
            at=self._clock.now(),
        )
        if not it.begun.durable:
            return taken
        pack = PackSnapshot(
            snapshot_id=snapshot.snapshot_id,
            name=_layer_name(self._id(it.begun)),
            version=str(it.begun.number),
            kind=LayerKind.TOOLKIT,
            replace=True,
        )
        subject = subjects.snapshot(it.project, sandbox_id.owner, "pack")
        layer = await self._ask(subject, pack, LayerInfo, attempt_s=_PACK_S)
        return msgspec.structs.replace(taken, layer=layer.reference)

    async def _snapshot(self, it: Perform, sandbox_id: ScopedId) -> SnapshotInfo:
        labels = {
            ROLLOUT_LABEL: self._id(it.begun),
            ACTION_LABEL: str(it.begun.number),
            SHARD_LABEL: self._shard,
        }
        subject = subjects.sandbox(it.project, sandbox_id, "snapshot")
        doubtful, until = it.doubtful, self._clock.monotonic() + PATIENCE_S
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                found = await self._found(it, sandbox_id, labels) if doubtful else None
                if found is not None and found.durable:
                    return found
                doubtful = True
                take = TakeSnapshot(
                    name=f"step {it.begun.step}", labels=labels, wait_durable_s=_ATTEMPT_S / 2
                )
                info = await self._bus.request(subject, take, SnapshotInfo, timeout_s=_ATTEMPT_S)
            except DsecError as error:
                self._need_hope(error, until, pause_s, sandbox_id)
            else:
                if info.durable:
                    return info
                why = info.detail or "that takes too long"
                raise unavailable(f"the node cannot keep the snapshot on its disk: {why}")
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _found(
        self, it: Perform, sandbox_id: ScopedId, labels: dict[str, str]
    ) -> SnapshotInfo | None:
        """Return the snapshot that an attempt in doubt has taken; None when there is none."""
        asked = ListSnapshots(sandbox_id=str(sandbox_id), labels=labels)
        subject = subjects.snapshot(it.project, sandbox_id.owner, "list")
        listed = await self._bus.request(subject, asked, SnapshotList, timeout_s=_ATTEMPT_S)
        return listed.snapshots[-1] if listed.snapshots else None

    async def _template(self, project: str, sandbox_id: ScopedId) -> CreateSandbox:
        """Return how to make a sandbox like this one, but for what its snapshot says itself."""
        inspect = subjects.sandbox(project, sandbox_id, "inspect")
        return templates.kept_of(
            await self._ask(inspect, InspectSandbox(template=True), SandboxInfo)
        )

    # --- Rollbacks and branches ---------------------------------------------------------------

    async def _put_back(self, it: Perform) -> str:
        """Return the id of the sandbox that has the checkpoint's files: the same, if it lives."""
        assert it.taken is not None  # noqa: S101  the core chose a checkpoint
        key = f"{self._id(it.begun)}/{it.begun.number}"
        if not it.begun.lost:
            sandbox_id = ScopedId.parse(it.begun.sandbox_id)
            subject = subjects.sandbox(it.project, sandbox_id, "rollback")
            asked = RollBack(snapshot_id=it.taken.snapshot_id)
            try:
                await self._ask(subject, asked, SandboxRolledBack, attempt_s=_CREATE_S)
            except DsecError as error:
                if error.code not in _gone:
                    raise
            else:
                return it.begun.sandbox_id
        like = templates.in_its_place(it.begun, it.taken, self._id(it.begun))
        return await self._create(it, like, key)

    async def _branch(self, it: Perform, number: int) -> Child:
        local = branch_local(self._id(it.begun), it.begun.number, number)
        assert it.taken is not None  # noqa: S101  the core chose a checkpoint
        rollout_id, model_local, model_id = f"{self._shard}.{local}", "", ""
        if templates.has_model_rollout(it.taken, self._id(it.begun)):
            model_local = branch_local(rollout_id, 0, 0)  # no action has that number
            model_id = f"{self._shard}.{model_local}"
        like = templates.of_branch(it.taken, self._id(it.begun), rollout_id, model_id)
        async with self._creating:
            try:
                made = await self._create(it, like, rollout_id)
                return Child(local=local, sandbox_id=made, model_local=model_local)
            except DsecError as error:
                return Child(local=local, error=ErrorReply.of(error))

    async def _create(self, it: Perform, like: CreateSandbox, key: str) -> str:
        """Make a sandbox of a checkpoint: of its snapshot where that is, else of its layer."""
        assert it.taken is not None  # noqa: S101  the core chose a checkpoint
        if not it.begun.lost:
            try:
                return await self._created(
                    it.project,
                    msgspec.structs.replace(
                        like, snapshot=it.taken.snapshot_id, idempotency_key=f"checkpoint/{key}"
                    ),
                )
            except DsecError as error:
                in_doubt = error.code is ErrorCode.TIMEOUT or error.details.get(MAY_HAVE_HAPPENED)
                if in_doubt or not it.taken.layer:
                    raise
        base, *others = it.taken.layers
        return await self._created(
            it.project,
            msgspec.structs.replace(
                like,
                base=base,
                toolkits=(*others, it.taken.layer),
                idempotency_key=f"checkpoint-layer/{key}",
            ),
        )

    async def _created(self, project: str, request: CreateSandbox) -> str:
        # The key makes it the same sandbox, however often it is asked for.
        request = msgspec.structs.replace(request, timeout_s=_CREATE_S / 2)
        created = await self._ask(
            subjects.sandbox_create(project), request, SandboxCreated, attempt_s=_CREATE_S
        )
        return created.sandbox_id

    # --- Leavings -----------------------------------------------------------------------------

    async def _drop(self, it: DropCheckpoint) -> None:
        try:
            await self._delete(it.project, it.taken.snapshot_id, it.taken.layer)
        except DsecError as error:
            snapshot_id = it.taken.snapshot_id
            log.warning("a checkpoint was not dropped", snapshot=snapshot_id, error=error.message)
            self._not_dropped.append(it)

    async def _delete(self, project: str, snapshot_id: str, layer: str) -> None:
        """Delete what is kept for a checkpoint; the snapshot last, by which the rest is found."""
        node = ScopedId.parse(snapshot_id).owner
        if layer:
            remove = subjects.layer(project, node, "remove")
            await self._forget(remove, RemoveLayer(reference=layer), LayerRemoved)
        delete = subjects.snapshot(project, node, "delete")
        await self._forget(delete, DeleteSnapshot(snapshot_id=snapshot_id), SnapshotDeleted)

    async def _forget(self, subject: str, message: Message, reply: type[Message]) -> None:
        """Have something deleted that may be gone already."""
        try:
            await self._bus.request(subject, message, reply, timeout_s=_ATTEMPT_S)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise

    async def _collect(self, it: Collect) -> None:
        for project, nodes in it.nodes.items():
            for node in nodes:
                try:
                    await self._collect_on(project, node)
                except DsecError as error:
                    log.warning("leavings were not collected", node=node, error=error.message)

    async def _collect_on(self, project: str, node: str) -> None:
        after, more = "", True
        while more:
            asked = ListSnapshots(labels={SHARD_LABEL: self._shard}, after=after)
            subject = subjects.snapshot(project, node, "list")
            page = await self._bus.request(subject, asked, SnapshotList, timeout_s=_ATTEMPT_S)
            for info in page.snapshots:
                rollout_id = info.labels.get(ROLLOUT_LABEL, "")
                if not self._needs(rollout_id.partition(".")[2], info.snapshot_id):
                    number = info.labels.get(ACTION_LABEL, "")
                    layer = f"{_layer_name(rollout_id)}@{number}"
                    await self._delete(project, info.snapshot_id, layer)
            more = page.more and bool(page.snapshots)
            after = page.snapshots[-1].snapshot_id if page.snapshots else ""

    # --- Asking -------------------------------------------------------------------------------

    async def _ask(
        self, subject: str, message: Message, reply: type[ReplyT], *, attempt_s: float = _ATTEMPT_S
    ) -> ReplyT:
        """Ask for what may be asked for twice, until it is answered or there is no hope."""
        until, pause_s = self._clock.monotonic() + PATIENCE_S, _FIRST_PAUSE_S
        while True:
            try:
                return await self._bus.request(subject, message, reply, timeout_s=attempt_s)
            except DsecError as error:
                self._need_hope(error, until, pause_s, None)
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _need_hope(
        self, error: DsecError, until: float, pause_s: float, sandbox_id: ScopedId | None
    ) -> None:
        """Return if asking again may help and there is time for it; else raise the error."""
        if not error.retryable:
            raise error
        if self._clock.monotonic() + pause_s > until:
            if sandbox_id is None or error.code is ErrorCode.EXHAUSTED:
                raise error
            raise node_silent(sandbox_id.owner, error.message)


def _layer_name(rollout_id: str) -> str:
    return f"checkpoint-{rollout_id.replace('.', '-')}"
