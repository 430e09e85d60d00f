"""Users: each asks for one thing after another until it has an answer, holds it, and lets it go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from dsec import DSecClient, DsecError, ErrorCode, Limits, Sandbox
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.subjects import ScopedId
from dsec_common.wire.lease import (
    GrantLease,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    ReleaseLease,
    RenewLease,
    TransferLease,
)
from soak.control.model import Asked, Model
from soak.control.nodes import LABEL, SANDBOX_BYTES, Node

T = TypeVar("T")

#: A request that may be asked again has its answer within this time, whoever dies meanwhile.
PATIENCE_S: Final = 90.0
#: One try of a request that waits for units or room.
_TRY_S: Final = 8.0
_PAUSE_S: Final = 0.2
_BROKER_S: Final = 3.0
_HOLD_S: Final = 1.5
_DIES: Final = 0.25
_LEASE_TTL_S: Final = 30.0
#: Nothing was decided: the same may be asked again.
_UNDECIDED: Final = frozenset({ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE})
_LIMITS: Final = Limits(cpus=0.1, memory_bytes=SANDBOX_BYTES)
#: What is asked for in each class, more together than there is.
_DEMANDS: Final = {
    ServiceClass.REALTIME: (GpuDemand(min_cu=4, max_cu=5), GpuDemand(min_cu=20, max_cu=20)),
    ServiceClass.STANDARD: (
        GpuDemand(min_cu=33, max_cu=50),
        GpuDemand(min_cu=10, max_cu=10, models=("L40",)),
        GpuDemand(min_cu=100, max_cu=100, count=2, same_island=True),
    ),
    ServiceClass.BATCH: (
        GpuDemand(min_cu=7, max_cu=10),
        GpuDemand(min_cu=60, max_cu=100),
        GpuDemand(min_cu=14, max_cu=15),
    ),
}


class User:
    """Asks for things of its own choice, one at a time."""

    def __init__(
        self,
        name: str,
        *,
        client: DSecClient,
        services: Bus,
        nodes: dict[str, Node],
        model: Model,
        seed: int,
    ) -> None:
        self.name = name
        self._client = client
        self._services = services
        self._nodes = nodes
        self._model = model
        self._random = random.Random(f"{seed} {name}")  # noqa: S311  to be repeated
        self._number = 0

    async def run(self, over: asyncio.Event) -> None:
        """Go on until ``over``; what was begun is brought to its end."""
        kinds = [*_KINDS]
        while not over.is_set():
            kind = self._random.choices(kinds, weights=[_KINDS[it] for it in kinds])[0]
            try:
                await kind(self)
            except DsecError as error:
                said = f"{kind.__name__}: {error.code}: {error.message} {error.details}"
                self._model.violate(f"an answer that nothing explains: {said}", self.name)

    def _ask(self, kind: str, count: int = 1) -> Asked:
        self._number += 1
        return self._model.ask(f"{self.name}-{self._number}", kind, count)

    async def _settled(
        self, asked: Asked, ask: Callable[[], Awaitable[T]], *final: ErrorCode
    ) -> T | None:
        """Return what was asked for, asking again while nothing is decided; None if refused.

        Raises:
            DsecError: an answer that is neither.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while True:
            try:
                return await ask()
            except DsecError as error:
                if error.code in final:
                    self._model.was_refused(asked, str(error.code))
                    return None
                if error.code not in _UNDECIDED or loop.time() > deadline:
                    raise
                self._model.note(f"undecided {asked.request_id}: {error.code} {error.message}")
                self._model.again[asked.kind] += 1
            await asyncio.sleep(_PAUSE_S)

    # --- Sandboxes ----------------------------------------------------------------------------

    def _units(self) -> dict[str, Any]:
        service_class = self._random.choice([*_DEMANDS])
        demand = self._random.choice(_DEMANDS[service_class])
        return {"service_class": service_class, "gpu": demand}

    async def sandbox(self) -> None:
        """Have a sandbox without GPUs."""
        await self._sandbox("sandbox", {})

    async def units(self) -> None:
        """Have a sandbox with Compute Units."""
        wanted = self._units()
        await self._sandbox(str(wanted["service_class"]), wanted)

    async def _sandbox(self, kind: str, wanted: dict[str, Any]) -> None:
        asked = self._ask(kind)

        async def ask() -> Sandbox:
            return await self._client.create_sandbox(
                "debian@12",
                limits=_LIMITS,
                labels={LABEL: asked.request_id},
                idempotency_key=asked.request_id,
                request_id=asked.request_id,
                timeout_s=_TRY_S,
                **wanted,
            )

        sandbox = await self._settled(asked, ask, ErrorCode.EXHAUSTED)
        if sandbox is not None:
            self._model.was_granted(asked, sandbox.id)
            await self._hold()
            await self._let_go(sandbox)

    async def queued(self) -> None:
        """Have a sandbox through the durable queue; it is asked for once."""
        await self._queued("queued", {})

    async def queued_units(self) -> None:
        """Have a sandbox with Compute Units through the durable queue."""
        await self._queued("queued-units", self._units())

    async def _queued(self, kind: str, wanted: dict[str, Any]) -> None:
        asked = self._ask(kind)
        sandbox = await self._client.queue_sandbox(
            "debian@12",
            limits=_LIMITS,
            labels={LABEL: asked.request_id},
            request_id=asked.request_id,
            timeout_s=PATIENCE_S,
            **wanted,
        )
        self._model.was_granted(asked, sandbox.id)
        await self._hold()
        await self._let_go(sandbox)

    async def gang(self) -> None:
        """Have several sandboxes or none."""
        wanted = {**self._units(), "gpu": GpuDemand(min_cu=10, max_cu=20)}
        asked = self._ask("gang", self._random.randint(2, 4))

        async def ask() -> list[Sandbox]:
            return await self._client.create_gang(
                "debian@12",
                asked.count,
                timeout_s=_TRY_S,
                limits=_LIMITS,
                labels={LABEL: asked.request_id},
                idempotency_key=asked.request_id,
                request_id=asked.request_id,
                **wanted,
            )

        sandboxes = await self._settled(asked, ask, ErrorCode.EXHAUSTED)
        if sandboxes is not None:
            self._model.was_granted(asked, *(it.id for it in sandboxes))
            await self._hold()
            await asyncio.gather(*map(self._let_go, sandboxes))

    async def _hold(self) -> None:
        await asyncio.sleep(self._random.expovariate(1 / _HOLD_S))

    async def _let_go(self, sandbox: Sandbox) -> None:
        if self._random.random() < _DIES:
            self._model.died += 1
            found = ScopedId.parse(sandbox.id)
            self._nodes[found.owner].end_by_itself(found.local)
        else:
            await sandbox.delete()

    # --- Leases -------------------------------------------------------------------------------

    async def lease(self) -> None:
        """Have a lease without a sandbox, as services may, and perhaps hand it on."""
        asked = self._ask("lease")
        wanted = self._units()
        first = GrantLease(
            project="default",
            holder=asked.request_id,
            demand=wanted["gpu"],
            service_class=wanted["service_class"],
            ttl_s=_LEASE_TTL_S,
        )
        granted = await self._settled(asked, self._broker("grant", first), ErrorCode.EXHAUSTED)
        if granted is None:
            return
        lease = granted
        await self._hold()
        renewal = RenewLease(lease_id=lease.lease_id, ttl_s=_LEASE_TTL_S)
        await self._settled(asked, self._broker("renew", renewal, LeaseRenewed))
        if self._random.random() < _DIES:
            moving = TransferLease(
                lease_id=lease.lease_id, holder=f"{asked.request_id}-next", ttl_s=_LEASE_TTL_S
            )
            moved = await self._settled(asked, self._broker("transfer", moving))
            assert moved is not None
            if moved.token <= lease.token:
                self._model.violate(f"{lease} was handed on as {moved}", asked.request_id)
            lease = moved
        release = ReleaseLease(lease_id=lease.lease_id)
        await self._settled(asked, self._broker("release", release, LeaseReleased))
        self._model.answered(asked, f"granted {granted.lease_id} {granted.token}")
        self._model.granted[asked.kind] += 1

    def _broker(
        self, verb: str, message: Any, reply_type: type[Any] = LeaseGranted
    ) -> Callable[[], Awaitable[Any]]:
        """Return how to ask brokers: the same message each time."""

        async def ask() -> Any:
            subject = subjects.lease(verb)
            return await self._services.request(subject, message, reply_type, timeout_s=_BROKER_S)

        return ask


#: What users do, and how often.
_KINDS: Final[dict[Callable[[User], Awaitable[None]], int]] = {
    User.sandbox: 4,
    User.queued: 2,
    User.units: 6,
    User.queued_units: 2,
    User.gang: 2,
    User.lease: 2,
}
