"""Gangs: several sandboxes, all or none.

The units of all are taken at once, by one ask of the queues, so two gangs never hold what the other
waits for. Then each is made on the node of its units; when one cannot be, the others are removed
and all units given back. With a key it is written down first which nodes are asked for what, so
that the next scheduler can answer for, or clear up after, one that died in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple, assert_never

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import new_id
from dsec_common.wire.sandbox import CreateSandbox, DeleteSandbox, SandboxCreated, SandboxDeleted
from dsec_common.wire.waiting import GANG_MAX, CreateGang, GangCreated
from dsec_scheduler import admission
from dsec_scheduler.agents.resolving import Resolver
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.errors import bad_field
from dsec_scheduler.idempotency import (
    AskNode,
    Begin,
    GiveUp,
    Member,
    Replay,
    RequestRecord,
    Wait,
    bucket_key,
    decide,
    gang_digest,
)
from dsec_scheduler.keyed import one_answer
from dsec_scheduler.ledger import Claim, ClaimLostError, Ledger
from dsec_scheduler.placer import Placer

_log: Final = structlog.get_logger(__name__)

_DELETE_TIMEOUT_S: Final = 10.0


class _Wanted(NamedTuple):
    """A gang that is asked for, checked."""

    project: str
    request_id: str
    requests: Sequence[CreateSandbox]


class GangDoor:
    """Makes gangs."""

    def __init__(
        self,
        bus: Bus,
        placer: Placer,
        ledger: Ledger,
        agents: Resolver,
        *,
        clock: Clock,
        config: SchedulerConfig,
    ) -> None:
        self._bus = bus
        self._placer = placer
        self._ledger = ledger
        self._agents = agents
        self._clock = clock
        self._config = config

    async def create(self, asked: Request[CreateGang]) -> GangCreated:
        """Answer with all sandboxes of a gang; with a key, with the same ones each time.

        Raises:
            DsecError: why there is none: ``invalid``, or as for the first that could not be made.
        """
        gang, project = asked.message, asked.project
        requests = await self._checked(project, gang)
        timeout_s = gang.timeout_s - asked.waited_s
        wanted = _Wanted(project, gang.message_id, requests)
        if not gang.idempotency_key:
            made = await self._make(wanted, timeout_s, None)
            return GangCreated(cause_id=gang.message_id, sandboxes=made)
        key = bucket_key(project, "gang", gang.idempotency_key)

        async def try_once(left_s: float, waited: bool) -> tuple[SandboxCreated, ...] | None:
            return await self._try_once(wanted, key, left_s, waited=waited)

        made = await one_answer(try_once, timeout_s, self._clock)
        return GangCreated(cause_id=gang.message_id, sandboxes=made)

    async def _try_once(
        self, wanted: _Wanted, key: str, timeout_s: float, *, waited: bool
    ) -> tuple[SandboxCreated, ...] | None:
        """Return the gang, or None while another scheduler is at work on it."""
        digest = gang_digest(wanted.requests)
        record, revision = await self._ledger.find(key)
        claim = self._ledger.claim(key, digest, revision)
        decision = decide(record, digest, self._clock.now(), waited=waited)
        match decision:
            case Replay():
                return decision.created
            case GiveUp():
                raise decision.error.to_error()
            case Wait():
                return None
            case AskNode():
                found = await self._after_a_crash(wanted, decision.record)
                if found:
                    await claim.succeed(*found)
                    return found
            case Begin():
                pass
            case _:
                assert_never(decision)
        try:
            made = await self._make(wanted, timeout_s, claim)
        except DsecError as error:
            # While this one waited for units another may have had them.
            if await claim.is_lost():
                raise ClaimLostError from error
            await claim.fail(error)
            raise
        await claim.succeed(*made)
        return made

    async def _make(
        self, wanted: _Wanted, timeout_s: float, claim: Claim | None
    ) -> tuple[SandboxCreated, ...]:
        """Take the units of all and make all, or leave nothing."""
        project, requests = wanted.project, wanted.requests
        granted = await self._placer.take_for_gang(project, wanted.request_id, requests, timeout_s)
        members = tuple(
            Member(node=units.node, local=new_id(), lease_id=units.lease_id) for units in granted
        )
        valid_until = self._clock.now() + self._config.attempt_timeout_s
        if claim is not None:
            try:
                await claim.begin_gang(members, valid_until)
            except BaseException:
                self._placer.give_back(granted)
                raise
        # Even when the caller goes: what is begun is made whole or removed.
        outcomes = await asyncio.gather(
            *(
                self._placer.create_granted(
                    project, request, units, local=member.local, valid_until=valid_until
                )
                for request, units, member in zip(requests, granted, members, strict=True)
            ),
            return_exceptions=True,
        )
        made = tuple(it for it in outcomes if isinstance(it, SandboxCreated))
        failures = [it for it in outcomes if isinstance(it, BaseException)]
        if failures:
            await self._remove(project, made)
            raise failures[0]
        return made

    async def _after_a_crash(
        self, wanted: _Wanted, record: RequestRecord
    ) -> tuple[SandboxCreated, ...]:
        """Return the gang that a dead scheduler's nodes did make, if all of it runs.

        What there is of one that is not whole is removed.
        """
        outcomes = await asyncio.gather(
            *(
                self._placer.resolve(
                    wanted.project,
                    request,
                    ScopedId(member.node, member.local),
                    member.lease_id,
                    valid_until=record.deadline,
                )
                for request, member in zip(wanted.requests, record.members, strict=True)
            )
        )
        found = tuple(it for it in outcomes if it is not None)
        if len(found) == len(wanted.requests):
            return found
        await self._remove(wanted.project, found)
        return ()

    async def _checked(self, project: str, gang: CreateGang) -> Sequence[CreateSandbox]:
        if not 1 <= len(gang.requests) <= GANG_MAX:
            rule = f"a gang has 1 to {GANG_MAX} sandboxes"
            raise bad_field("requests", len(gang.requests), rule)
        if len(gang.idempotency_key) > admission.KEY_MAX:
            rule = f"use at most {admission.KEY_MAX} characters"
            raise bad_field("idempotency_key", gang.idempotency_key, rule)
        requests: list[CreateSandbox] = []
        for request in gang.requests:
            tried = msgspec.structs.replace(request, timeout_s=gang.timeout_s)
            meant = await self._agents.learn(project, tried) if tried.agent else tried
            admission.check(meant, self._config.request_timeout_max_s)
            if tried.gpu_demand is None:
                raise bad_field("gpu", None, "each sandbox of a gang wants Compute Units")
            if tried.command is not None or tried.idempotency_key or tried.snapshot:
                rule = "no sandbox of a gang has a command, a key or a snapshot of its own"
                raise bad_field("requests", tried.message_id, rule)
            requests.append(tried)
        return requests

    async def _remove(self, project: str, sandboxes: Sequence[SandboxCreated]) -> None:
        """Remove what must not be left of a gang."""
        await asyncio.gather(*(self._remove_one(project, it) for it in sandboxes))

    async def _remove_one(self, project: str, created: SandboxCreated) -> None:
        try:
            await self._bus.request(
                subjects.sandbox(project, ScopedId.parse(created.sandbox_id), "delete"),
                DeleteSandbox(),
                SandboxDeleted,
                timeout_s=_DELETE_TIMEOUT_S,
            )
        except DsecError as error:
            _log.warning(
                "a sandbox of a gang that was not made whole is left",
                sandbox=created.sandbox_id,
                error=str(error),
            )
