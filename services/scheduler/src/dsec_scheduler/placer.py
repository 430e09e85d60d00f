"""Carries out one creation: performs the core's effects one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Final, assert_never

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus import Bus, ReplyAddress
from dsec_common.clock import Clock
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import ErrorReply, new_id
from dsec_common.wire.node import PlaceSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    EndCause,
    InspectSandbox,
    SandboxCreated,
    SandboxInfo,
    SandboxState,
)
from dsec_scheduler import effects as fx
from dsec_scheduler import events as ev
from dsec_scheduler import metrics
from dsec_scheduler.agents.resolving import Resolver
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.errors import NodeLostError, command_not_over, outcome_lost
from dsec_scheduler.leasing import Leasing
from dsec_scheduler.ledger import Claim
from dsec_scheduler.state import SchedulerState
from dsec_scheduler.turns import LINE_SHARE, Turns
from dsec_scheduler.unit_desk import UnitDesk, Wish
from dsec_scheduler.units import Granted

_log: Final = structlog.get_logger(__name__)

_RESOLVE_TIMEOUT_S: Final = 1.0
_RESOLVE_PAUSE_S: Final = 0.1
#: In these a sandbox answers requests, if only once it wakes.
_ALIVE: Final = frozenset(
    {
        SandboxState.RUNNING,
        SandboxState.PAUSING,
        SandboxState.PAUSED,
        SandboxState.RESUMING,
    }
)
_OUTCOME_FIRST_PAUSE_S: Final = 0.01
_OUTCOME_LAST_PAUSE_S: Final = 0.5
#: After these the node may have made the sandbox: its answer may have been lost on the way.
_UNANSWERED: Final = frozenset({ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE})
#: With these the node itself says that it has no such sandbox.
_NOT_THERE: Final = frozenset({ErrorCode.NOT_FOUND, ErrorCode.EXPIRED})


class _Errand(msgspec.Struct, frozen=True):
    """A creation as the shell knows it; ``since_s`` is when it began to wait, monotonic."""

    project: str
    request: CreateSandbox
    caller: ReplyAddress
    claim: Claim | None
    since_s: float
    units: Granted | None = None


class Placer:
    """Finds a node for each request and has it make the sandbox."""

    def __init__(
        self,
        bus: Bus,
        core: SchedulerState,
        clock: Clock,
        config: SchedulerConfig,
        *,
        agents: Resolver,
        desk: UnitDesk,
        leasing: Leasing,
    ) -> None:
        self._bus = bus
        self._core = core
        self._clock = clock
        self._config = config
        self._agents = agents
        self._desk = desk
        self._leasing = leasing
        self._ids = itertools.count(1)
        # What waits for a node ends early when the node falls silent or is started again.
        self._waits: dict[str, int] = {}
        self._turns = Turns(self._in_flight_max)
        # When this process was last known to hear nobody; a start begins with hearing all.
        self._deaf_at = -math.inf
        #: Set while some node is waited for.
        self.waiting = asyncio.Event()
        bus.on_reconnect(self._note_deafness)

    async def create(
        self,
        project: str,
        request: CreateSandbox,
        timeout_s: float,
        caller: ReplyAddress,
        *,
        claim: Claim | None = None,
        waited_s: float = 0.0,
    ) -> fx.Succeed:
        """Return once a node has made the sandbox.

        Args:
            project: whose it is.
            request: checked.
            timeout_s: how long it may take.
            caller: whom the node answers; nobody when its subject is empty.
            claim: told of each attempt before its node is.
            waited_s: how long it has waited before, which counts where it waits for units.

        Raises:
            DsecError: why there is none.
            ClaimLostError: ``claim`` was lost; nothing was made.
        """
        request = self._agents.placed(project, request)
        asked_at = self._clock.monotonic()
        if request.gpu_demand is not None:
            # It may wait for long: it has its turn when its units are there.
            since_s = asked_at - waited_s
            return await self._create(_Errand(project, request, caller, claim, since_s), timeout_s)
        async with self._turns.turn(LINE_SHARE * timeout_s, self._config.retry_after_s):
            left_s = max(timeout_s - (self._clock.monotonic() - asked_at), 0.0)
            return await self._create(_Errand(project, request, caller, claim, asked_at), left_s)

    def _in_flight_max(self) -> int:
        now_s = self._clock.monotonic()
        return self._config.node_in_flight * self._core.views.open_count(now_s)

    async def _create(self, errand: _Errand, timeout_s: float, local: str = "") -> fx.Succeed:
        create_id = next(self._ids)
        event: ev.Event = ev.CreateAsked(
            create_id=create_id,
            project=errand.project,
            request=errand.request,
            local=local or new_id(),
            timeout_s=timeout_s,
            at=self._now(),
            units=errand.units,
        )
        while True:
            following: ev.Event | None = None
            for effect in self._core.handle(event):
                if isinstance(effect, fx.Succeed):
                    return effect
                if isinstance(effect, fx.Refuse):
                    raise effect.error
                result = await self._perform(effect, errand)
                following = result or following
            if following is None:
                raise DsecError(ErrorCode.INTERNAL, f"creation {create_id} came to no end")
            event = following

    async def _perform(self, effect: fx.Step, errand: _Errand) -> ev.Event | None:
        """Do what the core wants done and return what came of it."""
        match effect:
            case fx.TakeUnits():
                return await self._take_units(errand, effect)
            case fx.Place():
                if errand.claim is not None:
                    await self._announce(errand.claim, effect)
                return await self._place(errand.project, errand.request, errand.caller, effect)
            case fx.Resolve():
                found = await self.resolve(
                    errand.project,
                    errand.request,
                    ScopedId(effect.node, effect.local),
                    effect.lease_id,
                    valid_until=effect.valid_until,
                )
                return ev.PlaceResolved(create_id=effect.create_id, created=found, at=self._now())
            case fx.ReleaseLease():
                self._leasing.release_later(effect.lease_id)
                return None
            case _:
                assert_never(effect)

    async def _announce(self, claim: Claim, attempt: fx.Place) -> None:
        try:
            await claim.begin_attempt(attempt)
        except BaseException:
            abandoned = ev.CreateAbandoned(create_id=attempt.create_id, at=self._now())
            for effect in self._core.handle(abandoned):
                if isinstance(effect, fx.ReleaseLease):
                    self._leasing.release_later(effect.lease_id)
            raise

    # --- The node -----------------------------------------------------------------------------

    async def _place(
        self, project: str, request: CreateSandbox, caller: ReplyAddress, attempt: fx.Place
    ) -> ev.PlaceSucceeded | ev.PlaceRefused | ev.PlaceUnanswered:
        create_id = attempt.create_id
        message = PlaceSandbox(
            cause_id=request.message_id,
            project=project,
            local=attempt.local,
            request=request,
            valid_until=self._by_clock_of(attempt.node, attempt.valid_until),
            lease_id=attempt.lease_id,
            slices=attempt.slices,
            caller_content_type=caller.content_type,
            agent_rules=self._agents.rules(project, request),
        )
        left_s = attempt.valid_until - self._clock.now() + self._config.reply_grace_s
        metrics.ATTEMPTS.inc()
        try:
            created = await self._ask_node(attempt.node, message, left_s, caller)
        except DsecError as error:
            metrics.REFUSALS.labels(str(error.code)).inc()
            _log.info(
                "a node did not make a sandbox",
                node=attempt.node,
                local=attempt.local,
                project=project,
                error=str(error),
            )
            if error.code not in _UNANSWERED:
                return ev.PlaceRefused(create_id=create_id, error=error, at=self._now())
            return ev.PlaceUnanswered(
                create_id=create_id,
                error=error,
                at=self._now(),
                maybe_made=error.code is ErrorCode.TIMEOUT
                or bool(error.details.get(MAY_HAVE_HAPPENED, False))
                or isinstance(error, NodeLostError),
            )
        return ev.PlaceSucceeded(create_id=create_id, created=created, at=self._now())

    def _by_clock_of(self, node: str, unix_s: float) -> float:
        """Return what a node's wall clock reads when ours reads ``unix_s``, or a little less.

        One that seems late by less than the grace is: its heartbeats take a while to get here.
        """
        lag_s = self._core.views.lag_s(node)
        return unix_s if 0 <= lag_s <= self._config.reply_grace_s else unix_s - lag_s

    async def _ask_node(
        self, node: str, message: PlaceSandbox, timeout_s: float, caller: ReplyAddress
    ) -> SandboxCreated:
        self._waits[node] = self._waits.get(node, 0) + 1
        self.waiting.set()
        try:
            return await self._bus.request(
                _place_subject(node), message, SandboxCreated, timeout_s=timeout_s, caller=caller
            )
        finally:
            left = self._waits[node] - 1
            if left:
                self._waits[node] = left
            else:
                del self._waits[node]
            if not self._waits:
                self.waiting.clear()

    def end_waits_for_silent_nodes(self) -> None:
        """Stop waiting for nodes whose heartbeats have stopped; to be called now and then."""
        for node in self._waits:
            if self._is_silent(node):
                self.end_waits(node)

    def end_waits(self, node: str) -> None:
        """Stop waiting for a node that cannot know any more what it was asked."""
        self._bus.give_up(_place_subject(node), lambda: NodeLostError(node))

    def _is_silent(self, node: str) -> bool:
        """Return whether a node's heartbeats have stopped, and not our hearing them."""
        now = self._now()
        if not self._bus.connected:
            self._note_deafness()
        heard_all_s = now.monotonic_s - self._deaf_at
        return heard_all_s > self._config.node_timeout_s and self._core.is_silent(node, now)

    def _note_deafness(self) -> None:
        self._deaf_at = self._now().monotonic_s

    async def resolve(
        self,
        project: str,
        request: CreateSandbox,
        sandbox_id: ScopedId,
        lease_id: str,
        *,
        valid_until: float,
    ) -> SandboxCreated | None:
        """Return the sandbox that a node may have made, once it runs; None when it does not.

        The node is asked until it knows: a sandbox that is given up while it comes to life is
        nobody's. It is given up when its node has fallen silent, or when its placement has lapsed
        and the node does not answer all the same; should it live after all, its project lists it.
        """
        ends_at = valid_until
        asked_at = self._clock.now()
        while True:
            created, certain = await self._look(project, request, sandbox_id, lease_id)
            now = self._clock.now()
            if not self._bus.connected:
                ends_at += now - asked_at
            asked_at = now
            if certain or now > ends_at or self._is_silent(sandbox_id.owner):
                return created
            await self._clock.sleep(_RESOLVE_PAUSE_S)

    async def _look(
        self, project: str, request: CreateSandbox, sandbox_id: ScopedId, lease_id: str
    ) -> tuple[SandboxCreated | None, bool]:
        """Return the sandbox if it runs, and whether that is the node's last word."""
        try:
            info = await self._bus.request(
                subjects.sandbox(project, sandbox_id, "inspect"),
                InspectSandbox(cause_id=request.message_id),
                SandboxInfo,
                timeout_s=_RESOLVE_TIMEOUT_S,
            )
        except DsecError as error:
            _log.info("a sandbox is not there", sandbox=str(sandbox_id), error=str(error))
            return None, error.code in _NOT_THERE
        if info.state is SandboxState.CREATING:
            return None, False
        if info.state not in _ALIVE and not _has_run_its_command(request, info):
            return None, True
        created = SandboxCreated(
            cause_id=request.message_id,
            # By the node's clock: what it counted before is in its later heartbeats.
            sent_at=info.sent_at,
            sandbox_id=info.sandbox_id,
            node=sandbox_id.owner,
            created_at=info.created_at,
            layers=info.layers,
            limits=info.limits,
            lease_id=lease_id,
        )
        return created, True

    async def with_outcome(
        self, project: str, request: CreateSandbox, created: SandboxCreated, timeout_s: float
    ) -> SandboxCreated:
        """Return the answer to a request that is asked again, with what came of its command.

        The node is asked until the command has ended. What is lost is said to be lost; it is not
        run again.

        Raises:
            DsecError: ``timeout`` when it has not ended within the request's and its own time.
        """
        if request.command is None:
            return created
        deadline = self._clock.monotonic() + timeout_s + max(request.command.timeout_s, 0.0)
        subject = subjects.sandbox(project, ScopedId.parse(created.sandbox_id), "inspect")
        pause_s = _OUTCOME_FIRST_PAUSE_S
        while True:
            question = InspectSandbox(cause_id=request.message_id)
            with contextlib.suppress(DsecError):
                info = await self._bus.request(
                    subject, question, SandboxInfo, timeout_s=_RESOLVE_TIMEOUT_S
                )
                if info.first_command == "done":
                    return msgspec.structs.replace(
                        created, result=info.result, error=info.error, files=info.files
                    )
                if info.first_command != "running":
                    error = ErrorReply.of(outcome_lost(created.sandbox_id))
                    return msgspec.structs.replace(created, error=error)
            if self._clock.monotonic() >= deadline:
                raise command_not_over(created.sandbox_id, timeout_s)
            await self._clock.sleep(pause_s)
            pause_s = min(pause_s * 2, _OUTCOME_LAST_PAUSE_S)

    # --- Gangs ----------------------------------------------------------------------------------

    async def take_for_gang(
        self, project: str, request_id: str, requests: Sequence[CreateSandbox], timeout_s: float
    ) -> tuple[Granted, ...]:
        """Return units for all, taken at once, on nodes with room for the largest of them.

        Raises:
            DsecError: as :meth:`UnitDesk.take`.
        """
        limits = frozenset(request.limits for request in requests)
        wish = Wish(
            project=project,
            request_id=request_id,
            requests=tuple(requests),
            asked_at=self._clock.monotonic(),
            may_use=lambda node: all(self._core.has_room(node, it, self._now()) for it in limits),
            needs=limits,
        )
        return await self._desk.take(wish, timeout_s)

    def give_back(self, granted: Sequence[Granted]) -> None:
        """Give units back of which nothing is made."""
        self._leasing.release_later(*(it.lease_id for it in granted))

    async def create_granted(
        self,
        project: str,
        request: CreateSandbox,
        units: Granted,
        *,
        local: str,
        valid_until: float,
    ) -> SandboxCreated:
        """Make a sandbox on the node of its units, there or nowhere.

        Args:
            project: whose it is.
            request: checked.
            units: taken for it.
            local: its id on the node.
            valid_until: Unix time after which the node makes it no more.

        Raises:
            DsecError: why it was not made; its units are given back then.
        """
        try:
            request = self._agents.placed(project, request)
        except DsecError:
            self.give_back([units])
            raise
        since_s = self._clock.monotonic()
        errand = _Errand(project, request, ReplyAddress(), None, since_s, units)
        left_s = max(valid_until - self._clock.now(), 0.0)
        return (await self._create(errand, left_s, local)).created

    # --- Units ----------------------------------------------------------------------------------

    async def _take_units(
        self, errand: _Errand, effect: fx.TakeUnits
    ) -> ev.UnitsTaken | ev.UnitsRefused:
        create_id = effect.create_id
        wish = Wish(
            project=errand.project,
            request_id=errand.request.message_id,
            requests=(errand.request,),
            asked_at=errand.since_s,
            may_use=lambda node: self._core.may_take(create_id, node, self._now()),
            needs=effect.needs,
        )
        try:
            (granted,) = await self._desk.take(wish, effect.timeout_s)
        except DsecError as error:
            return ev.UnitsRefused(create_id=create_id, error=error, at=self._now())
        except asyncio.CancelledError:
            self._core.handle(ev.CreateAbandoned(create_id=create_id, at=self._now()))
            raise
        return ev.UnitsTaken(
            create_id=create_id,
            node=granted.node,
            lease_id=granted.lease_id,
            at=self._now(),
            slices=granted.slices,
        )

    def _now(self) -> ev.Moment:
        return ev.Moment(self._clock.now(), self._clock.monotonic())


def _place_subject(node: str) -> str:
    return subjects.node_request(node, "place")


def _has_run_its_command(request: CreateSandbox, info: SandboxInfo) -> bool:
    """Return whether a sandbox that is over was alive for its command: it must not run again."""
    return request.command is not None and info.end_cause is not EndCause.CREATE_FAILED
