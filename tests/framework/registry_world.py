"""A scheduler's registry of agents on a real NATS, and a node that remembers what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from control_plane import ControlPlane, control_plane
from dsec.agents import Agents
from dsec.channel import Channel
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import unavailable
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.agent import AGENT_SOCKET
from dsec_common.wire.agent_node import (
    AgentRules,
    GovernNode,
    InstanceEnded,
    InstancesReported,
    InstanceStarted,
    NodeGoverned,
    ReportInstances,
)
from dsec_scheduler.service import SchedulerService

RATE: Final = {AGENT_SOCKET: 5.0}


class Node:
    """A node that holds instances, and remembers what it is told."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.name = name
        self.told: list[AgentRules] = []
        self.refuses = False

    async def start(self) -> None:
        """Listen."""
        await self.bus.serve(subjects.node_request(self.name, "govern"), GovernNode, self._govern)
        await self.bus.flush()

    async def _govern(self, request: Request[GovernNode]) -> NodeGoverned:
        if self.refuses:
            raise unavailable("this node is not well")
        self.told.append(request.message.rules)
        return NodeGoverned(instances=1)

    async def report(
        self,
        *started: str,
        ended: tuple[str, ...] = (),
        project: str = "default",
        version: str = "1",
        failed: bool = False,
        **fields: Any,
    ) -> InstancesReported:
        """Tell a scheduler what began and ended."""
        message = ReportInstances(
            node=self.name,
            started=tuple(
                InstanceStarted(
                    project=project, local=local, agent="bot", version=version, started_at=1.0
                )
                for local in started
            ),
            ended=tuple(
                InstanceEnded(project=project, local=local, failed=failed) for local in ended
            ),
            **fields,
        )
        return await self.bus.request(
            subjects.instance_report(self.name), message, InstancesReported
        )


class RegistryWorld:
    """What a test has: services, a node, and the agents of two projects."""

    def __init__(self, plane: ControlPlane, scheduler: SchedulerService) -> None:
        self.plane = plane
        self.scheduler = scheduler
        self.node: Node
        self.agents: Agents
        self.others: Agents


@asynccontextmanager
async def registry_world(**settings: Any) -> AsyncIterator[RegistryWorld]:
    """Yield a scheduler, a node without instances, and the agents of two projects."""
    async with (
        nats_for_tests(projects=("other",)) as nats,
        control_plane(nats) as plane,
        nats.service("sandboxd", "node-1") as bus,
    ):
        world = RegistryWorld(plane, await plane.scheduler(**settings))
        world.node = Node(bus, "node-1")
        await world.node.start()
        world.agents = Agents(Channel(await plane.project(), "default"))
        world.others = Agents(Channel(await plane.project("other"), "other"))
        yield world
