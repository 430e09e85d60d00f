"""The shell of one shard: messages become events, effects become frames and answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypedDict, assert_never

import msgspec
import structlog

from dsec_chronus import metrics
from dsec_chronus.checkpoint_doors import CheckpointDoors
from dsec_chronus.config import ChronusConfig
from dsec_chronus.effects import (
    Announce,
    Answer,
    Collect,
    DropCheckpoint,
    Effect,
    Perform,
    PurgeJournal,
    Refuse,
    WriteFrame,
)
from dsec_chronus.errors import shard_moving, too_large
from dsec_chronus.events import (
    ActionAsked,
    ActionDone,
    ClockTicked,
    Event,
    FrameFailed,
    FrameRead,
    FrameWritten,
    JournalRead,
    Moment,
    OpenAsked,
    ShardLost,
    SweepDue,
)
from dsec_chronus.group_doors import GroupDoors
from dsec_chronus.journal import FencedError, Journal
from dsec_chronus.node_actions import NodeActions
from dsec_chronus.node_watch import NodesSeen
from dsec_chronus.records import ActionKind
from dsec_chronus.rollout_doors import RolloutDoors
from dsec_chronus.state import ShardState
from dsec_chronus.stream_door import StreamDoor
from dsec_common import subjects
from dsec_common.bus import Bus, ReplyAddress, Request, Served, current_traceparent
from dsec_common.bus_types import Handler, MessageT
from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.wire.rollout import (
    OpenRollout,
)
from dsec_common.wire.rollout_group import ShardTaken

log = structlog.get_logger()

LABELS_BYTES_MAX: Final = 16 * 1024


class Origin(TypedDict):
    """What every question to the core says of where it comes from."""

    request_id: int
    project: str
    local: str
    at: Moment


class _Caller(NamedTuple):
    """Who waits for an answer, and the story that it belongs to."""

    verb: str
    address: ReplyAddress
    message_id: str
    traceparent: str


class Shard:
    """One shard that this process owns: from :meth:`start` to :meth:`stop` or :meth:`abandon`.

    Args:
        name: the shard's name.
        bus: a connected bus.
        config: limits.
        clock: time.
        is_owner: whether the lease still runs.
        is_leaving: whether the process is about to close its connection.
        on_end: called once when the shard ends by itself, with what went wrong: a
            :class:`FencedError` when it is another's, anything else is a fault of this program.
    """

    def __init__(
        self,
        name: str,
        bus: Bus,
        config: ChronusConfig,
        clock: Clock,
        *,
        is_owner: Callable[[], bool],
        is_leaving: Callable[[], bool],
        on_end: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self._bus = bus
        self._clock = clock
        self._is_owner = is_owner
        self._is_leaving = is_leaving
        self._on_end = on_end
        self._journal = Journal(bus, name, clock, is_owner)
        self.core = ShardState(name, config, self._journal.epoch)
        self._nodes = NodeActions(
            name,
            bus,
            clock,
            self._action_done,
            needs=self.core.actions.needs,
            is_owner=is_owner,
        )
        self._ids = itertools.count(1)
        self._callers: dict[int, _Caller] = {}
        self._to_write: asyncio.Queue[WriteFrame | PurgeJournal] = asyncio.Queue()
        self._settled = asyncio.Event()
        self._served: list[Served[Any]] = []
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        self._announcing: set[asyncio.Task[None]] = set()
        self._lost = False
        self._gone = False

    # --- The life of a shard ------------------------------------------------------------------

    async def start(self) -> None:
        """Take the journal over, read it, and answer requests from then on.

        Raises:
            FencedError: the lease ran out meanwhile.
            DsecError: ``unavailable`` or ``timeout`` when NATS does not answer.
        """
        async for sequence, frame in self._journal.take():
            self._handle(FrameRead(frame=frame, sequence=sequence))
        self._writer = asyncio.create_task(self._write(), name=f"journal {self.name}")
        # Before anybody can ask for more: what is under way then is begun once, by its record.
        self._handle(JournalRead(at=self._now()))
        await RolloutDoors(self).serve()
        await GroupDoors(self).serve()
        await CheckpointDoors(self).serve()
        await StreamDoor(self, self._bus).serve()
        await self._bus.flush()
        # Whoever waits for an answer of the last owner asks again, which here it may do by now.
        await self._bus.publish(subjects.shard_taken(self.name), ShardTaken(shard=self.name))

    async def serve(
        self,
        subject: str,
        kind: type[MessageT],
        handler: Handler[MessageT],
        *,
        at_once: bool = True,
    ) -> None:
        """Answer requests on a subject until the shard ends.

        What the core decides is carried out without waiting, so handlers that do no more than hand
        it a request are called ``at_once``.
        """
        served = await self._bus.serve(subject, kind, handler, at_once=at_once)
        self._served.append(served)

    async def stop(self, timeout_s: float) -> None:
        """End in order: take no more, finish what waits for the journal, tell who still waits."""
        await self._unsubscribe()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.core.settled and not self._lost:
                    self._settled.clear()
                    await self._settled.wait()
        await self.abandon()

    async def abandon(self) -> None:
        """End at once: whoever waits is told to ask again."""
        self._lost = True
        self._settled.set()
        # First what begins deeds, then what does them.
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})
        self._writer = None
        await self._nodes.end()
        if self._timer is not None:
            self._timer.cancel()
        self._perform(self.core.handle(ShardLost(error=shard_moving(self.name))))
        await self._unsubscribe()
        self._gone = True
        for task in list(self._announcing):
            await task

    async def _unsubscribe(self) -> None:
        # A client that is not connected cannot take its word back: it subscribes all again later.
        while self._served and not self._bus.connected and not self._is_leaving():
            await self._clock.sleep(0.05)
        while self._served:
            await self._bus.unsubscribe(self._served.pop())

    # --- What comes in ------------------------------------------------------------------------

    async def open(self, request: Request[OpenRollout], project: str, rollout_id: ScopedId) -> None:
        """Open a rollout and answer the request's caller once it is durable.

        Raises:
            DsecError: ``invalid`` for too many labels; ``unavailable`` when the shard is moving.
        """
        labels = request.message.labels
        size = sum(len(name.encode()) + len(value.encode()) for name, value in labels.items())
        if size > LABELS_BYTES_MAX:
            raise too_large("the rollout's labels", size, LABELS_BYTES_MAX)
        await self.take(
            "open",
            request,
            (project, rollout_id.local),
            lambda origin: OpenAsked(
                **origin,
                labels=labels,
                checkpoint_every=request.message.checkpoint_every,
                durable=request.message.durable_checkpoints,
            ),
        )

    async def sweep(self) -> None:
        """Forget rollouts that are over."""
        if not self._lost and self._is_owner():
            self._nodes.sweep()
            self._handle(SweepDue(at=self._now()))

    @property
    def nodes(self) -> set[str]:
        """The nodes of which it matters whether they are gone."""
        return self.core.actions.nodes() | self._nodes.nodes

    async def nodes_seen(self, seen: NodesSeen) -> None:
        """Have the rollouts of nodes that are gone go on elsewhere, from durable checkpoints."""
        self._nodes.seen(seen)
        for node in seen.lost:
            await self._node_lost(node)

    async def _node_lost(self, node: str) -> None:
        for project, local, sandbox_id in self.core.actions.lost_with(node):
            if self._lost:
                return
            self._handle(
                ActionAsked(
                    request_id=0,
                    project=project,
                    local=local,
                    at=self._now(),
                    kind=ActionKind.ROLLBACK,
                    key=f"\0lost {sandbox_id}",
                    lost=True,
                )
            )

    # --- Through the core ---------------------------------------------------------------------

    def _now(self) -> Moment:
        return Moment(self._clock.now(), self._clock.monotonic())

    async def take(
        self,
        verb: str,
        request: Request[MessageT],
        rollout: tuple[str, str],
        event_of: Callable[[Origin], Event],
    ) -> None:
        """Hand a request to the core, whose answer may come now or much later.

        Args:
            verb: of the request, for the statistics.
            request: whose caller is answered.
            rollout: its project, and its id within the shard.
            event_of: returns the event, given what all have in common.

        Raises:
            DsecError: ``unavailable`` when the shard may be another's by now.
        """
        if self._gone:
            # A subscription that outlived a lost connection; the shard's owner answers.
            return
        if self._lost or not self._is_owner():
            raise shard_moving(self.name)
        request_id = next(self._ids)
        project, local = rollout
        event = event_of(
            Origin(request_id=request_id, project=project, local=local, at=self._now())
        )
        self._callers[request_id] = _Caller(
            verb, request.caller, request.message.message_id, request.traceparent
        )
        self._handle(event)

    async def _action_done(self, event: ActionDone) -> None:
        self._handle(event)

    def _handle(self, event: Event) -> None:
        effects = self.core.handle(event)
        if self.core.settled:
            self._settled.set()
        self._set_timer()
        self._perform(effects)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case WriteFrame() | PurgeJournal():
                    self._to_write.put_nowait(effect)
                case Answer() | Refuse():
                    self._answer(effect)
                case Perform() | DropCheckpoint() | Collect():
                    self._nodes.do(effect)
                case Announce():
                    task = asyncio.create_task(self._announce(effect), name="announce")
                    self._announcing.add(task)
                    task.add_done_callback(self._announcing.discard)
                case _:
                    assert_never(effect)

    async def _announce(self, effect: Announce) -> None:
        rollout_id = ScopedId.parse(effect.event.rollout_id, "rollout id")
        try:
            subject = subjects.rollout_event(effect.project, rollout_id, effect.what)
            await self._bus.publish(subject, effect.event)
        except DsecError as error:
            log.warning("an event was not published", shard=self.name, error=error.message)

    def _answer(self, effect: Answer | Refuse) -> None:
        caller = self._callers.pop(effect.request_id, None)
        if caller is None:
            return
        current_traceparent.set(caller.traceparent)
        outcome = "ok" if isinstance(effect, Answer) else str(effect.error.code)
        metrics.answered(caller.verb, outcome).inc()
        try:
            if isinstance(effect, Answer):
                reply = msgspec.structs.replace(effect.reply, cause_id=caller.message_id)
                self._bus.reply_soon(caller.address, reply)
            else:
                self._bus.reply_soon(caller.address, effect.error)
        except DsecError as error:
            # Whoever asked asks again, by the same number.
            log.warning("an answer could not be sent", shard=self.name, error=error.message)
        except Exception:
            # One answer that cannot be written down must not end the shard for all.
            log.exception("an answer failed", shard=self.name, verb=caller.verb)

    def _set_timer(self) -> None:
        deadline_s = self.core.next_deadline_s
        if deadline_s is None or self._lost:
            return
        if self._timer is not None:
            if self._timer_at_s <= deadline_s:  # it looks again when it fires
                return
            self._timer.cancel()
        self._timer_at_s = deadline_s
        delay_s = max(0.0, deadline_s - self._clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(ClockTicked(at=self._now()))

    # --- The journal --------------------------------------------------------------------------

    async def _write(self) -> None:
        try:
            while True:
                effect = await self._to_write.get()
                if isinstance(effect, PurgeJournal):
                    await self._purge(effect)
                else:
                    await self._append(effect)
        except Exception as error:  # noqa: BLE001  told to the service, which decides
            self._lost = True
            self._settled.set()
            self._on_end(error)

    async def _append(self, frame: WriteFrame) -> None:
        try:
            sequence = await self._journal.append(frame)
        except DsecError as error:
            metrics.frames("refused").inc()
            log.warning("the journal refused a frame", shard=self.name, error=error.message)
            self._handle(FrameFailed(error=error, at=self._now()))
            return
        except FencedError:
            metrics.frames("fenced").inc()
            raise
        metrics.frames("written").inc()
        metrics.RECORDS.inc(len(frame.records))
        self._handle(FrameWritten(sequence=sequence, at=self._now()))

    async def _purge(self, effect: PurgeJournal) -> None:
        try:
            await self._journal.purge_before(effect.sequence)
        except DsecError as error:
            log.warning("a journal was not shortened", shard=self.name, error=error.message)
