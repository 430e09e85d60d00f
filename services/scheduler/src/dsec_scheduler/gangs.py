"""Gangs: several sandboxes, all or none.

The units of all are taken at once, by one ask of the queues, so two gangs never hold what the other
waits for. Then each is made on the node of its units; when one cannot be, the others are removed
and all units given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.wire.sandbox import CreateSandbox, DeleteSandbox, SandboxCreated, SandboxDeleted
from dsec_common.wire.waiting import GANG_MAX, CreateGang, GangCreated
from dsec_scheduler import admission
from dsec_scheduler.agents.resolving import Resolver
from dsec_scheduler.errors import bad_field
from dsec_scheduler.placer import Placer

_log: Final = structlog.get_logger(__name__)

_DELETE_TIMEOUT_S: Final = 10.0


class GangDoor:
    """Makes gangs."""

    def __init__(
        self, bus: Bus, placer: Placer, agents: Resolver, request_timeout_max_s: float
    ) -> None:
        self._bus = bus
        self._placer = placer
        self._agents = agents
        self._timeout_max_s = request_timeout_max_s

    async def create(self, asked: Request[CreateGang]) -> GangCreated:
        """Answer with all sandboxes of a gang.

        Raises:
            DsecError: why there is none: ``invalid``, or as for the first that could not be made.
        """
        gang, project = asked.message, asked.project
        requests = await self._checked(project, gang)
        granted = await self._placer.take_for_gang(
            project, gang.message_id, requests, gang.timeout_s - asked.waited_s
        )
        # Even when the caller goes: what is begun is made whole or removed.
        outcomes = await asyncio.gather(
            *(
                self._placer.create_granted(project, request, units)
                for request, units in zip(requests, granted, strict=True)
            ),
            return_exceptions=True,
        )
        made = [it for it in outcomes if isinstance(it, SandboxCreated)]
        failures = [it for it in outcomes if isinstance(it, BaseException)]
        if not failures:
            return GangCreated(cause_id=gang.message_id, sandboxes=tuple(made))
        await asyncio.gather(*(self._remove(project, it) for it in made))
        raise failures[0]

    async def _checked(self, project: str, gang: CreateGang) -> Sequence[CreateSandbox]:
        if not 1 <= len(gang.requests) <= GANG_MAX:
            rule = f"a gang has 1 to {GANG_MAX} sandboxes"
            raise bad_field("requests", len(gang.requests), rule)
        requests: list[CreateSandbox] = []
        for request in gang.requests:
            tried = msgspec.structs.replace(request, timeout_s=gang.timeout_s)
            meant = await self._agents.learn(project, tried) if tried.agent else tried
            admission.check(meant, self._timeout_max_s)
            if tried.gpu_demand is None:
                raise bad_field("gpu", None, "each sandbox of a gang wants Compute Units")
            if tried.command is not None or tried.idempotency_key or tried.snapshot:
                rule = "no sandbox of a gang has a command, a key or a snapshot of its own"
                raise bad_field("requests", tried.message_id, rule)
            requests.append(tried)
        return requests

    async def _remove(self, project: str, created: SandboxCreated) -> None:
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
