"""Where requests get Compute Units: at once, or after waiting in the queues.

The shell around :class:`~dsec_scheduler.queues.WaitingRoom`. Nothing runs here while nobody waits:
the first who waits starts the rounds, and they end with the last. What waits belongs to this
process; when it dies a queued request is delivered to another, and who waits for a reply hears
nothing more and asks again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Final, assert_never

import msgspec
import structlog

from dsec_common.bus import Bus
from dsec_common.bus_intake import share_of
from dsec_common.clock import Clock
from dsec_common.compute.model import ServiceClass
from dsec_common.compute.units import prices
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.lease import GrantLease
from dsec_common.wire.sandbox import CreateSandbox
from dsec_common.wire.waiting import WaitingExplained
from dsec_scheduler import errors, metrics
from dsec_scheduler.asks import (
    Ask,
    Asked,
    LeasesRefused,
    LeasesTaken,
    RoundDue,
    Solve,
    Solved,
    TakeLeases,
    WaitingEffect,
    WaitingEvent,
    Withdrawn,
    World,
)
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.explaining import explain
from dsec_scheduler.leasing import Leasing
from dsec_scheduler.queues import WaitingRoom
from dsec_scheduler.reasons import Reasons
from dsec_scheduler.reports import Reports
from dsec_scheduler.solver import solve
from dsec_scheduler.solving.problem import DURATION_S, Problem, Solution
from dsec_scheduler.unit_books import UnitBooks
from dsec_scheduler.units import Granted

_log: Final = structlog.get_logger(__name__)

#: After these the broker may well grant the same a moment later; all else is the request's fault.
_WAITED_OUT: Final = frozenset(
    {
        ErrorCode.EXHAUSTED,
        ErrorCode.UNAVAILABLE,
        ErrorCode.TIMEOUT,
        ErrorCode.CONFLICT,
        ErrorCode.NOT_FOUND,
    }
)
#: A round without anything new is worth its time so often: what waits grows willing to pay more.
_UNCHANGED_S: Final = 1.0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants units.

    Attributes:
        request_id: by which its project knows it.
        requests: one sandbox each.
        asked_at: since when it waits, by the monotonic clock.
        may_use: whether a node may be given, its cards apart; the same for equal ``needs``.
    """

    project: str
    request_id: str
    requests: tuple[CreateSandbox, ...]
    asked_at: float
    may_use: Callable[[str], bool]
    needs: object


