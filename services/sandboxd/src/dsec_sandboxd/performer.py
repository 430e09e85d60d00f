"""Does what the core wants done, and tells it how that went."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.wire.sandbox import SandboxState
from dsec_sandboxd.admission import LimitMaxima
from dsec_sandboxd.announcing import Announcer
from dsec_sandboxd.effects import (
    AnnounceEnded,
    AnnouncePaused,
    AnnounceResized,
    AnnounceResumed,
    AnnounceRunning,
    ConfirmDeletion,
    ConfirmPlacement,
    Effect,
    FailDeletion,
    ForgetRecord,
    HandOut,
    MakeSandbox,
    PauseSandbox,
    RefusePlacement,
    ResumeSandbox,
    SaveRecord,
    TellTurn,
    UnmakeSandbox,
)
from dsec_sandboxd.errors import as_dsec_error
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.events import (
    DeletionAsked,
    Event,
    NotHandedOut,
    PauseFailed,
    PauseSucceeded,
    ResumeFailed,
    ResumeSucceeded,
    SandboxMade,
    SandboxNotMade,
    SandboxNotUnmade,
    SandboxUnmade,
)
from dsec_sandboxd.kernel.interface import Kernel, SandboxIdentity
from dsec_sandboxd.layer_cache import LayerCache
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.making import Maker
from dsec_sandboxd.metering import Meters
from dsec_sandboxd.ports import MemoryAvailable, Replier
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

_log: Final = structlog.get_logger(__name__)

#: A sandbox that is wanted again so soon keeps its memory.
_RECLAIM_AFTER_S: Final = 0.25
#: The answer to a request that made many sandboxes is on its way by then.
_ANSWERED_AFTER_S: Final = 0.01
#: A first command that follows the answer has begun by then.
_BEHIND_S: Final = 0.004
#: Of so many is told before others have a turn.
_TOLD_AT_ONCE: Final = 8


@dataclass(slots=True)
class Placement:
    """A placement that has no answer yet.

    ``fresh`` says that its sandbox is made for it; one that was there before is only told again.
    """

    outcome: asyncio.Future[SandboxRecord | DsecError]
    layers: tuple[Layer, ...] = ()
    fresh: bool = False


@dataclass(slots=True, kw_only=True)
class Parts:
    """What the node's sandboxes work with."""

    kernel: Kernel
    store: RecordStore
    events: EventPublisher
    steps: StepLog
    layers: LayerCache
    memory: MemoryAvailable
    replier: Replier
    clock: Clock
    maxima: LimitMaxima = field(default_factory=LimitMaxima)
    meters: Meters | None = None


