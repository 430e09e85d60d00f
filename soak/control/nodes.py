"""Nodes that make nothing: they beat, answer placements, and tell the model of each."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Final

from control_plane import NodePeer
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.compute.model import CardMode
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests
from dsec_common.wire.elastic import LeaseResized, ResizeLease
from dsec_common.wire.lease import LeaseRevoked, RevokeLease
from dsec_common.wire.node import Gpu, GpuInstance, PlaceSandbox, Resources
from dsec_common.wire.sandbox import (
    MIB,
    CreateSandbox,
    DeleteSandbox,
    SandboxCreated,
    SandboxDeleted,
)
from soak.control.model import Model

#: Names in each request's labels what it belongs to.
LABEL: Final = "request"
SANDBOX_BYTES: Final = 64 * MIB
_GIB: Final = 1 << 30
#: Sandboxes of a node: few enough for some requests to find no room.
_ROOM: Final = Resources(cpus=64.0, memory_bytes=14 * SANDBOX_BYTES, sandboxes=14)
_MAKING_S: Final = 0.06


class Node(NodePeer):
    """A node whose sandboxes are entries in a table."""

    beat_s = 0.5

    def __init__(self, bus: Bus, name: str, gpus: tuple[Gpu, ...], model: Model, seed: int) -> None:
        super().__init__(bus, name, _ROOM, gpus)
        self._model = model
        self._random = random.Random(f"{seed} {name}")  # noqa: S311  to be repeated
        self._of: dict[str, tuple[str, str]] = {}
        self.before_answer = self._take_a_while

    async def start(self) -> None:
        """Serve what a broker tells nodes, too."""
        resize, revoke = (subjects.node_request(self.name, it) for it in ("resize", "revoke"))
        await self.bus.serve(resize, ResizeLease, self._resize)
        await self.bus.serve(revoke, RevokeLease, self._revoke)
        await super().start()

    async def _take_a_while(self) -> None:
        """Be slow enough for somebody to die meanwhile."""
        await asyncio.sleep(self._random.uniform(0.0, _MAKING_S))

    async def _place(self, asked: Request[PlaceSandbox]) -> SandboxCreated | None:
        message = asked.message
        self._model.told(self.name, message.local, request_of(message.request))
        return await super()._place(asked)

    def _make(self, message: PlaceSandbox) -> SandboxCreated:
        if self.now() > message.valid_until:
            raise DsecError(ErrorCode.TIMEOUT, f"the placement on {self.name} lapsed")
        created = super()._make(message)
        request_id = request_of(message.request)
        self._of[message.local] = (request_id, message.lease_id)
        self._model.made(created.sandbox_id, request_id)
        return created

    async def _delete(self, asked: Request[DeleteSandbox]) -> SandboxDeleted:
        self._forget(subjects.scoped_id_of(asked.subject).local)
        return await super()._delete(asked)

    def end_by_itself(self, local: str) -> None:
        """Have a sandbox end by itself: only the next heartbeat tells of it."""
        self.sandboxes.pop(local, None)
        self._forget(local)

    def _forget(self, local: str) -> None:
        request_id, lease_id = self._of.pop(local, ("", ""))
        if not request_id:
            return
        self.lease_ids = tuple(it for it in self.lease_ids if it != lease_id)
        self.lease_resizes.pop(lease_id, None)
        self._model.gone(str(ScopedId(self.name, local)), request_id)

    async def _resize(self, asked: Request[ResizeLease]) -> LeaseResized:
        told = asked.message
        if told.lease_id in self.lease_ids:
            before = self.lease_resizes.get(told.lease_id, 0)
            self.lease_resizes[told.lease_id] = max(told.resizes, before)
        return LeaseResized(lease_id=told.lease_id)

    async def _revoke(self, asked: Request[RevokeLease]) -> LeaseRevoked:
        """Nobody transfers or unlocks a sandbox's lease here, so none may be taken from it."""
        lease_id, reason = asked.message.lease_id, asked.message.reason
        if lease_id in self.lease_ids:
            self._model.violate(f"lease {lease_id} was taken from a sandbox: {reason}", self.name)
        return LeaseRevoked(lease_id=lease_id)


def request_of(request: CreateSandbox) -> str:
    """Return the id of what a sandbox was asked for by: its own, or its gang's."""
    return request.labels[LABEL]


def _a100(node: str, count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            uuid=f"GPU-{node}-{at}",
            model="NVIDIA A100-SXM4-40GB",
            memory_bytes=40 * _GIB,
            island="0",
        )
        for at in range(count)
    )


def _l40(node: str, count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(uuid=f"GPU-{node}-{at}", model="NVIDIA L40", memory_bytes=48 * _GIB)
        for at in range(count)
    )


def _cut(node: str) -> tuple[Gpu, ...]:
    """Return an A100 in seven instances."""
    instances = tuple(
        GpuInstance(
            uuid=f"MIG-{node}-{at}", profile="1g.5gb", memory_bytes=5 * _GIB, compute_slices=1
        )
        for at in range(7)
    )
    return (
        Gpu(
            uuid=f"GPU-{node}-0",
            model="NVIDIA A100-SXM4-40GB",
            memory_bytes=40 * _GIB,
            mode=CardMode.MIG,
            mig=instances,
            compute_slices=7,
        ),
    )


INVENTORY: Final = {
    "node-1": _a100("node-1", 4),
    "node-2": _a100("node-2", 2),
    "node-3": _l40("node-3", 3),
    "node-4": _cut("node-4"),
    "node-5": (),
}


@contextlib.asynccontextmanager
async def nodes(nats: NatsForTests, model: Model, seed: int) -> AsyncIterator[dict[str, Node]]:
    """Yield living nodes with A100s, L40s, an A100 in instances, and one without GPUs."""
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for name, gpus in INVENTORY.items():
            bus = await stack.enter_async_context(nats.service("sandboxd", name))
            node = found[name] = Node(bus, name, gpus, model, seed)
            await node.start()
            stack.push_async_callback(node.rest)
        yield found
