"""The agents' side of the daemon, put together: rules, their enforcement, and reports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.bus_types import Request
from dsec_common.wire.agent_node import GovernNode
from dsec_common.wire.consistency import SynchroniseInstance
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.node import PlaceSandbox
from dsec_common.wire.sandbox import SandboxCreated
from dsec_sandboxd.agent_socket import AgentSocketServer
from dsec_sandboxd.consistency import Consistency
from dsec_sandboxd.gate import Gate
from dsec_sandboxd.governing import Governing
from dsec_sandboxd.instance_reports import InstanceReports
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.ports import AgentSockets
from dsec_sandboxd.records import SandboxRecord


class Agents:
    """What the service knows of agents."""

    def __init__(
        self,
        bus: Bus,
        sandboxes: Sandboxes,
        gate: Gate,
        networks: Networks,
        agent_sockets: AgentSockets,
    ) -> None:
        parts = sandboxes.parts
        rates = agent_sockets if isinstance(agent_sockets, AgentSocketServer) else None
        self._bus = bus
        self._node = sandboxes.node
        self._governing = Governing(sandboxes, parts.store.database, networks, rates)
        self._reports = InstanceReports(self._node, bus, self._governing, parts.clock)
        self.consistency = Consistency(sandboxes, parts.store.database, self._governing.is_paused)
        self._governing.stands_still = self.consistency.lifted
        sandboxes.tell_lives(self._reports)
        gate.check_awake = self.check_awake
        networks.governed = self._governing.network_of
        self._governing.load()
        self.consistency.load()

    def check_awake(self, record: SandboxRecord) -> None:
        """Return if requests may have a sandbox run.

        Raises:
            DsecError: ``denied`` when a policy pauses it, or it could not be synchronised;
                ``unavailable`` while it is.
        """
        self._governing.check_awake(record)
        self.consistency.check_awake(record)

    def tool_network(self, record: SandboxRecord) -> NetworkPolicy | None:
        """Return what tools that the node runs for a sandbox may reach now; None is nothing.

        That is what its contract says, unless a policy of its agent says something else.
        """
        granted = None if record.tools is None else record.tools.network
        policy = self._governing.governance.policy(record)
        governed = None if policy is None else policy.governed_network
        return granted if granted is None or governed is None else governed

    def use_tools(self, network_changed: Callable[[SandboxRecord], None]) -> None:
        """Take what is told of each instance whose policy lets it reach something else."""
        self._governing.network_changed = network_changed

    def recovered(self, adopted: Iterable[SandboxRecord]) -> None:
        """Bring the sandboxes of an earlier daemon under the rules; it may not have got so far."""
        instances = [record for record in adopted if record.agent_version]
        for record in instances:
            self._reports.began(record)
        self.consistency.recovered(instances)

    def placing(
        self, place: Callable[[Request[PlaceSandbox]], Awaitable[SandboxCreated]]
    ) -> Callable[[Request[PlaceSandbox]], Awaitable[SandboxCreated]]:
        """Return ``place``, which learns of a placement's agent first."""

        async def placed(request: Request[PlaceSandbox]) -> SandboxCreated:
            self._governing.placing(request.message)
            return await place(request)

        return placed

    async def serve(self, spawn: Callable[[Coroutine[object, object, None], str], None]) -> None:
        """Take what schedulers say of agents, and begin to report."""
        await self._bus.serve(
            subjects.node_request(self._node, "govern"), GovernNode, self._governing.govern
        )
        await self._bus.serve(
            subjects.node_request(self._node, "synchronise"),
            SynchroniseInstance,
            self.consistency.synchronise,
        )
        spawn(self._reports.run(), "report instances")

    async def close(self) -> None:
        """Finish what is being enforced, and leave what is being synchronised."""
        await self._governing.close()
        await self.consistency.close()
