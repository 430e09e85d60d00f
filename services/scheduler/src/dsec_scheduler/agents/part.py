"""The agents' part of the scheduler, put together."""

from __future__ import annotations

from collections.abc import Callable

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.retry import until_available
from dsec_common.wire.agent import (
    InspectAgent,
    ListAgents,
    ListInstances,
    PushPolicy,
    RegisterAgent,
    RemoveAgent,
    RevokePermission,
    UpdateAgents,
    UploadPackage,
)
from dsec_common.wire.agent_node import ReportInstances
from dsec_scheduler.agents.door import AgentDoor
from dsec_scheduler.agents.governor import Governor
from dsec_scheduler.agents.packages import BUCKET, Packages
from dsec_scheduler.agents.registry import Registry
from dsec_scheduler.config import SchedulerConfig


class AgentPart:
    """What the service knows of agents, besides how requests that name one are meant."""

    def __init__(self, bus: Bus, door: AgentDoor, governor: Governor) -> None:
        self._bus = bus
        self._door = door
        self._governor = governor

    @classmethod
    async def open(
        cls,
        bus: Bus,
        registry: Registry,
        nodes: Callable[[], list[str]],
        clock: Clock,
        config: SchedulerConfig,
    ) -> AgentPart:
        """Return it once the store of packages is there; ``nodes`` are those heard of now."""
        bucket = await until_available(
            f"the bucket {BUCKET}",
            lambda: bus.objects(
                BUCKET, replicas=config.replicas, max_bytes=config.agent_packages_max_bytes
            ),
            clock,
        )
        governor = Governor(bus, registry, nodes, clock, config.node_forget_s)
        packages = Packages(bucket, clock, config.agent_packages_project_max_bytes)
        return cls(bus, AgentDoor(registry, governor, packages, clock, config), governor)

    async def serve(self, queue: str) -> None:
        """Open the doors of projects, and that of nodes."""
        bus, door = self._bus, self._door

        def verb(name: str) -> str:
            return subjects.any_project(f"agent.{name}")

        await bus.serve(verb("upload"), UploadPackage, door.upload, queue=queue)
        await bus.serve(verb("register"), RegisterAgent, door.register, queue=queue)
        await bus.serve(verb("list"), ListAgents, door.list_agents, queue=queue)
        await bus.serve(verb("inspect"), InspectAgent, door.inspect, queue=queue)
        await bus.serve(verb("instances"), ListInstances, door.instances, queue=queue)
        await bus.serve(verb("update"), UpdateAgents, door.update, queue=queue)
        await bus.serve(verb("remove"), RemoveAgent, door.remove, queue=queue)
        await bus.serve(verb("revoke"), RevokePermission, door.revoke, queue=queue)
        await bus.serve(verb("policy"), PushPolicy, door.policy, queue=queue)
        await bus.serve(
            subjects.INSTANCE_REPORTS, ReportInstances, self._governor.report, queue=queue
        )

    async def run(self) -> None:
        """Judge new versions as their instances end, until cancelled."""
        await self._governor.run()
