"""Carries out one creation: performs the core's effects one after the other."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Final, assert_never

import structlog

from dsec_common import subjects
from dsec_common.bus import Bus, ReplyAddress
from dsec_common.clock import Clock
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import new_id
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeaseReleased, ReleaseLease
from dsec_common.wire.node import PlaceSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    InspectSandbox,
    SandboxCreated,
    SandboxInfo,
    SandboxState,
)
from dsec_scheduler import effects as fx
from dsec_scheduler import events as ev
from dsec_scheduler import metrics
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.errors import NodeLostError
from dsec_scheduler.ledger import Claim
from dsec_scheduler.state import SchedulerState

_log: Final = structlog.get_logger(__name__)

_BROKER_TIMEOUT_S: Final = 2.0
_RESOLVE_TIMEOUT_S: Final = 1.0
_RESOLVE_PAUSE_S: Final = 0.1
#: After these the node may have made the sandbox: its answer may have been lost on the way.
_UNANSWERED: Final = frozenset({ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE})
#: With these the node itself says that it has no such sandbox.
_NOT_THERE: Final = frozenset({ErrorCode.NOT_FOUND, ErrorCode.EXPIRED})


class Placer:
    """Finds a node for each request and has it make the sandbox."""

    def __init__(
        self, bus: Bus, core: SchedulerState, clock: Clock, config: SchedulerConfig
    ) -> None:
        self._bus = bus
        self._core = core
        self._clock = clock
        self._config = config
        self._ids = itertools.count(1)
        # What waits for a node ends early when the node falls silent or is started again.
        self._waits: dict[str, set[asyncio.Timeout]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        # When this process was last known to hear nobody; a start begins with hearing all.
        self._deaf_at = -math.inf

    async def create(
        self,
        project: str,
        request: CreateSandbox,
        timeout_s: float,
        caller: ReplyAddress,
        claim: Claim | None = None,
    ) -> fx.Succeed:
        """Return once a node has made the sandbox.

        Args:
            project: whose it is.
            request: checked.
            timeout_s: how long it may take.
            caller: whom the node answers; nobody when its subject is empty.
            claim: told of each attempt before its node is.

        Raises:
            DsecError: why there is none.
            ClaimLostError: ``claim`` was lost; nothing was made.
        """
        create_id = next(self._ids)
        event: ev.Event = ev.CreateAsked(
            create_id=create_id,
            project=project,
            request=request,
            local=new_id(),
            timeout_s=timeout_s,
            at=self._now(),
        )
        while True:
            following: ev.Event | None = None
            for effect in self._core.handle(event):
                if isinstance(effect, fx.Succeed):
                    return effect
                if isinstance(effect, fx.Refuse):
                    raise effect.error
                result = await self._perform(effect, project, request, caller, claim)
                following = result or following
            if following is None:
                raise DsecError(ErrorCode.INTERNAL, f"creation {create_id} came to no end")
            event = following

    async def _perform(
        self,
        effect: fx.Step,
        project: str,
        request: CreateSandbox,
        caller: ReplyAddress,
        claim: Claim | None,
    ) -> ev.Event | None:
        """Do what the core wants done and return what came of it."""
        match effect:
            case fx.TakeLease():
                return await self._take_lease(project, request, effect)
            case fx.Place():
                if claim is not None:
                    await self._announce(claim, effect)
                return await self._place(project, request, caller, effect)
            case fx.Resolve():
                found = await self.resolve(
                    project,
                    request,
                    ScopedId(effect.node, effect.local),
                    effect.lease_id,
                    valid_until=effect.valid_until,
                )
                return ev.PlaceResolved(create_id=effect.create_id, created=found, at=self._now())
            case fx.ReleaseLease():
                self._release_later(effect.lease_id)
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
                    self._release_later(effect.lease_id)
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
            valid_until=attempt.valid_until,
            lease_id=attempt.lease_id,
            caller_content_type=caller.content_type,
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

    async def _ask_node(
        self, node: str, message: PlaceSandbox, timeout_s: float, caller: ReplyAddress
    ) -> SandboxCreated:
        waits = self._waits.setdefault(node, set())
        subject = subjects.node_request(node, "place")
        scope = asyncio.timeout(None)
        try:
            async with scope:
                waits.add(scope)
                return await self._bus.request(
                    subject, message, SandboxCreated, timeout_s=timeout_s, caller=caller
                )
        except TimeoutError as error:
            raise NodeLostError(node) from error
        finally:
            waits.discard(scope)
            if not waits:
                self._waits.pop(node, None)

    def end_waits_for_silent_nodes(self) -> None:
        """Stop waiting for nodes whose heartbeats have stopped; to be called now and then."""
        for node in self._waits:
            if self._is_silent(node):
                self.end_waits(node)

    def end_waits(self, node: str) -> None:
        """Stop waiting for a node that cannot know any more what it was asked."""
        loop = asyncio.get_running_loop()
        for scope in self._waits.get(node, ()):
            scope.reschedule(loop.time())

    def _is_silent(self, node: str) -> bool:
        """Return whether a node's heartbeats have stopped, and not our hearing them."""
        now = self._now()
        if not self._bus.connected:
            self._deaf_at = now.monotonic_s
        heard_all_s = now.monotonic_s - self._deaf_at
        return heard_all_s > self._config.node_timeout_s and self._core.is_silent(node, now)

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
        nobody's. It is given up when its node has fallen silent, for its sandboxes end with it, or
        when its placement has lapsed and the node does not answer all the same.
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
        if info.state is not SandboxState.RUNNING:
            return None, info.state is not SandboxState.CREATING
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

    # --- The broker ---------------------------------------------------------------------------

    async def _take_lease(
        self, project: str, request: CreateSandbox, effect: fx.TakeLease
    ) -> ev.LeaseTaken | ev.LeaseRefused:
        message = GrantLease(
            cause_id=request.message_id,
            project=project,
            holder=request.message_id,
            cu=effect.cu,
            node=effect.node,
            ttl_s=effect.ttl_s,
        )
        try:
            lease = await self._bus.request(
                subjects.lease("grant"), message, LeaseGranted, timeout_s=_BROKER_TIMEOUT_S
            )
        except DsecError as error:
            return ev.LeaseRefused(create_id=effect.create_id, error=error, at=self._now())
        return ev.LeaseTaken(create_id=effect.create_id, lease_id=lease.lease_id, at=self._now())

    def _release_later(self, lease_id: str) -> None:
        """Give a lease back without having the caller wait for it."""
        task = asyncio.create_task(self._release(lease_id), name=f"release {lease_id}")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, lease_id: str) -> None:
        try:
            await self._bus.request(
                subjects.lease("release"),
                ReleaseLease(lease_id=lease_id),
                LeaseReleased,
                timeout_s=_BROKER_TIMEOUT_S,
            )
        except DsecError as error:
            _log.warning("a lease is left to run out", lease=lease_id, error=str(error))

    async def finish(self) -> None:
        """Return when every lease that is to be given back has been."""
        while self._releases:
            await asyncio.wait(set(self._releases))

    def _now(self) -> ev.Moment:
        return ev.Moment(self._clock.now(), self._clock.monotonic())
