"""The node daemon's shell: connects its parts, subscribes them, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
from importlib.metadata import version
from typing import ClassVar, Final

import structlog

from dsec_common import subjects
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log import KafkaConfig, LogConfig, LogProducer
from dsec_common.service import Service
from dsec_common.wire.base import new_id
from dsec_common.wire.layer import (
    ImportLayer,
    InspectLayer,
    ListLayers,
    RemoveLayer,
    UploadLayerChunk,
)
from dsec_common.wire.node import (
    ListNodeSandboxes,
    NodeHeartbeat,
    PlaceSandbox,
    Resources,
)
from dsec_common.wire.sandbox import (
    DeleteSandbox,
    ExecCommand,
    InspectSandbox,
    ListDirectory,
    MakeDirectory,
    ReadFile,
    StatFile,
    WriteFile,
)
from dsec_sandboxd.admission import LimitMaxima, NodeRules
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.agent_socket import AgentSocketServer
from dsec_sandboxd.commands import Commands
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.events import DrainBegan
from dsec_sandboxd.files import Files
from dsec_sandboxd.inventory import Inventory, find_gpus
from dsec_sandboxd.kernel.interface import Kernel, KernelFacts
from dsec_sandboxd.layer_cache import LayerCache
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.store import LayerStore
from dsec_sandboxd.layers_door import LayersDoor
from dsec_sandboxd.lifecycle import Parts, Sandboxes
from dsec_sandboxd.making import Maker
from dsec_sandboxd.ports import AgentSockets
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.run_directory import RunDirectory
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

_log: Final = structlog.get_logger(__name__)

_VERSION: Final = version("dsec")
_TICK_S: Final = 0.25
_FLUSH_TIMEOUT_S: Final = 2.0
#: Of the time a stop may take, what running commands get before their sandboxes end.
_COMMANDS_SHARE: Final = 0.6


class SandboxdService(Service[SandboxdConfig]):
    """One node. Exactly one process per node name may run."""

    name: ClassVar[str] = "sandboxd"

    def __init__(
        self,
        config: SandboxdConfig,
        clock: Clock | None = None,
        *,
        kernel: Kernel | None = None,
        agent_sockets: AgentSockets | None = None,
    ) -> None:
        """Take the configuration; tests may bring their own kernel and agent sockets."""
        super().__init__(config, clock)
        self.node = config.node_name
        self._given_kernel = kernel
        self._given_agent_sockets = agent_sockets
        self._epoch = new_id()
        self._inventory = Inventory()
        self._opened = contextlib.AsyncExitStack()
        self._recovered = False
        self._log_producer: LogProducer | None = None

    def bus_name(self) -> str:
        """Return the name of the connection, with the node's."""
        return f"{self.name}:{self.node}"

    # --- Starting -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Probe the kernel, open the StateDB, the layer store and the log; put the parts together.

        Raises:
            DsecError: ``unsupported`` when the host cannot confine a sandbox; ``unavailable`` when
                another daemon of this node runs.
        """
        config, stack = self.config, self._opened
        store = RecordStore(config.state_path / "records")
        stack.callback(store.close)
        kernel = self._given_kernel or _linux_kernel(config)
        stack.push_async_callback(kernel.close)
        self._facts = await kernel.start()
        _refuse_without_essentials(self._facts)
        layers = LayerStore(config.layers_path, clock=self.clock)
        await layers.open()
        stack.push_async_callback(layers.close)
        holds = LayerHolds(kernel, config.layers_idle_max)
        stack.push_async_callback(holds.close)
        self._layers = layers
        self._gpus, self._no_gpus = find_gpus()
        self._state = NodeState(self._rules())
        self._steps = StepLog(self.node, await self._open_log(), f"sandboxd-{self._epoch}")
        self._events = EventPublisher(self.bus)
        agent_sockets = self._given_agent_sockets or self._agent_socket_server()
        directories = RunDirectory(config.run_path)
        stack.callback(directories.close)
        directories.open()
        maker = Maker(kernel, holds, agent_sockets, directories)
        self._sandboxes = Sandboxes(
            self._state,
            Parts(
                kernel=kernel,
                store=store,
                events=self._events,
                steps=self._steps,
                layers=LayerCache(layers),
                memory=self._inventory,
                replier=self.bus,
                clock=self.clock,
                maxima=LimitMaxima(pids=config.pids_max, inodes=config.inodes_max),
            ),
            maker,
        )
        self._commands = Commands(
            self._state, kernel, self._steps, timeout_max_s=config.exec_timeout_max_s
        )
        self._files = Files(
            self._state, kernel, self._steps, self.clock, idle_s=config.upload_idle_s
        )
        maker.on_end(self._files)
        self._door = LayersDoor(
            self.node,
            layers,
            holds,
            events=self._events,
            clock=self.clock,
            directory=config.state_path / "uploads",
            upload_max_bytes=config.layer_upload_max_bytes,
            disk_reserve_bytes=config.disk_reserve_bytes,
            uploads_max=config.layer_uploads_max,
            imports_max=config.layer_imports_max,
            idle_s=config.upload_idle_s,
        )
        self._door.open()
        stack.callback(self._door.close)
        await self.bus.register(
            "dsec-sandboxd", _VERSION, "Sandboxes, commands, files and layers of one node"
        )

    def _agent_socket_server(self) -> AgentSockets:
        gateway = ChronusGateway(self.bus, self._steps, self.node, self.clock)
        server = AgentSocketServer(gateway, self.node, clock=self.clock)
        self._opened.push_async_callback(server.aclose)
        return server

    async def _open_log(self) -> LogProducer | None:
        if not self.config.kafka_bootstrap:
            _log.warning("no behaviour log: kafka_bootstrap is not set")
            return None
        producer = LogProducer(
            LogConfig(
                kafka=KafkaConfig(bootstrap_servers=self.config.kafka_bootstrap),
                spool_directory=str(self.config.spool_path),
                spool_max_bytes=self.config.log_spool_max_bytes,
            ),
            f"sandboxd-{self.node}",
        )
        await producer.start()
        self._opened.push_async_callback(producer.stop)
        self._log_producer = producer
        return producer

    def _rules(self) -> NodeRules:
        config = self.config
        sandboxes_max = min(config.sandboxes_max, self._facts.sandboxes_max)
        physical = self._inventory.physical(sandboxes_max)
        return NodeRules(
            node=self.node,
            physical=physical,
            capacity=Resources(
                cpus=physical.cpus * config.cpu_oversubscription,
                memory_bytes=int(physical.memory_bytes * config.memory_oversubscription),
                sandboxes=sandboxes_max,
            ),
            memory_reserve_bytes=config.memory_reserve_bytes,
            ended_kept_s=config.ended_kept_s,
            ended_kept_max=config.ended_kept_max,
        )

    async def recover(self) -> None:
        """Remove what an earlier daemon left, and tell the end of each sandbox it had."""
        await self._sandboxes.recover()
        self._recovered = True

    async def subscribe(self) -> None:
        """Take requests from services and projects; say that this node is there."""
        bus, node, sandboxes = self.bus, self.node, self._sandboxes
        many = 4 * self.config.sandboxes_max

        await bus.serve(
            subjects.node_request(node, "place"), PlaceSandbox, sandboxes.place, max_pending=many
        )
        await bus.serve(subjects.node_request(node, "list"), ListNodeSandboxes, sandboxes.list)

        def verb(name: str) -> str:
            return subjects.any_project_sandbox(node, name)

        # A command holds its place for as long as it runs, so there are places for all of them.
        await bus.serve(verb("exec"), ExecCommand, self._commands.exec, concurrency=many)
        await bus.serve(verb("inspect"), InspectSandbox, sandboxes.inspect)
        await bus.serve(verb("delete"), DeleteSandbox, sandboxes.delete, concurrency=many)
        files = self._files
        await bus.serve(verb("read_file"), ReadFile, files.read_file, max_pending=many)
        # The last piece of a file waits for the others, each of which needs a place too.
        await bus.serve(verb("write_file"), WriteFile, files.write_file, concurrency=many)
        await bus.serve(verb("stat_file"), StatFile, files.stat_file)
        await bus.serve(verb("list_directory"), ListDirectory, files.list_directory)
        await bus.serve(verb("make_directory"), MakeDirectory, files.make_directory)

        def layer(name: str) -> str:
            return subjects.any_project_layer(node, name)

        await bus.serve(layer("upload"), UploadLayerChunk, self._door.upload)
        await bus.serve(layer("import"), ImportLayer, self._door.import_layer)
        await bus.serve(layer("list"), ListLayers, self._door.list)
        await bus.serve(layer("inspect"), InspectLayer, self._door.inspect)
        await bus.serve(layer("remove"), RemoveLayer, self._door.remove)

        self.spawn(self._events.run(), "publish events")
        self.spawn(sandboxes.watch_ended(), "watch sandboxes")
        self.spawn(self._tick(), "tick")
        self.spawn(self._beat(), "heartbeat")

    # --- Running ------------------------------------------------------------------------------

    def readiness(self) -> str:
        """Return what this node lacks, or the empty string.

        Without Kafka it works on, and what it has to log waits in its spool, which is bounded.
        """
        if self._state.draining:
            return "the node is draining"
        if self._log_producer is not None and not self._log_producer.connected:
            return "Kafka is not connected; reconnecting, and the behaviour log is spooled"
        return ""

    async def _tick(self) -> None:
        while True:
            await self.clock.sleep(_TICK_S)
            self._sandboxes.tick()
            self._door.remove_idle()
            await self._files.remove_idle()

    async def _beat(self) -> None:
        while True:
            await self._publish_heartbeat()
            await self.clock.sleep(self.config.heartbeat_interval_s)

    async def _publish_heartbeat(self) -> None:
        # While NATS is away nobody hears it anyway; the next one comes in a second.
        with contextlib.suppress(DsecError):
            await self.bus.publish(subjects.heartbeat(self.node), self.heartbeat())

    def heartbeat(self) -> NodeHeartbeat:
        """Return what this node has and what it has given out, now."""
        rules = self._state.rules
        missing = dict.fromkeys(self._facts.missing, "this kernel lacks it")
        if self._no_gpus:
            missing["gpu"] = self._no_gpus
        return NodeHeartbeat(
            node=self.node,
            epoch=self._epoch,
            store_id=self._layers.store_id,
            capacity=rules.capacity,
            allocated=self._state.allocated,
            physical=rules.physical,
            memory_bytes_available=self._inventory.memory_bytes_available(),
            gpus=self._gpus,
            lease_ids=self._state.lease_ids,
            labels=self.config.labels,
            version=_VERSION,
            draining=self._state.draining,
            missing=missing,
        )

    # --- Stopping -----------------------------------------------------------------------------

    async def quiesce(self) -> None:
        """Refuse new work, let commands finish for a while, end every sandbox and tell of it."""
        if not self._recovered:
            return
        timeout_s = self.config.drain_timeout_s
        self._sandboxes.handle(DrainBegan(now=self.clock.now()))
        await self._publish_heartbeat()
        if not await self._commands.finished(timeout_s * _COMMANDS_SHARE):
            _log.warning("commands_cut_short")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._sandboxes.evacuate("the node's daemon was stopped")
        if self.bus.connected:
            await self._events.flushed(_FLUSH_TIMEOUT_S)

    async def close(self) -> None:
        """Let go of everything, the kernel's sandboxes last but the records of them."""
        await self._opened.aclose()


def _linux_kernel(config: SandboxdConfig) -> Kernel:
    from dsec_sandboxd.kernel.linux import LinuxKernel  # noqa: PLC0415  needs Linux and root

    return LinuxKernel(config.node_name)


#: Without these, limits would be promises only, so the daemon does not start.
ESSENTIAL_FEATURES: Final = frozenset({"unified", "memory", "cpu", "pids"})


def _refuse_without_essentials(facts: KernelFacts) -> None:
    lacking = sorted(ESSENTIAL_FEATURES & set(facts.missing))
    if lacking:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            f"this host (Linux {facts.kernel_release}, cgroups {facts.cgroup_layout}) cannot "
            f"enforce {', '.join(lacking)}, so its sandboxes would have no limits; enable these "
            "cgroup controllers",
            details={"missing": ",".join(lacking)},
        )