class UnitDesk:
    """Gives out Compute Units, one wish after another or many in a round.

    Args:
        bus: connected.
        clock: for waits, and for what leases' times are compared with.
        config: of the scheduler.
        leasing: takes leases.
        is_other: whether a node is not of the cluster's own capacity.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        config: SchedulerConfig,
        leasing: Leasing,
        is_other: Callable[[str], bool],
    ) -> None:
        self._clock = clock
        self._config = config
        self._leasing = leasing
        self._books = UnitBooks(bus, clock, prices(config.prices), is_other)
        self._room = WaitingRoom(config.queue_rules())
        self._reports = Reports(bus, clock)
        self._reasons = Reasons(clock, self._explain)
        self._ids = itertools.count(1)
        self._wishes: dict[int, tuple[Wish, asyncio.Future[tuple[Granted, ...]]]] = {}
        self._of_project: Counter[str] = Counter()
        self._grants: set[asyncio.Task[None]] = set()
        self._rounds: asyncio.Task[None] | None = None
        self._urgent = asyncio.Event()
        self._last_world: World | None = None
        self._looked_at = -math.inf
        self._news = False
        self._stopping = False
        for service_class in ServiceClass:
            count = functools.partial(self._room.count, service_class)
            metrics.WAITING.labels(service_class).set_function(count)

    @property
    def reports(self) -> Reports:
        """What other schedulers tell of what waits there."""
        return self._reports

    # --- Taking ---------------------------------------------------------------------------------

    async def take(self, wish: Wish, timeout_s: float) -> tuple[Granted, ...]:
        """Return the units of all sandboxes of a wish, in their order.

        Raises:
            DsecError: ``exhausted`` when they did not come free in time, saying why, or too many
                wait; ``conflict`` when it was cancelled; ``unavailable`` without a broker.
        """
        if self._stopping:
            raise errors.stopping()
        places = self._config.waiting_max
        if len(self._room) >= places or self._of_project[wish.project] >= share_of(
            places, wish.project
        ):
            raise errors.too_many_wait(len(self._room), self._config.retry_after_s)
        await self._books.refresh(self._config.round_interval_s)
        ask = self._ask_of(wish)
        outcome: asyncio.Future[tuple[Granted, ...]] = asyncio.get_running_loop().create_future()
        self._wishes[ask.ask_id] = (wish, outcome)
        self._of_project[wish.project] += 1
        began = self._clock.monotonic()
        granted: tuple[Granted, ...] = ()
        try:
            self._handle(Asked(ask, self._world(), began))
            self._news = True
            self._run_rounds(urgent=ask.service_class is ServiceClass.REALTIME)
            async with asyncio.timeout(timeout_s):
                granted = await outcome
        except TimeoutError:
            why = self._reasons.at_once(ask)
            raise errors.no_units(timeout_s, why, self._config.retry_after_s) from None
        finally:
            del self._wishes[ask.ask_id]
            come = outcome.done() and not outcome.cancelled() and outcome.exception() is None
            if come and not granted:
                # They came in the very moment in which nobody wanted them any more.
                self._leasing.release_later(*(it.lease_id for it in outcome.result()))
            self._of_project[wish.project] -= 1
            if not self._of_project[wish.project]:
                del self._of_project[wish.project]
            self._handle(Withdrawn(ask.ask_id))
        metrics.WAIT_SECONDS.labels(ask.service_class).observe(self._clock.monotonic() - began)
        return granted

    def _ask_of(self, wish: Wish) -> Ask:
        first = wish.requests[0]
        longest_s = max(request.ttl_s for request in wish.requests)
        return Ask(
            ask_id=next(self._ids),
            request_id=wish.request_id,
            project=wish.project,
            demands=tuple(it.gpu_demand for it in wish.requests if it.gpu_demand is not None),
            asked_at=wish.asked_at,
            service_class=first.service_class,
            priority=first.priority,
            duration_s=longest_s or DURATION_S,
            may_use=wish.may_use,
            needs=wish.needs,
        )

    def find(self, project: str, request_id: str) -> Ask | None:
        """Return what waits here under a project's request id, or None."""
        for ask_id, (wish, _) in self._wishes.items():
            if wish.request_id == request_id and wish.project == project:
                return self._room.get(ask_id)
        return None

    async def explain(self, ask: Ask) -> WaitingExplained:
        """Return why something waits, by what the broker says now.

        Raises:
            DsecError: the broker did not answer.
        """
        await self._books.refresh(0.0)
        return await self._reasons.exactly(ask)

    def _explain(self, ask: Ask) -> WaitingExplained:
        now, unix_s = self._clock.monotonic(), self._clock.now()
        return explain(ask, self._room, self._world(), now, unix_s)

    def cancel(self, project: str, request_id: str) -> bool:
        """Have a request wait no more; whoever waits for it is told ``conflict``.

        Return whether it waited: one that has just been granted its units did not.
        """
        waited = False
        for ask_id, (wish, outcome) in list(self._wishes.items()):
            if wish.request_id == request_id and wish.project == project:
                waited |= not outcome.done()
                self._fail(ask_id, errors.cancelled(request_id))
        return waited

    def stop(self) -> None:
        """Tell all who wait that they must ask another scheduler."""
        self._stopping = True
        for ask_id in list(self._wishes):
            self._fail(ask_id, errors.stopping())

    async def finish(self) -> None:
        """Return when nothing is being asked of the broker any more."""
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.wait({self._rounds})
        if self._grants:
            await asyncio.wait(set(self._grants))

    def _fail(self, ask_id: int, error: DsecError) -> None:
        _, outcome = self._wishes[ask_id]
        if not outcome.done():
            outcome.set_exception(error)

    # --- Rounds ---------------------------------------------------------------------------------

    def _run_rounds(self, *, urgent: bool) -> None:
        if urgent:
            self._urgent.set()
        if self._room.idle and (self._rounds is None or self._rounds.done()):
            self._rounds = asyncio.create_task(self._run(), name="rounds for Compute Units")
            self._rounds.add_done_callback(_tell_failure)

    async def _run(self) -> None:
        """Hold rounds until nobody waits."""
        while self._room.idle:
            began = self._clock.monotonic()
            try:
                await self._round()
            except DsecError as error:
                _log.warning("no round for Compute Units", error=str(error))
            except Exception:  # noqa: BLE001  a defect must not keep everybody waiting for ever
                _log.exception("a round for Compute Units failed")
            interval_s = self._config.round_interval_s
            if self._room.count(ServiceClass.REALTIME):
                interval_s = min(interval_s, self._config.realtime_interval_s)
            left_s = interval_s - (self._clock.monotonic() - began)
            self._urgent.clear()
            if left_s > 0:
                await self._wait_for_urgent(left_s)
            if not self._room.idle:
                # Within the loop: who comes meanwhile counts on rounds that are being held.
                await self._tell_of_none()

    async def _tell_of_none(self) -> None:
        try:
            await self._reports.tell([], self._room)
        except DsecError as error:
            _log.info("others forget by themselves what waited here", error=str(error))

    async def _wait_for_urgent(self, timeout_s: float) -> None:
        ends = (
            asyncio.create_task(self._urgent.wait(), name="something urgent"),
            asyncio.create_task(self._clock.sleep(timeout_s), name="the next round"),
        )
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def _round(self) -> None:
        await self._books.refresh(0.0)
        world, now = self._world(), self._clock.monotonic()
        unchanged = (
            self._last_world is not None
            and world.nodes == self._last_world.nodes
            and world.foreign == self._last_world.foreign
        )
        if unchanged and not self._news and now - self._looked_at < _UNCHANGED_S:
            return
        self._last_world, self._looked_at, self._news = world, now, False
        solves = self._handle(RoundDue(world, now))
        while solves:
            (problem,) = solves
            solution = await self._solve(problem)
            solves = self._handle(Solved(solution, self._clock.monotonic()))
        metrics.ROUNDS.inc()
        await self._reports.tell(self._room.heads(self._reports.HEADS_MAX), self._room)

    async def _solve(self, problem: Problem) -> Solution | None:
        began = self._clock.monotonic()
        try:
            return await asyncio.to_thread(solve, problem, self._config.solve_deadline_s)
        except Exception:  # noqa: BLE001  a defect there must not keep everybody waiting for ever
            _log.exception("the solver failed", waiting=len(problem.waiting))
            return None
        finally:
            metrics.SOLVE_SECONDS.observe(self._clock.monotonic() - began)

    def _world(self) -> World:
        return self._books.world(self._reports.foreign())

    def _handle(self, event: WaitingEvent) -> list[Problem]:
        """Let the room know; return what the solver is to be asked."""
        problems: list[Problem] = []
        for effect in self._room.handle(event):
            self._perform(effect, problems)
        return problems

    def _perform(self, effect: WaitingEffect, problems: list[Problem]) -> None:
        match effect:
            case Solve():
                problems.append(effect.problem)
            case TakeLeases():
                ask = self._room.get(effect.ask_id)
                assert ask is not None  # noqa: S101  an effect is of what waits
                self._books.taking(ask, effect.parts)
                grant = asyncio.create_task(self._grant(ask, effect), name="take leases")
                self._grants.add(grant)
                grant.add_done_callback(self._grants.discard)
            case _:
                assert_never(effect)

    async def _grant(self, ask: Ask, effect: TakeLeases) -> None:
        wish, outcome = self._wishes[ask.ask_id]
        wanted = [
            GrantLease(
                cause_id=request.message_id,
                project=ask.project,
                holder=request.message_id,
                node=part.node,
                ttl_s=self._config.attempt_timeout_s + self._config.lease_claim_s,
                demand=demand,
                service_class=ask.service_class,
                priority=ask.priority,
                slices=() if effect.makes_room else part.slices,
                agent=request.agent,
                holds_s=_longest_s(request),
            )
            for request, demand, part in zip(wish.requests, ask.demands, effect.parts, strict=True)
        ]
        try:
            granted = await self._leasing.take(wanted)
        except DsecError as error:
            self._books.taken(ask.ask_id, granted=False)
            self._news = True
            self._handle(LeasesRefused(ask.ask_id))
            if error.code not in _WAITED_OUT and not outcome.done():
                outcome.set_exception(error)
            else:
                _log.info("units were taken by another", request=ask.request_id, error=str(error))
                self._run_rounds(urgent=False)
            return
        self._books.taken(ask.ask_id, granted=True)
        if outcome.done():  # its time was over meanwhile, or it was cancelled
            self._leasing.release_later(*(it.lease_id for it in granted))
            return
        outcome.set_result(granted)
        self._handle(LeasesTaken(ask.ask_id))


def _longest_s(request: CreateSandbox) -> float:
    """Return how long a sandbox may live by what was asked for; 0 when nothing says."""
    command = request.command
    only_command_s = command.timeout_s if command is not None and request.delete_after else 0.0
    return min((limit_s for limit_s in (request.ttl_s, only_command_s) if limit_s > 0), default=0.0)


def _tell_failure(rounds: asyncio.Task[None]) -> None:
    if not rounds.cancelled() and (error := rounds.exception()) is not None:
        _log.error("the rounds for Compute Units ended", exc_info=error)
