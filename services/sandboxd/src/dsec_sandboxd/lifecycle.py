"""The shell around the core: turns requests into events and does what the core wants done."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus_types import ReplyAddress, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import CommandDefaults
from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes, PlaceSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    EndCause,
    InspectSandbox,
    SandboxCreated,
    SandboxDeleted,
    SandboxInfo,
    SandboxState,
)
from dsec_sandboxd import metrics
from dsec_sandboxd.admission import check_placement
from dsec_sandboxd.announcing import Lives
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    EvacuationBegan,
    Event,
    NodeRestarted,
    PlacementAsked,
    ResumeAsked,
    SandboxDied,
    SandboxPutBack,
)
from dsec_sandboxd.first_command import FirstCommands, with_outcome
from dsec_sandboxd.kernel.interface import EndCause as KernelEndCause
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.listing import page_of
from dsec_sandboxd.making import Maker, RemakeError
from dsec_sandboxd.model_environment import environment_of
from dsec_sandboxd.performer import Parts, Performer, Placement
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.restarts import may_live_on
from dsec_sandboxd.snapshot_store import SnapshotStore
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.templates import template_of
from dsec_sandboxd.usages import page_with_usage, with_usage

_log: Final = structlog.get_logger(__name__)

_CAUSES: Final = {
    KernelEndCause.OOM: EndCause.OOM,
    KernelEndCause.EXHAUSTED: EndCause.EXHAUSTED,
    KernelEndCause.KILLED: EndCause.KILLED,
}


class Sandboxes:
    """All sandboxes of the node: placing, inspecting, listing and ending them."""

    def __init__(self, state: NodeState, parts: Parts, maker: Maker) -> None:
        self.state = state
        self.node = state.rules.node
        self.parts = parts
        self._performer = Performer(state, parts, maker)
        self._maker = maker
        # Named by the next heartbeat even if their sandboxes are over by then: a lease that no
        # heartbeat has named is not known to have ended with its sandbox, and only runs out.
        self.unnamed_leases: set[str] = set()
        self._first: FirstCommands | None = None
        self._snapshots: SnapshotStore | None = None
        self._firsts: set[asyncio.Task[SandboxCreated]] = set()
        self._began_s = parts.clock.monotonic()
        self._begun: list[SandboxRecord] = []  # rollbacks that an earlier daemon did not finish

    def take_first_commands(self, first: FirstCommands) -> None:
        """Take the part that runs the commands of create requests; before any request."""
        self._first = first

    def tell_lives(self, lives: Lives) -> None:
        """Take who is told of the instances of agents; before any request."""
        self._performer.announcer.lives = lives

    def use_snapshots(self, snapshots: SnapshotStore) -> None:
        """Take the part that knows the node's snapshots; before any request."""
        self._snapshots = snapshots

    def _required_snapshots(self) -> SnapshotStore:
        if self._snapshots is None:
            raise DsecError(ErrorCode.INTERNAL, "the node is not put together: no snapshots")
        return self._snapshots

    async def admit(
        self, record: SandboxRecord, layers: tuple[Layer, ...], valid_until: float
    ) -> SandboxRecord | DsecError:
        """Have a sandbox made that no scheduler has placed here, if the node's books allow it.

        Returns:
            The sandbox as it runs, or why there is none.
        """
        placement = Placement(asyncio.get_running_loop().create_future(), layers)
        self._performer.placements[record.placement_id] = placement
        self.handle(
            PlacementAsked(
                now=self.parts.clock.now(),
                record=record,
                valid_until=valid_until,
                memory_bytes_available=self.parts.memory.memory_bytes_available(),
            )
        )
        return await asyncio.shield(placement.outcome)

    def announced_later(self, request_id: str) -> contextlib.AbstractContextManager[None]:
        """Tell of the sandboxes that a request makes in this context once it is answered."""
        return self._performer.announced_later(request_id)

    def _required_first(self) -> FirstCommands:
        if self._first is None:
            raise DsecError(ErrorCode.INTERNAL, "the node is not put together: no first commands")
        return self._first

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
        handed_on = bool(request.caller.subject) and request.caller.subject != request.reply_to
        answering: asyncio.Task[SandboxCreated] | None = None
        # Who waits does not wait for the telling, too.
        with self._performer.announced_behind(place.request.message_id):
            outcome, is_fresh = await self._placed(place)
            if isinstance(outcome, DsecError):
                metrics.CREATES.labels(outcome.code.value).inc()
                raise outcome
            created = outcome.created(self.node)
            if is_fresh and outcome.lease_id:
                self.unnamed_leases.add(outcome.lease_id)
            if place.request.command is not None and is_fresh:
                answering = self._start_first(place.request, outcome, request.caller, handed_on)
            elif handed_on:
                await self._answer_caller(request.caller, created)
        if answering is not None and not handed_on:
            created = await asyncio.shield(answering)
        metrics.CREATES.labels("created").inc()
        metrics.CREATE_SECONDS.observe(time.perf_counter() - started_at)
        return created

    async def _placed(self, place: PlaceSandbox) -> tuple[SandboxRecord | DsecError, bool]:
        """Return what came of a placement, and whether this word of it had the sandbox made."""
        placement = self._performer.placements.get(place.message_id)
        if placement is not None:
            return await asyncio.shield(placement.outcome), False
        placement = Placement(asyncio.get_running_loop().create_future())
        self._performer.placements[place.message_id] = placement
        try:
            event = await self._placement_event(place, placement)
        except DsecError as error:
            self._performer.settle(place.message_id, error)
        except BaseException:
            self._performer.settle(
                place.message_id,
                DsecError(ErrorCode.INTERNAL, "the placement was interrupted"),
            )
            raise
        else:
            self.handle(event)
            self._give_back_unused(event.record)
        return await asyncio.shield(placement.outcome), placement.fresh

    def _start_first(
        self, request: CreateSandbox, record: SandboxRecord, caller: ReplyAddress, handed_on: bool
    ) -> asyncio.Task[SandboxCreated]:
        """Run a sandbox's first command; it goes on whoever still waits for it."""
        task = asyncio.create_task(
            self._run_first(request, record, caller if handed_on else ReplyAddress()),
            name=f"first command {record.local}",
        )
        self._firsts.add(task)
        task.add_done_callback(self._firsts.discard)
        return task

    async def _run_first(
        self, request: CreateSandbox, record: SandboxRecord, caller: ReplyAddress
    ) -> SandboxCreated:
        outcome = await self._required_first().run(request, record)
        created = with_outcome(record.created(self.node), outcome)
        lives = self._performer.announcer.lives
        if lives is not None and not (created.result and created.result.exit_code == 0):
            lives.failed(record.local)
        if caller.subject:
            await self._answer_caller(caller, created)
        if record.delete_after:
            try:
                await self.end(record.local)
            except DsecError as error:  # the core goes on trying
                _log.info("deletion_goes_on", local=record.local, error=str(error))
        return created

    async def _placement_event(self, place: PlaceSandbox, placement: Placement) -> PlacementAsked:
        request = place.request
        limits = check_placement(place, self.parts.maxima)
        await self._maker.check_networks(request.setup_network, request.network)
        restored = None
        defaults: CommandDefaults | None
        if request.snapshot:
            restored = self._required_snapshots().restored(place.project, request)
            placement.layers = self._required_snapshots().layers_below(place.project, restored)
            defaults = restored.defaults
        else:
            placement.layers = await self.parts.layers.asked(place.project, request)
            defaults = placement.layers[0].defaults
        defaults = _asked_defaults(defaults or CommandDefaults(), request)
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
            env={**defaults.env, **environment_of(request, restored)},
            labels=request.labels,
            agent=request.agent,
            agent_version=request.agent_version,
            rollout_id=request.rollout_id,
            model_rollout_id=request.model_rollout_id,
            lease_id=place.lease_id,
            slices=place.slices,
            ttl_s=request.ttl_s,
            deadline_s=request.deadline_s,
            tools=request.tools,
            action_terms=request.action_terms,
            idle_ttl_s=request.idle_ttl_s,
            idle_action=request.idle_action,
            delete_after=request.delete_after,
            network=request.network,
            setup_network=request.setup_network,
            has_command=request.command is not None,
            snapshot=restored.local if restored else "",
            snapshot_layers=restored.chain if restored else (),
            warm=request.warm,
            defaults=defaults,
        )
        self._required_first().check(request, record)
        if self._maker.warm is not None:
            record = self._maker.warm.claim(request, record, placement.layers)
        return PlacementAsked(
            now=now,
            record=record,
            valid_until=place.valid_until,
            memory_bytes_available=self.parts.memory.memory_bytes_available(),
        )

    def _give_back_unused(self, record: SandboxRecord) -> None:
        """Have a sandbox wait again that was claimed for a placement which was refused."""
        warm = self._maker.warm
        if warm is not None and record.asked_as and not self.state.is_living(record.local):
            warm.give_back(record)

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
        future = self._performer.deletions.get(local)
        if future is None:
            future = self._performer.deletions[local] = asyncio.get_running_loop().create_future()
        self.handle(DeletionAsked(now=self.parts.clock.now(), local=local))
        outcome = await asyncio.shield(future)
        if isinstance(outcome, DsecError):
            raise outcome
        return outcome

    async def inspect(self, request: Request[InspectSandbox]) -> SandboxInfo:
        """Return what the node knows of a sandbox, with what it uses while it runs or stands still.

        Raises:
            DsecError: ``not_found``.
        """
        record = self.state.find(request.project, local_of(request))
        clock = self.parts.clock
        info = msgspec.structs.replace(
            record.info(self.node),
            daemon_s=clock.monotonic() - self._began_s,
            paused_s=record.stood_still_s(clock.now()),
        )
        if record.has_command:
            info = self._required_first().told(info, record.local)
        if request.message.template:
            template = template_of(record, self._maker.networks)
            info = msgspec.structs.replace(info, template=template)
        if record.state is SandboxState.RUNNING:
            info = msgspec.structs.replace(info, idle_s=self.state.idle_s(record.local))
        try:
            return await with_usage(self.parts.kernel, info)
        except DsecError as error:
            _log.info("usage_unknown", local=record.local, error=str(error))
            found = self.state.find(request.project, record.local).info(self.node)
            return msgspec.structs.replace(found, template=info.template)

    async def list(self, request: Request[ListNodeSandboxes]) -> NodeSandboxes:
        """Return a page of the sandboxes of one project on this node."""
        asked = request.message
        with_ended = asked.include_ended or SandboxState.ENDED in asked.states
        records = self.state.records(asked.project, include_ended=with_ended)
        page = page_of(self.node, records, asked)
        return await page_with_usage(self.parts.kernel, page) if asked.usage else page

    # --- Events of the node itself ------------------------------------------------------------

    async def recover(self) -> tuple[SandboxRecord, ...]:
        """Take over the sandboxes of an earlier daemon; remove, and tell the end of, the others.

        Returns:
            Those that were taken over.
        """
        store, clock, steps = self.parts.store, self.parts.clock, self.parts.steps
        records = store.load()
        sequences = store.sequences()
        for local, (source, seq) in sequences.items():
            steps.resume(local, source, seq)
        adoption = await self._maker.adopt([record for record in records if may_live_on(record)])
        self.handle(
            NodeRestarted(
                now=clock.now(),
                monotonic_s=clock.monotonic(),
                records=records,
                adopted=frozenset(adoption.adopted),
                lost=adoption.lost,
            )
        )
        if self.parts.meters is not None:
            self.parts.meters.recovered(records)
        for record in records:
            if record.local in adoption.adopted:
                if record.local not in sequences:
                    self._performer.announce(record)  # the daemon died before it told of it
                steps.step(record, "adopt", cause_id=record.request_id)
                await self._as_it_was(record)
                if record.inheriting:
                    self._begun.append(record)
        metrics.SANDBOXES_ALIVE.set(self.state.living_count)
        _log.info(
            "recovered",
            records=len(records),
            adopted=len(adoption.adopted),
            lost=adoption.lost,
            removed=adoption.removed,
        )
        return tuple(record for record in records if record.local in adoption.adopted)

    async def _as_it_was(self, record: SandboxRecord) -> None:
        """Have a sandbox that was taken over stand still if it did; let go what is nobody's."""
        if record.delete_after:
            # Its command's caller was to be answered by the daemon that died.
            self.handle(DeletionAsked(now=self.parts.clock.now(), local=record.local))
        elif record.state is SandboxState.PAUSED:
            try:
                await self.parts.kernel.pause(record.local)
            except DsecError as error:
                _log.warning("not_paused_again", local=record.local, error=str(error))
                self.handle(ResumeAsked(local=record.local))

    async def finish_rollbacks(self) -> None:
        """Finish what an earlier daemon had begun, once networks are there; before any request."""
        begun, self._begun = self._begun, []
        for record in begun:
            try:
                await self._maker.finish_remake(record)
            except RemakeError as error:
                await self.not_put_back(record.local, error)
            else:
                self.handle(SandboxPutBack(local=record.local))

    async def not_put_back(self, local: str, error: RemakeError) -> None:
        """Note that a sandbox is gone, and that there is no new one in its place."""
        await self._maker.let_go(local)
        self.handle(
            SandboxDied(
                now=self.parts.clock.now(),
                local=local,
                cause=EndCause.ROLLBACK_FAILED,
                detail=f"it could not be put back to a snapshot: {error.error.message}",
            )
        )

    async def switched(self, local: str) -> None:
        """Return when a sandbox takes requests: at once, unless it is just being put back."""
        while (switching := self._maker.switching(local)) is not None:
            await asyncio.shield(switching)

    def is_remaking(self, local: str) -> bool:
        """Return whether a sandbox is being put back, so that its processes end and it does not."""
        return self._maker.is_remaking(local)

    async def settled(self) -> None:
        """Return when nothing is being made or removed."""
        await self._performer.finish()

    async def watch_ended(self) -> None:
        """Take note of sandboxes that end by themselves, until cancelled."""
        async for ended in self.parts.kernel.ended():
            if self._maker.is_remaking(ended.local):
                continue  # the rollback that goes on finds out
            if not self.state.is_creating(ended.local):  # else its making lets go
                await self._maker.let_go(ended.local)
            cause = _CAUSES.get(ended.cause, EndCause.EXITED)
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
        clock = self.parts.clock
        self.handle(ClockTicked(now=clock.now(), monotonic_s=clock.monotonic()))

    async def evacuate(self, detail: str) -> None:
        """End every sandbox; return when none is left and all work here is done."""
        self.handle(EvacuationBegan(now=self.parts.clock.now(), detail=detail))
        await self._performer.finish()
        while self._firsts:
            await asyncio.wait(set(self._firsts))

    def handle(self, event: Event) -> None:
        """Give the core an event and do what it wants; what is slow goes on in the background."""
        self._performer.handle(event)

    async def turn(self, local: str) -> None:
        """Return when a sandbox that is being stopped, or let go on, has got there, or has ended.

        Raises:
            DsecError: why it could not be done.
        """
        await self._performer.turn(local)


def local_of(request: Request[Any]) -> str:
    """Return the sandbox's local id in ``dsec.v1.<project>.sandbox.<node>.<local>.<verb>``."""
    return subjects.validate_local(request.tokens[5])


def _asked_defaults(defaults: CommandDefaults, request: CreateSandbox) -> CommandDefaults:
    if not request.cwd and not request.user:
        return defaults
    return CommandDefaults(
        env=defaults.env, cwd=request.cwd or defaults.cwd, user=request.user or defaults.user
    )