class Performer:
    """Gives events to the core and performs its effects, in order; what is slow in the background.

    Attributes:
        placements: by placement id, until they are answered.
        deletions: by local id, until they are answered.
        work: what goes on in the background.
        announcer: tells of what happens.
    """

    def __init__(self, state: NodeState, parts: Parts, maker: Maker) -> None:
        self.state = state
        self.node = state.rules.node
        self.parts = parts
        self.placements: dict[str, Placement] = {}
        self.deletions: dict[str, asyncio.Future[SandboxRecord | DsecError]] = {}
        self._turns: dict[str, asyncio.Future[DsecError | None]] = {}
        self.work: set[asyncio.Task[None]] = set()
        self._reclaims: set[asyncio.Task[None]] = set()
        self._maker = maker
        self.announcer = Announcer(state, parts.events, parts.steps, parts.meters)

    def handle(self, event: Event) -> None:
        """Give the core an event and do what it wants; what is slow goes on in the background."""
        for effect in self.state.handle(event):
            try:
                self._perform(effect)
            except DsecError as error:
                # Only the StateDB raises here.
                if isinstance(effect, SaveRecord) and self._not_begun(effect.record, error):
                    return
                _log.error("effect_failed", effect=type(effect).__name__, error=str(error))

    def _not_begun(self, record: SandboxRecord, error: DsecError) -> bool:
        """Put an end to a sandbox that could not be kept before anybody was told of it."""
        now = self.parts.clock.now()
        if record.state is SandboxState.CREATING:
            self.handle(SandboxNotMade(now=now, local=record.local, error=error))
            return True
        if record.state is SandboxState.RUNNING and record.placement_id in self.placements:
            self.settle(record.placement_id, error)
            self.handle(DeletionAsked(now=now, local=record.local))
            return True
        return False

    def _perform(self, effect: Effect) -> None:  # noqa: C901, PLR0912  one case per kind of effect
        match effect:
            case SaveRecord(record):
                self.parts.store.put(record)
            case ForgetRecord(local):
                self.parts.store.delete(local)
            case MakeSandbox(record):
                self.start(self._make(record), f"make {record.local}")
            case HandOut(record):
                self.start(self._hand_out(record), f"hand out {record.local}")
            case UnmakeSandbox(record, delay_s):
                self.start(self._unmake(record, delay_s), f"unmake {record.local}")
            case PauseSandbox(record):
                self.start(self._pause(record.local), f"pause {record.local}")
            case ResumeSandbox(record):
                self.start(self._resume(record.local), f"resume {record.local}")
            case TellTurn(local, outcome):
                self._tell_turn(local, outcome)
            case ConfirmPlacement(placement_id, record):
                self.settle(placement_id, record)
            case RefusePlacement(placement_id, error):
                self.settle(placement_id, error)
            case ConfirmDeletion(record):
                self._settle_deletion(record.local, record)
            case FailDeletion(local, error):
                self._settle_deletion(local, error)
            case AnnounceRunning(record):
                self.announcer.running(record)
            case AnnouncePaused(record):
                self.announcer.paused(record)
            case AnnounceResumed(record):
                self.announcer.resumed(record)
            case AnnounceResized(record, cu_before, reason):
                self.announcer.resized(record, cu_before, reason)
            case AnnounceEnded(record):
                self.announcer.ended(record)
            case _:
                assert_never(effect)

    @contextlib.contextmanager
    def announced_later(self, request_id: str) -> Iterator[None]:
        """Tell of the sandboxes that a request makes in this context once it is answered."""
        self.announcer.hold_back(request_id)
        try:
            yield
        finally:
            held_back = self.announcer.held_back(request_id)
            self.start(self._announce(held_back), f"announce {request_id}")

    @contextlib.contextmanager
    def announced_behind(self, request_id: str) -> Iterator[None]:
        """Tell of the sandbox that a request makes in this context a moment after what it sends."""
        self.announcer.hold_back(request_id)
        try:
            yield
        finally:
            for local in self.announcer.held_back(request_id):
                # What comes next is most likely a command, and whoever sends it waits for that.
                loop = asyncio.get_running_loop()
                loop.call_later(_BEHIND_S, self.announcer.tell, local)

    async def _announce(self, held_back: Sequence[str]) -> None:
        await self.parts.clock.sleep(_ANSWERED_AFTER_S)
        for first in range(0, len(held_back), _TOLD_AT_ONCE):
            for local in held_back[first : first + _TOLD_AT_ONCE]:
                self.announcer.tell(local)
            await asyncio.sleep(0)

    def announce(self, record: SandboxRecord) -> None:
        """Tell of a sandbox that an earlier daemon made and did not live to tell of."""
        self.announcer.running(record)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Have ``work`` done in the background; a stop waits for it."""
        task = asyncio.create_task(work, name=name)
        self.work.add(task)
        task.add_done_callback(self.work.discard)

    def settle(self, placement_id: str, outcome: SandboxRecord | DsecError) -> None:
        """Answer a placement; a second answer is none."""
        placement = self.placements.pop(placement_id, None)
        if placement is not None and not placement.outcome.done():
            placement.outcome.set_result(outcome)

    def _settle_deletion(self, local: str, outcome: SandboxRecord | DsecError) -> None:
        future = self.deletions.pop(local, None)
        if future is not None and not future.done():
            future.set_result(outcome)

    async def turn(self, local: str) -> None:
        """Return when a sandbox that is being stopped, or let go on, has got there, or has ended.

        Raises:
            DsecError: why it could not be done.
        """
        future = self._turns.get(local)
        if future is None:
            future = self._turns[local] = asyncio.get_running_loop().create_future()
        error = await asyncio.shield(future)
        if error is not None:
            raise error

    def _tell_turn(self, local: str, error: DsecError | None) -> None:
        future = self._turns.pop(local, None)
        if future is not None and not future.done():
            future.set_result(error)

    # --- The kernel ---------------------------------------------------------------------------

    async def _make(self, record: SandboxRecord) -> None:
        started_at = time.perf_counter()
        placement = self._begun(record)
        try:
            await self._maker.make(record, placement.layers if placement else ())
        except BaseException as error:
            self._not_made(record, error)
            if not isinstance(error, Exception):
                raise
            return
        await self._made(record, started_at)

    async def _hand_out(self, record: SandboxRecord) -> None:
        started_at = time.perf_counter()
        self._begun(record)
        try:
            instead = await self._maker.hand_out(record)
        except BaseException as error:
            self._not_made(record, error)
            if not isinstance(error, Exception):
                raise
            return
        if instead is None:
            await self._made(record, started_at)
        else:
            now = self.parts.clock.now()
            self.handle(NotHandedOut(now=now, local=record.local, instead=instead))

    def _begun(self, record: SandboxRecord) -> Placement | None:
        placement = self.placements.get(record.placement_id)
        if placement is not None:
            placement.fresh = True
        return placement

    def _not_made(self, record: SandboxRecord, error: BaseException) -> None:
        told = as_dsec_error("creating a sandbox", error)
        self.handle(SandboxNotMade(now=self.parts.clock.now(), local=record.local, error=told))

    async def _made(self, record: SandboxRecord, started_at: float) -> None:
        self.handle(
            SandboxMade(
                now=self.parts.clock.now(),
                monotonic_s=self.parts.clock.monotonic(),
                local=record.local,
                create_ms=(time.perf_counter() - started_at) * 1000,
                identity=self._identity(record.local),
            )
        )
        if not self.state.is_living(record.local):
            await self._maker.let_go(record.local)  # it died before we heard that it lived

    def _identity(self, local: str) -> SandboxIdentity | None:
        try:
            return self.parts.kernel.identity(local)
        except DsecError:  # it has just died by itself
            return None

    async def _unmake(self, record: SandboxRecord, delay_s: float) -> None:
        if delay_s:
            await self.parts.clock.sleep(delay_s)
        local = record.local
        try:
            await self._maker.unmake(local)
        except Exception as error:  # noqa: BLE001  told to the core, which has it tried again
            told = as_dsec_error("ending a sandbox", error)
            self.handle(SandboxNotUnmade(now=self.parts.clock.now(), local=local, error=told))
            return
        self.handle(SandboxUnmade(now=self.parts.clock.now(), local=local))

    async def _pause(self, local: str) -> None:
        clock = self.parts.clock
        try:
            await self.parts.kernel.pause(local)
        except Exception as error:  # noqa: BLE001  told to the core, and by it to who asked
            told = as_dsec_error("pausing a sandbox", error)
            self.handle(PauseFailed(monotonic_s=clock.monotonic(), local=local, error=told))
            return
        self.handle(PauseSucceeded(now=clock.now(), local=local))
        task = asyncio.create_task(self._reclaim(local), name=f"reclaim {local}")
        self._reclaims.add(task)
        task.add_done_callback(self._reclaims.discard)

    async def _reclaim(self, local: str) -> None:
        """Give a sandbox's memory back, unless it was only paused for a moment."""
        await self.parts.clock.sleep(_RECLAIM_AFTER_S)
        try:
            await self.parts.kernel.reclaim(local)
        except DsecError as error:
            _log.info("memory_not_reclaimed", local=local, error=str(error))

    async def _resume(self, local: str) -> None:
        try:
            await self.parts.kernel.resume(local)
        except Exception as error:  # noqa: BLE001  as above
            told = as_dsec_error("resuming a sandbox", error)
            self.handle(ResumeFailed(local=local, error=told))
            return
        clock = self.parts.clock
        self.handle(ResumeSucceeded(now=clock.now(), monotonic_s=clock.monotonic(), local=local))

    async def finish(self) -> None:
        """Return when all work in the background is done; memory is not given back any more."""
        self.announcer.tell_all()
        for task in self._reclaims:
            task.cancel()
        while work := self.work | self._reclaims:
            await asyncio.wait(work)
