"""The network side of the daemon, put together: networks, their verbs, and ports."""

from __future__ import annotations

from collections.abc import Callable

from dsec_common.bus import Bus
from dsec_common.wire.network import (
    ClosePort,
    EnterAgentPhase,
    InspectNetwork,
    OpenPort,
    ReadPort,
    SetNetwork,
    WritePort,
)
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.gate import Guard
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.making import Maker
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.network.outgoing import Outgoing
from dsec_sandboxd.network_door import DenialSteps, NetworkDoor, settings_of
from dsec_sandboxd.ports_door import PortsDoor
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog


class Networking:
    """What the service knows of networks."""

    def __init__(
        self,
        config: SandboxdConfig,
        state: NodeState,
        kernel: Kernel,
        steps: StepLog,
        maker: Maker,
    ) -> None:
        settings = settings_of(config)
        self.networks = Networks(
            config.node_name,
            kernel,
            config.run_path / "network",
            settings,
            DenialSteps(steps),
        )
        #: The way of what the node itself asks for sandboxes.
        self.outgoing = Outgoing(self.networks, settings, config.run_path / "network" / "router")
        self._door = NetworkDoor(state, self.networks, steps)
        self._ports = PortsDoor(state, kernel, self.networks, steps)
        maker.networks = self.networks
        self.networks.is_remaking = maker.is_remaking
        self.networks.check_running = lambda one: state.running(one.project, one.local)
        maker.on_end(self._ports, self._ports.sandbox_put_back)
        maker.on_end(self.networks)
        maker.on_adoption(self.networks)

    async def serve(
        self, bus: Bus, subject_of: Callable[[str], str], inside: Guard, concurrency: int
    ) -> None:
        """Take requests; each waits for as long as it says, so there are places for many."""
        door, ports = self._door, self._ports
        await bus.serve(subject_of("inspect_network"), InspectNetwork, inside(door.inspect))
        await bus.serve(subject_of("set_network"), SetNetwork, inside(door.set))
        await bus.serve(
            subject_of("enter_agent_phase"), EnterAgentPhase, inside(door.enter_agent_phase)
        )
        await bus.serve(
            subject_of("open_port"), OpenPort, inside(ports.open), concurrency=concurrency
        )
        await bus.serve(
            subject_of("read_port"), ReadPort, inside(ports.read), concurrency=concurrency
        )
        await bus.serve(
            subject_of("write_port"), WritePort, inside(ports.write), concurrency=concurrency
        )
        await bus.serve(subject_of("close_port"), ClosePort, inside(ports.close))

    @property
    def missing(self) -> dict[str, str]:
        """What networks lack on this node, with reasons."""
        return self.networks.missing

    def tick(self) -> None:
        """Let time pass."""
        self._ports.remove_idle()

    async def close(self) -> None:
        """Let go of all connections, and of the router unless sandboxes live on."""
        await self._ports.aclose()
        await self.networks.close()
