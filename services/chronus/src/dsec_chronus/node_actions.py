"""A shard's hands: what its rollouts' actions ask of nodes, and of the scheduler.

Every intent is in the journal before anything is asked here. What an earlier attempt, or an earlier
owner of the shard, may have done is looked for before it is done: a snapshot carries the rollout
and the number of its action, a new sandbox is known by its idempotency key, and a node does a
rollback once for one message, whose id is made of the same two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, assert_never

import msgspec
import structlog

from dsec_chronus import templates
from dsec_chronus.effects import Collect, Deed, DropCheckpoint, Perform
from dsec_chronus.errors import outcome_unknown
from dsec_chronus.events import ActionDone, Moment
from dsec_chronus.keys import branch_local
from dsec_chronus.leavings import (
    ACTION_LABEL,
    ROLLOUT_LABEL,
    SHARD_LABEL,
    Leavings,
    Twins,
    layer_name,
)
from dsec_chronus.node_asking import ATTEMPT_S, NodeAsking, in_doubt, is_sure
from dsec_chronus.node_watch import NodesSeen
from dsec_chronus.records import ActionBegun, ActionKind, Child, Taken
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import ErrorReply
from dsec_common.wire.layer import LayerInfo, LayerKind
from dsec_common.wire.sandbox import CreateSandbox, InspectSandbox, SandboxCreated, SandboxInfo
from dsec_common.wire.snapshot import (
    ListSnapshots,
    PackSnapshot,
    RollBack,
    SandboxRolledBack,
    SnapshotInfo,
    SnapshotList,
    TakeSnapshot,
)

log = structlog.get_logger()

_CREATE_S: Final = 30.0
_PACK_S: Final = 120.0
_CREATES_AT_ONCE: Final = 16
_gone: Final = frozenset({ErrorCode.NOT_FOUND, ErrorCode.EXPIRED})


class _NodeGoneError(Exception):
    """What is to be done has to be done on another node."""


class NodeActions:
    """Does what the core of one shard wants done, each deed in a task of its own.

    Args:
        shard: its name.
        bus: a connected bus.
        clock: for pauses and deadlines.
        tell: takes the end of each action to the core.
        needs: whether a checkpoint of a rollout has this snapshot, or soon may.
        is_owner: whether the shard's lease still runs.
    """

    def __init__(
        self,
        shard: str,
        bus: Bus,
        clock: Clock,
        tell: Callable[[ActionDone], Awaitable[None]],
        *,
        needs: Callable[[str, str], bool],
        is_owner: Callable[[], bool],
    ) -> None:
        self._shard = shard
        self._clock = clock
        self._tell = tell
        self._asking = NodeAsking(shard, bus, clock, is_owner)
        self._leavings = Leavings(shard, self._asking, is_owner, needs)
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating = asyncio.Semaphore(_CREATES_AT_ONCE)

    def do(self, deed: Deed) -> None:
        """Begin a deed."""
        match deed:
            case Perform():
                self._start(self._perform(deed), f"{deed.begun.kind} of {deed.begun.local}")
            case DropCheckpoint():
                self._start(self._leavings.drop(deed), f"drop {deed.taken.snapshot_id}")
            case Collect():
                self._start(self._leavings.collect(deed), f"collect in {self._shard}")
            case _:
                assert_never(deed)

    @property
    def nodes(self) -> set[str]:
        """The nodes that still have something to drop."""
        return self._leavings.nodes

    def seen(self, nodes: NodesSeen) -> None:
        """Note which nodes are gone: nothing is waited for from them, nor asked of them."""
        self._leavings.seen = nodes

    def sweep(self) -> None:
        """Try once more to drop what could not be dropped, and what may be left of attempts."""
        for it in self._leavings.due():
            if isinstance(it, Twins):
                self._start(self._leavings.drop_twins(it), f"twins of {it.kept}")
            else:
                self.do(it)

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
        # Both to their ends: a snapshot that goes on is taken when nobody looks for it any more.
        snapshot, template = await asyncio.gather(
            self._snapshot(it, sandbox_id),
            self._template(it.project, sandbox_id),
            return_exceptions=True,
        )
        if isinstance(snapshot, BaseException):
            raise snapshot
        if isinstance(template, BaseException):
            raise template
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
            name=layer_name(self._id(it.begun)),
            version=str(it.begun.number),
            kind=LayerKind.TOOLKIT,
            replace=True,
        )
        subject = subjects.snapshot(it.project, sandbox_id.owner, "pack")
        layer = await self._asking.until_answered(subject, pack, LayerInfo, attempt_s=_PACK_S)
        return msgspec.structs.replace(taken, layer=layer.reference)

    async def _snapshot(self, it: Perform, sandbox_id: ScopedId) -> SnapshotInfo:
        labels = {
            ROLLOUT_LABEL: self._id(it.begun),
            ACTION_LABEL: str(it.begun.number),
            SHARD_LABEL: self._shard,
        }
        tries, doubtful = self._asking.tries(sandbox_id), it.doubtful
        while True:
            try:
                info = await self._found(it, sandbox_id, labels) if doubtful else None
                if info is None or not info.durable:
                    info = await self._taken(it, sandbox_id, labels)
            except DsecError as error:
                doubtful = True
                await tries.need_another(error)
                continue
            if not info.durable:
                why = info.detail or "that takes too long"
                raise unavailable(f"the node cannot keep the snapshot on its disk: {why}")
            if doubtful:
                self._leavings.later(Twins(it.project, info.snapshot_id, labels))
            return info

    async def _taken(
        self, it: Perform, sandbox_id: ScopedId, labels: dict[str, str]
    ) -> SnapshotInfo:
        take = TakeSnapshot(
            name=f"step {it.begun.step}", labels=labels, wait_durable_s=ATTEMPT_S / 2
        )
        subject = subjects.sandbox(it.project, sandbox_id, "snapshot")
        return await self._asking.once(subject, take, SnapshotInfo)

    async def _found(
        self, it: Perform, sandbox_id: ScopedId, labels: dict[str, str]
    ) -> SnapshotInfo | None:
        """Return the snapshot that an attempt in doubt has taken; None when there is none."""
        asked = ListSnapshots(sandbox_id=str(sandbox_id), labels=labels)
        subject = subjects.snapshot(it.project, sandbox_id.owner, "list")
        listed = await self._asking.once(subject, asked, SnapshotList)
        return listed.snapshots[-1] if listed.snapshots else None

    async def _template(self, project: str, sandbox_id: ScopedId) -> CreateSandbox:
        """Return how to make a sandbox like this one, but for what its snapshot says itself."""
        inspect = subjects.sandbox(project, sandbox_id, "inspect")
        return templates.kept_of(
            await self._asking.until_answered(inspect, InspectSandbox(template=True), SandboxInfo)
        )

    # --- Rollbacks and branches ---------------------------------------------------------------

    async def _put_back(self, it: Perform) -> str:
        """Return the id of the sandbox that has the checkpoint's files: the same, if it lives."""
        assert it.taken is not None  # noqa: S101  the core chose a checkpoint
        key = f"{self._id(it.begun)}/{it.begun.number}"
        is_lost = it.begun.lost
        if not is_lost:
            try:
                if await self._in_place(it, it.taken):
                    return it.begun.sandbox_id
            except _NodeGoneError:
                is_lost = True
        like = templates.in_its_place(it.begun, it.taken, self._id(it.begun))
        return await self._create(it, like, key, lost=is_lost)

    async def _in_place(self, it: Perform, taken: Taken) -> bool:
        """Put a sandbox back where it is; return False when another has to take its place.

        Once the node may have begun, it is asked until it has said what became of that, or is gone.

        Raises:
            _NodeGoneError: the node is gone, and another can make a sandbox like it.
            DsecError: why nothing has changed; ``may_have_happened`` when the node is gone and
                nobody knows.
        """
        sandbox_id = ScopedId.parse(it.begun.sandbox_id)
        subject = subjects.sandbox(it.project, sandbox_id, "rollback")
        asked = RollBack(
            message_id=f"rollback-{self._id(it.begun)}-{it.begun.number}",
            snapshot_id=taken.snapshot_id,
        )
        tries, doubtful, is_known = self._asking.tries(sandbox_id), it.doubtful, False
        while True:
            try:
                await self._asking.once(subject, asked, SandboxRolledBack, timeout_s=_CREATE_S)
            except DsecError as error:
                if error.code in _gone or error.details.get("reason") == "other_layers":
                    return False
                doubtful = (doubtful or in_doubt(error)) and not is_sure(error)
                # Such an answer is none: it may come from the way in, past which an attempt is.
                is_open = error.retryable or error.code is ErrorCode.DENIED
                if not (doubtful and is_open):
                    # Unless it is sure, the sandbox may have ended by it, which its node says next.
                    if error.retryable or is_known or is_sure(error):
                        await tries.need_another(error)
                    is_known = not error.retryable
                    continue
                log.warning("a rollback is in doubt", sandbox=str(sandbox_id), error=error.message)
            else:
                return True
            if sandbox_id.owner in self._leavings.seen.lost:
                if taken.layer:
                    raise _NodeGoneError
                raise outcome_unknown(sandbox_id.owner)
            await tries.pause()

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
                made = await self._create(it, like, rollout_id, lost=it.begun.lost)
                return Child(local=local, sandbox_id=made, model_local=model_local)
            except DsecError as error:
                return Child(local=local, error=ErrorReply.of(error))

    async def _create(self, it: Perform, like: CreateSandbox, key: str, *, lost: bool) -> str:
        """Make a sandbox of a checkpoint: of its snapshot where that is, else of its layer."""
        assert it.taken is not None  # noqa: S101  the core chose a checkpoint
        if not lost:
            try:
                return await self._created(
                    it.project,
                    msgspec.structs.replace(
                        like, snapshot=it.taken.snapshot_id, idempotency_key=f"checkpoint/{key}"
                    ),
                )
            except DsecError as error:
                if in_doubt(error) or not it.taken.layer:
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
        created = await self._asking.until_answered(
            subjects.sandbox_create(project), request, SandboxCreated, attempt_s=_CREATE_S
        )
        return created.sandbox_id
