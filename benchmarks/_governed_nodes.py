"""Nodes that hold instances of an agent and make none: a process of their own.

Each has a connection, heartbeats, and the daemon's own code that keeps rules, brings instances
under them and reports those; what the kernel would do of it is left out.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import uvloop

from dsec_common import subjects
from dsec_common.bus import Bus, BusConfig
from dsec_common.clock import SystemClock
from dsec_common.errors import not_found
from dsec_common.logging import configure_logging
from dsec_common.wire.agent_node import GovernNode
from dsec_common.wire.network import NetworkInfo, NetworkPhase, NetworkPolicy
from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.sandbox import Limits, SandboxState
from dsec_sandboxd.governing import Governing
from dsec_sandboxd.instance_reports import InstanceReports
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state_database import StateDatabase


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to be: a configuration of the bus for each node, and what they hold."""

    buses: dict[str, BusConfig]
    agent: str
    version: str
    instances: int


class _Held:
    """The instances of one node, in place of its sandboxes."""

    def __init__(self, node: str, plan: Plan) -> None:
        self.node = node
        self.draining = False
        self.state = self
        self.parts = SimpleNamespace(clock=SystemClock())
        self.records = {
            local: SandboxRecord(
                local=local,
                project="default",
                placement_id=local,
                request_id=local,
                state=SandboxState.RUNNING,
                created_at=1.0,
                layer_references=("base@1",),
                layer_digests=("sha256:0",),
                limits=Limits(),
                agent=plan.agent,
                agent_version=plan.version,
            )
            for local in (f"i{number:06}" for number in range(plan.instances))
        }

    def is_living(self, local: str) -> bool:
        """Return whether it is there."""
        return local in self.records

    def find(self, _project: str, local: str) -> SandboxRecord:
        """Return a record."""
        if local not in self.records:
            raise not_found("no such sandbox")
        return self.records[local]


class _Networks:
    """Sandboxes' networks, of which none is there."""

    def is_touched_by(self, _record: SandboxRecord, _policy: NetworkPolicy) -> bool:
        """Return whether a policy changes anything for a sandbox."""
        return False

    async def set_policy(self, record: SandboxRecord, policy: NetworkPolicy) -> NetworkInfo:
        """Put a sandbox under another policy."""
        return NetworkInfo(sandbox_id=record.local, phase=NetworkPhase.AGENT, policy=policy)

    async def take_away(self, _record: SandboxRecord) -> None:
        """Leave a sandbox without a network, which it is."""


class _Rates:
    """Limits the rates of agent sockets that nobody has opened."""

    def __init__(self) -> None:
        self.per_s: dict[str, float | None] = {}

    def limit_rate(self, local: str, per_s: float | None) -> None:
        """Let a sandbox ask so often."""
        self.per_s[local] = per_s


async def _node(name: str, plan: Plan, database: StateDatabase) -> None:
    async with await Bus.connect(plan.buses[name]) as bus:
        held, clock = _Held(name, plan), SystemClock()
        stand_in: Any = held
        governing = Governing(stand_in, database, networks=_Networks(), rates=_Rates())
        reports = InstanceReports(name, bus, governing, clock)
        for record in held.records.values():
            reports.began(record)
        await bus.serve(subjects.node_request(name, "govern"), GovernNode, governing.govern)
        await bus.flush()
        async with asyncio.TaskGroup() as group:
            group.create_task(reports.run())
            group.create_task(_beat(bus, name, plan.instances))


async def _beat(bus: Bus, name: str, held: int) -> None:
    room = Resources(cpus=200.0, memory_bytes=1 << 40, sandboxes=3200)
    allocated = Resources(cpus=float(held), memory_bytes=held << 28, sandboxes=held)
    while True:
        beat = NodeHeartbeat(node=name, epoch="1", capacity=room, allocated=allocated)
        await bus.publish(subjects.heartbeat(name), beat)
        await asyncio.sleep(1.0)


async def _nodes(plan: Plan) -> None:
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as directory:
        database = StateDatabase(Path(directory) / "records")
        try:
            async with asyncio.TaskGroup() as group:
                for name in plan.buses:
                    group.create_task(_node(name, plan, database))
        finally:
            database.close()


def _main(encoded: bytes, alive: Connection) -> None:
    async def until_left() -> None:
        nodes = asyncio.create_task(_nodes(msgspec.msgpack.decode(encoded, type=Plan)))
        left = asyncio.create_task(asyncio.to_thread(_closed, alive))
        await asyncio.wait({nodes, left}, return_when=asyncio.FIRST_COMPLETED)
        nodes.cancel()
        await asyncio.gather(nodes, return_exceptions=True)

    configure_logging("bench", level="error")
    uvloop.run(until_left())


def _closed(alive: Connection) -> None:
    try:
        alive.recv()
    except EOFError:
        return


class GovernedNodes:
    """The process; a context that ends it."""

    def __init__(self, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        theirs, self._ours = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_main, args=(msgspec.msgpack.encode(plan), theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        """Run until the end of the context."""
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
