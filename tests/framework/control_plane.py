"""Brokers, schedulers and nodes around one real NATS server.

The node here is a peer: it speaks a node's side of the wire protocol and makes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from dsec_broker.config import BrokerConfig
from dsec_broker.service import BrokerService
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.config import ServiceConfig
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.service import Service
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests
from dsec_common.wire.node import (
    Gpu,
    ListNodeSandboxes,
    NodeHeartbeat,
    NodeSandboxes,
    PlaceSandbox,
    Resources,
)
from dsec_common.wire.sandbox import (
    MIB,
    CreateSandbox,
    DeleteSandbox,
    EndCause,
    InspectSandbox,
    Limits,
    SandboxCreated,
    SandboxDeleted,
    SandboxInfo,
    SandboxState,
)
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.service import SchedulerService

S = TypeVar("S", bound=Service[Any])

BEAT_S = 0.1
ROOMY = Resources(cpus=1000.0, memory_bytes=1 << 40, sandboxes=1000)


def request(**changes: Any) -> CreateSandbox:
    """Return a request for a small sandbox."""
    fields: dict[str, Any] = {
        "base": "debian@12",
        "limits": Limits(memory_bytes=64 * MIB),
        "timeout_s": 5.0,
    }
    return CreateSandbox(**{**fields, **changes})


class NodePeer:
    """A node as the scheduler and the broker see one.

    Attributes:
        placed: every request to place that arrived.
        inspected: how often it was asked for a sandbox.
        refusal: raised instead of making a sandbox.
        before_answer: awaited before the caller is answered; never returning is a death.
        sandboxes: what it has made.
        ahead_s: how far its wall clock is ahead of everybody else's.
        beat_s: how often it beats.
    """

    beat_s = BEAT_S

    def __init__(self, bus: Bus, name: str, capacity: Resources, gpus: tuple[Gpu, ...]) -> None:
        self.bus = bus
        self.name = name
        self.capacity = capacity
        # A card is one node's, whatever name a test has for it.
        self.gpus = tuple(
            msgspec.structs.replace(gpu, uuid=f"{gpu.uuid} of {name}" if gpu.uuid else "")
            for gpu in gpus
        )
        self.store_id = f"store of {name}"
        self.epoch = "1"
        self.draining = False
        self.placed: list[PlaceSandbox] = []
        self.inspected = 0
        self.place_arrived = asyncio.Event()
        self.refusal: DsecError | None = None
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        self.answers_scheduler = True
        self.sandboxes: dict[str, tuple[str, SandboxInfo]] = {}
        self.lease_ids: tuple[str, ...] = ()
        self.lease_resizes: dict[str, int] = {}
        self.labels: dict[str, str] = {}
        self.ahead_s = 0.0
        self._beating: asyncio.Task[None] | None = None
        self._thaw = asyncio.Event()
        self._thaw.set()

    async def start(self) -> None:
        """Serve a node's subjects and send heartbeats."""
        bus, name = self.bus, self.name
        await bus.serve(subjects.node_request(name, "place"), PlaceSandbox, self._place)
        await bus.serve(subjects.node_request(name, "list"), ListNodeSandboxes, self._list)
        await bus.serve(
            subjects.any_project_sandbox(name, "inspect"), InspectSandbox, self._inspect
        )
        await bus.serve(subjects.any_project_sandbox(name, "delete"), DeleteSandbox, self._delete)
        await bus.flush()
        self._beating = asyncio.create_task(self._beat_for_ever())

    async def die(self) -> None:
        """Stop at once; what was asked and not answered is refused as ``unavailable``."""
        await self.stop_beating()
        await self.bus.close()

    async def freeze(self) -> None:
        """Answer nothing any more though connected, as a machine that hangs."""
        self._thaw.clear()
        await self.stop_beating()

    async def rest(self) -> None:
        """Let go of what is frozen, so that the test can end."""
        self._thaw.set()
        await self.stop_beating()

    async def stop_beating(self) -> None:
        """Send no more heartbeats."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
            self._beating = None

    def heartbeat(self) -> NodeHeartbeat:
        """Return what the node says of itself now."""
        made = [info.limits for _, info in self.sandboxes.values()]
        return NodeHeartbeat(
            sent_at=self.now(),
            node=self.name,
            epoch=self.epoch,
            store_id=self.store_id,
            capacity=self.capacity,
            allocated=Resources(
                cpus=sum(limits.cpus for limits in made),
                memory_bytes=sum(limits.memory_bytes for limits in made),
                sandboxes=len(made),
            ),
            gpus=self.gpus,
            lease_ids=self.lease_ids,
            lease_resizes=dict(self.lease_resizes),
            labels=self.labels,
            draining=self.draining,
        )

    @property
    def beats(self) -> bool:
        """Whether it sends heartbeats."""
        return self._beating is not None

    def now(self) -> float:
        """Return what its wall clock reads."""
        return time.time() + self.ahead_s

    async def beat(self) -> None:
        """Send one heartbeat."""
        await self.bus.publish(subjects.heartbeat(self.name), self.heartbeat())

    async def _beat_for_ever(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(self.beat_s)

    async def _place(self, asked: Request[PlaceSandbox]) -> SandboxCreated | None:
        message = asked.message
        self.placed.append(message)
        self.place_arrived.set()
        if self.refusal is not None:
            raise self.refusal
        if self.now() > message.valid_until:
            raise DsecError(ErrorCode.TIMEOUT, f"the placement on {self.name} lapsed")
        limits = message.request.limits
        taken = sum(info.limits.memory_bytes for _, info in self.sandboxes.values())
        if taken + limits.memory_bytes > self.capacity.memory_bytes:
            # The node has the last word: the scheduler may ask one that only seems full to it.
            raise DsecError(ErrorCode.EXHAUSTED, f"{self.name} is full", retry_after_s=0.1)
        await self._thaw.wait()
        created = self._make(message)
        if self.before_answer is not None:
            await self.before_answer()
        await self.bus.reply(asked.caller, created)
        return created if self.answers_scheduler else None

    def _make(self, message: PlaceSandbox) -> SandboxCreated:
        sandbox_id = str(ScopedId(self.name, message.local))
        created = SandboxCreated(
            sandbox_id=sandbox_id,
            node=self.name,
            created_at=1.0,
            layers=("sha256:0",),
            limits=message.request.limits,
            lease_id=message.lease_id,
        )
        if message.lease_id:
            self.lease_ids = (*self.lease_ids, message.lease_id)
        self.sandboxes[message.local] = (
            message.project,
            SandboxInfo(
                sandbox_id=sandbox_id,
                project=message.project,
                state=SandboxState.RUNNING,
                created_at=1.0,
                layers=created.layers,
                limits=created.limits,
            ),
        )
        return created

    async def _inspect(self, asked: Request[InspectSandbox]) -> SandboxInfo:
        self.inspected += 1
        await self._thaw.wait()
        local = subjects.scoped_id_of(asked.subject).local
        project, info = self.sandboxes.get(local, ("", None))
        if info is None or project != asked.project:
            raise not_found(f"no sandbox {local}")
        return info

    async def _delete(self, asked: Request[DeleteSandbox]) -> SandboxDeleted:
        local = subjects.scoped_id_of(asked.subject).local
        self.sandboxes.pop(local, None)
        placed = next((it for it in self.placed if it.local == local), None)
        if placed is not None:
            self.lease_ids = tuple(it for it in self.lease_ids if it != placed.lease_id)
        return SandboxDeleted(
            sandbox_id=str(ScopedId(self.name, local)), end_cause=EndCause.DELETED
        )

    async def _list(self, asked: Request[ListNodeSandboxes]) -> NodeSandboxes:
        found = [
            info for project, info in self.sandboxes.values() if project == asked.message.project
        ]
        return NodeSandboxes(sandboxes=tuple(found))


class ControlPlane:
    """Starts what a test asks for and stops all of it in the end."""

    def __init__(self, nats: NatsForTests, stack: contextlib.AsyncExitStack) -> None:
        self.nats = nats
        self._stack = stack
        self._nodes: list[NodePeer] = []

    async def node(
        self,
        name: str,
        capacity: Resources = ROOMY,
        gpus: tuple[Gpu, ...] = (),
        *,
        beating: bool = True,
    ) -> NodePeer:
        """Return a living node."""
        bus = await self._stack.enter_async_context(self.nats.service("sandboxd", name))
        node = NodePeer(bus, name, capacity, gpus)
        self._nodes.append(node)
        await node.start()
        self._stack.push_async_callback(node.rest)
        if not beating:
            await node.stop_beating()
        return node

    async def project(self, name: str = "default") -> Bus:
        """Return the connection of a project's user."""
        return await self._stack.enter_async_context(self.nats.project(name))

    def settings(self, role: str) -> dict[str, Any]:
        """Return the settings with which a service finds the server."""
        bus = self.nats.service_config(role)
        return {
            "nats_servers": bus.servers,
            "nats_credentials": bus.credentials_path,
            "connect_timeout_s": 10.0,
        }

    async def run(self, service: S) -> S:
        """Return the service once it is ready; it stops with the test unless it did before."""
        self._stack.push_async_callback(_stop, service)
        await service.start()
        assert service.not_ready_reason() == ""
        return service

    async def broker(self, **changes: Any) -> BrokerService:
        """Return a running broker."""
        return await self.run(BrokerService(BrokerConfig(**self.settings("broker"), **changes)))

    async def scheduler(self, **changes: Any) -> SchedulerService:
        """Return a running scheduler that has heard of the nodes that beat, and of no others."""
        quick = {"node_timeout_s": 3.0, "warm_up_s": 2 * BEAT_S, "retry_after_s": 0.1}
        config = SchedulerConfig(**self.settings("scheduler"), **{**quick, **changes})
        scheduler = await self.run(SchedulerService(config))
        for name in [node.name for node in self._nodes if node.beats]:
            # On a busy machine its heartbeat may come later than within the warm-up.
            await until(lambda name=name: scheduler._core.views.get(name) is not None)  # type: ignore[misc]
        return scheduler


async def _stop(service: Service[Any]) -> None:
    if service.state in {"stopped", "failed"}:
        return
    assert await service.stop() == 0


@contextlib.asynccontextmanager
async def control_plane(nats: NatsForTests) -> AsyncIterator[ControlPlane]:
    """Yield an empty control plane on a server; all that was started in it is stopped."""
    async with contextlib.AsyncExitStack() as stack:
        yield ControlPlane(nats, stack)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return when the condition holds; fail when it does not within ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def config_of(service: Service[Any]) -> ServiceConfig:
    """Return the service's configuration."""
    config: ServiceConfig = service.config
    return config
