"""The shell around the core: turns requests into events and does what the core wants done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus_types import ReplyAddress, Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes, PlaceSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    EndCause,
    InspectSandbox,
    SandboxCreated,
    SandboxDeleted,
    SandboxInfo,
    SandboxRunning,
    SandboxState,
)
from dsec_sandboxd import metrics
from dsec_sandboxd.admission import LimitMaxima, check_placement
from dsec_sandboxd.effects import (
    AnnounceEnded,
    AnnounceRunning,
    ConfirmDeletion,
    ConfirmPlacement,
    Effect,
    FailDeletion,
    ForgetRecord,
    MakeSandbox,
    RefusePlacement,
    SaveRecord,
    UnmakeSandbox,
)
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    EvacuationBegan,
    Event,
    NodeRestarted,
    PlacementAsked,
    SandboxDied,
    SandboxMade,
    SandboxNotMade,
    SandboxNotUnmade,
    SandboxUnmade,
)
from dsec_sandboxd.kernel.interface import EndCause as KernelEndCause
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.layer_cache import LayerCache
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.listing import page_of
from dsec_sandboxd.making import Maker
from dsec_sandboxd.ports import MemoryAvailable, Replier
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

_log: Final = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Placement:
    outcome: asyncio.Future[SandboxRecord | DsecError]
    layers: tuple[Layer, ...] = ()


@dataclass(slots=True, kw_only=True)
class Parts:
    """What :class:`Sandboxes` works with."""

    kernel: Kernel
    store: RecordStore
    events: EventPublisher
    steps: StepLog
    layers: LayerCache
    memory: MemoryAvailable
    replier: Replier
    clock: Clock
    maxima: LimitMaxima = field(default_factory=LimitMaxima)


class Sandboxes:
    """All sandboxes of the node: placing, inspecting, listing and ending them."""

    def __init__(self, state: NodeState, parts: Parts, maker: Maker) -> None:
        self.state = state
        self.node = state.rules.node
        self.parts = parts
        self._placements: dict[str, _Placement] = {}
        self._deletions: dict[str, asyncio.Future[SandboxRecord | DsecError]] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._maker = maker

    # --- Requests -----------------------------------------------------------------------------

    async def place(self, request: Request[PlaceSandbox]) -> SandboxCreated:
        """Create a sandbox, or refuse; the caller is answered here, the scheduler by the return.

        The same message again gets the same sandbox.

        Raises:
            DsecError: ``invalid``; ``not_found`` or ``layer_error`` for a layer; ``exhausted``;
                ``unavailable`` while stopping; ``conflict``; ``timeout`` when it was ready too
                late; what the kernel refused.
        """
        started_at = time.perf_counter()
        place = request.message
        placement = self._placements.get(place.message_id)
        if placement is None:
            placement = _Placement(asyncio.get_running_loop().create_future())
            self._placements[place.message_id] = placement
            try:
                event = await self._placement_event(place, placement)
            except DsecError as error:
                self._settle(place.message_id, error)
            except BaseException:
                self._settle(
                    place.message_id,
                    DsecError(ErrorCode.INTERNAL, "the placement was interrupted"),
                )
                raise
            else:
                self.handle(event)
        outcome = await asyncio.shield(placement.outcome)
        if isinstance(outcome, DsecError):
            metrics.CREATES.labels(outcome.code.value).inc()
            raise outcome
        created = outcome.created(self.node)
        if request.caller.subject and request.caller.subject != request.reply_to:
            await self._answer_caller(request.caller, created)
        metrics.CREATES.labels("created").inc()
        metrics.CREATE_SECONDS.observe(time.perf_counter() - started_at)
        return created

    async def _placement_event(self, place: PlaceSandbox, placement: _Placement) -> PlacementAsked:
        request = place.request
        limits = check_placement(place, self.parts.maxima)
        placement.layers = await self._resolve(place.project, request)
        now = self.parts.clock.now()
        record = SandboxRecord(
            local=place.local,
            project=place.project,
            placement_id=place.message_id,
            request_id=request.message_id,
            state=SandboxState.CREATING,
            created_at=now,
            layer_references=tuple(layer.reference for layer in placement.layers),
            layer_digests=tuple(layer.digest for layer in placement.layers),
            limits=limits,
            env=request.env,
            labels=request.labels,
            agent=request.agent,
            rollout_id=request.rollout_id,
            lease_id=place.lease_id,
            expires_at=now + request.ttl_s if request.ttl_s else 0.0,
        )
        return PlacementAsked(
            now=now,
            record=record,
            valid_until=place.valid_until,
            memory_bytes_available=self.parts.memory.memory_bytes_available(),
        )

    async def _resolve(self, project: str, request: CreateSandbox) -> tuple[Layer, ...]:
        wanted = [(request.base, LayerKind.BASE)]
        if request.workspace:
            wanted.append((request.workspace, LayerKind.WORKSPACE))
        wanted += [(toolkit, LayerKind.TOOLKIT) for toolkit in request.toolkits]
        layers = await self.parts.layers.resolve(project, [reference for reference, _ in wanted])
        for layer, (_, kind) in zip(layers, wanted, strict=True):
            if layer.kind is not kind:
                raise invalid(
                    f"layer {layer.reference} is a {layer.kind.value}, not a {kind.value}; name it "
                    f"as the {layer.kind.value}",
                    field=kind.value,
                    reference=layer.reference,
                )
        digests = [layer.digest for layer in layers]
        if len(set(digests)) != len(digests):
            raise invalid("the same layer is named twice; name each once", field="toolkits")
        return tuple(layers)

    async def _answer_caller(self, caller: ReplyAddress, created: SandboxCreated) -> None:
        try:
            await self.parts.replier.reply(caller, created)
        except DsecError as error:
            # The sandbox lives and its scheduler is told; the caller finds it by listing.
            _log.warning("caller_not_answered", sandbox=created.sandbox_id, error=str(error))

    async def delete(self, request: Request[DeleteSandbox]) -> SandboxDeleted:
        """End a sandbox and answer when it holds nothing any more; every repetition is fine.

        Raises:
            DsecError: ``not_found``; ``unavailable`` when the kernel has not let go of it yet.
        """
        record = self.state.find(request.project, local_of(request))
        if record.state is not SandboxState.ENDED:
            record = await self.end(record.local)
        return SandboxDeleted(
            cause_id=request.message.message_id,
            sandbox_id=f"{self.node}.{record.local}",
            end_cause=record.end_cause or EndCause.DELETED,
        )

    async def end(self, local: str) -> SandboxRecord:
        """End a sandbox of any project as its owner does; return its last record.

        Raises:
            DsecError: ``unavailable`` when the kernel has not let go of it yet.
        """
        future = self._deletions.get(local)
        if future is None:
            future = self._deletions[local] = asyncio.get_running_loop().create_future()
        self.handle(DeletionAsked(now=self.parts.clock.now(), local=local))
        outcome = await asyncio.shield(future)
        if isinstance(outcome, DsecError):
            raise outcome
        return outcome

    async def inspect(self, request: Request[InspectSandbox]) -> SandboxInfo:
        """Return what the node knows of a sandbox, with what it uses while it runs.

        Raises:
            DsecError: ``not_found``.
        """
        record = self.state.find(request.project, local_of(request))
        info = record.info(self.node)
        if record.state is not SandboxState.RUNNING:
            return info
        try:
            usage = await self.parts.kernel.usage(record.local)
        except DsecError as error:
            _log.info("usage_unknown", local=record.local, error=str(error))
            return self.state.find(request.project, record.local).info(self.node)
        return msgspec.structs.replace(
            info,
            memory_bytes_used=usage.memory_bytes,
            cpu_seconds_used=usage.cpu_s,
            pids_used=usage.pids,
        )

    async def list(self, request: Request[ListNodeSandboxes]) -> NodeSandboxes:
        """Return a page of the sandboxes of one project on this node."""
        asked = request.message
        records = self.state.records(asked.project, include_ended=asked.include_ended)
        return page_of(self.node, records, asked)

    # --- Events of the node itself ------------------------------------------------------------

    async def recover(self) -> None:
        """Bring into order what an earlier daemon left; tell the end of each sandbox it had."""
        found = await self.parts.kernel.recover()
        records = self.parts.store.load()
        self.handle(NodeRestarted(now=self.parts.clock.now(), records=records))
        _log.info("recovered", records=len(records), in_kernel=len(found))

    async def watch_ended(self) -> None:
        """Take note of sandboxes that end by themselves, until cancelled."""
        async for ended in self.parts.kernel.ended():
            if not self.state.is_creating(ended.local):  # else its making lets go
                await self._maker.let_go(ended.local)
            cause = EndCause.OOM if ended.cause is KernelEndCause.OOM else EndCause.EXITED
            self.handle(
                SandboxDied(
                    now=self.parts.clock.now(),
                    local=ended.local,
                    cause=cause,
                    detail=ended.detail,
                )
            )

    def tick(self) -> None:
        """Let time pass: sandboxes and old records expire."""
        self.handle(ClockTicked(now=self.parts.clock.now()))

    async def evacuate(self, detail: str) -> None:
        """End every sandbox; return when none is left and all work here is done."""
        self.handle(EvacuationBegan(now=self.parts.clock.now(), detail=detail))
        while self._work:
            await asyncio.wait(set(self._work))

    # --- Effects ------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Give the core an event and do what it wants; what is slow goes on in the background."""
        for effect in self.state.handle(event):
            try:
                self._perform(effect)
            except DsecError as error:
                # Only the StateDB raises here. An intent that is not kept must not be acted on.
                if isinstance(effect, SaveRecord) and effect.record.state is SandboxState.CREATING:
                    self.handle(
                        SandboxNotMade(
                            now=self.parts.clock.now(), local=effect.record.local, error=error
                        )
                    )
                    return
                _log.error("effect_failed", effect=type(effect).__name__, error=str(error))

    def _perform(self, effect: Effect) -> None:  # noqa: C901  one case per kind of effect
        match effect:
            case SaveRecord(record):
                self.parts.store.put(record)
            case ForgetRecord(local):
                self.parts.store.delete(local)
            case MakeSandbox(record):
                self._start(self._make(record), f"make {record.local}")
            case UnmakeSandbox(record, delay_s):
                self._start(self._unmake(record, delay_s), f"unmake {record.local}")
            case ConfirmPlacement(placement_id, record):
                self._settle(placement_id, record)
            case RefusePlacement(placement_id, error):
                self._settle(placement_id, error)
            case ConfirmDeletion(record):
                self._settle_deletion(record.local, record)
            case FailDeletion(local, error):
                self._settle_deletion(local, error)
            case AnnounceRunning(record):
                self._announce_running(record)
            case AnnounceEnded(record):
                self._announce_ended(record)
            case _:
                assert_never(effect)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _settle(self, placement_id: str, outcome: SandboxRecord | DsecError) -> None:
        placement = self._placements.pop(placement_id, None)
        if placement is not None and not placement.outcome.done():
            placement.outcome.set_result(outcome)

    def _settle_deletion(self, local: str, outcome: SandboxRecord | DsecError) -> None:
        future = self._deletions.pop(local, None)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _announce_running(self, record: SandboxRecord) -> None:
        metrics.SANDBOXES_ALIVE.set(self.state.living_count)
        created = record.created(self.node)
        self.parts.events.publish(
            subjects.sandbox_event(record.project, record.scoped_id(self.node), "running"),
            SandboxRunning(
                cause_id=record.request_id,
                sandbox_id=created.sandbox_id,
                request_id=record.request_id,
                created=created,
            ),
        )
        self.parts.steps.step(
            record,
            "create",
            latency_ms=record.create_ms,
            attributes={"layers": " ".join(record.layer_references)},
            cause_id=record.request_id,
        )

    def _announce_ended(self, record: SandboxRecord) -> None:
        metrics.SANDBOXES_ALIVE.set(self.state.living_count)
        cause = record.end_cause or EndCause.EXITED
        metrics.ENDS.labels(cause.value).inc()
        if cause is EndCause.CREATE_FAILED:
            # Nobody was given its id, so only the log tells of it.
            self.parts.steps.step(
                record,
                "create",
                status="failed",
                attributes={"reason": record.end_detail},
                cause_id=record.request_id,
            )
        else:
            ended = record.ended(self.node)
            self.parts.events.publish(
                subjects.sandbox_event(record.project, record.scoped_id(self.node), "ended"), ended
            )
            self.parts.steps.step(
                record,
                "delete" if cause is EndCause.DELETED else "end",
                status="ok" if cause is EndCause.DELETED else cause.value,
                attributes={"reason": record.end_detail},
                cause_id=record.request_id,
            )
        self.parts.steps.end(record.local)

    # --- The kernel ---------------------------------------------------------------------------

    async def _make(self, record: SandboxRecord) -> None:
        started_at = time.perf_counter()
        placement = self._placements.get(record.placement_id)
        try:
            await self._maker.make(record, placement.layers if placement else ())
        except BaseException as error:
            told = _as_dsec_error("creating a sandbox", error)
            self.handle(SandboxNotMade(now=self.parts.clock.now(), local=record.local, error=told))
            if not isinstance(error, Exception):
                raise
            return
        self.handle(
            SandboxMade(
                now=self.parts.clock.now(),
                local=record.local,
                create_ms=(time.perf_counter() - started_at) * 1000,
            )
        )
        if not self.state.is_living(record.local):
            await self._maker.let_go(record.local)  # it died before we heard that it lived

    async def _unmake(self, record: SandboxRecord, delay_s: float) -> None:
        if delay_s:
            await self.parts.clock.sleep(delay_s)
        local = record.local
        try:
            await self._maker.unmake(local)
        except Exception as error:  # noqa: BLE001  told to the core, which has it tried again
            told = _as_dsec_error("ending a sandbox", error)
            self.handle(SandboxNotUnmade(now=self.parts.clock.now(), local=local, error=told))
            return
        self.handle(SandboxUnmade(now=self.parts.clock.now(), local=local))


def local_of(request: Request[Any]) -> str:
    """Return the sandbox's local id in ``dsec.v1.<project>.sandbox.<node>.<local>.<verb>``."""
    return subjects.validate_local(request.tokens[5])


def _as_dsec_error(operation: str, error: BaseException) -> DsecError:
    if isinstance(error, DsecError):
        return error
    if isinstance(error, OSError):
        return from_os_error(operation, error)
    if isinstance(error, asyncio.CancelledError):
        return DsecError(
            ErrorCode.UNAVAILABLE, f"{operation} was interrupted: the node is stopping"
        )
    _log.error("unexpected", operation=operation, exc_info=error)
    return DsecError(
        ErrorCode.INTERNAL,
        f"{operation} failed unexpectedly ({type(error).__name__}); the node's log says why",
    )
