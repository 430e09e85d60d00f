"""The node daemon's shell: connects its parts, subscribes them, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from importlib.metadata import version
from typing import ClassVar, Final

import structlog

from dsec_common import subjects
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log import KafkaConfig, LogConfig, LogProducer
from dsec_common.service import Service
from dsec_common.wire.base import new_id
from dsec_common.wire.elastic import ResizeLease, RetireNode
from dsec_common.wire.lease import RevokeLease
from dsec_common.wire.life import PatchSandbox, PauseSandbox, ResumeSandbox, TouchSandbox
from dsec_common.wire.node import (
    ListNodeSandboxes,
    NodeHeartbeat,
    PlaceSandbox,
)
from dsec_common.wire.pool import SetNodePools
from dsec_common.wire.rollout_group import ShardTaken
from dsec_common.wire.sandbox import (
    DeleteSandbox,
    InspectSandbox,
)
from dsec_sandboxd.actions.doors import Actions
from dsec_sandboxd.admission import LimitMaxima
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.agent_socket import AgentSocketServer
from dsec_sandboxd.agents import Agents
from dsec_sandboxd.calls import TaskDesk
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.discovery.equipment import Equipment
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.events import DrainBegan
from dsec_sandboxd.exec_service import ExecService
from dsec_sandboxd.files import Files
from dsec_sandboxd.first_command import FirstCommands
from dsec_sandboxd.gate import Gate
from dsec_sandboxd.gpu_metering import GpuMeters
from dsec_sandboxd.gpu_slices import gpu_devices_of
from dsec_sandboxd.housekeeping import Housekeeping
from dsec_sandboxd.inventory import Inventory
from dsec_sandboxd.kernel.interface import Kernel, KernelFacts
from dsec_sandboxd.layer_cache import LayerCache
from dsec_sandboxd.layer_service import LayerService
from dsec_sandboxd.lease_door import LeaseDoor
from dsec_sandboxd.life_doors import LifeDoors
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.making import Maker
from dsec_sandboxd.metering import Meters
from dsec_sandboxd.model_doors import ModelDoors, WithModels
from dsec_sandboxd.networking import Networking
from dsec_sandboxd.node_rules import rules_of
from dsec_sandboxd.performer import Parts
from dsec_sandboxd.pool_keeper import PoolKeeper
from dsec_sandboxd.ports import AgentSockets
from dsec_sandboxd.quick_wakes import QuickWakes
from dsec_sandboxd.reconciler import Reconciler
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.retiring import Retiring
from dsec_sandboxd.run_directory import RunDirectory
from dsec_sandboxd.shard_news import ShardNews
from dsec_sandboxd.snapshot_service import SnapshotService
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog
from dsec_sandboxd.times import Times
from dsec_sandboxd.tools.desk import ToolDesk
from dsec_sandboxd.tools.models import ModelServer
from dsec_sandboxd.tools.rates import CallRates

_log: Final = structlog.get_logger(__name__)

_VERSION: Final = version("dsec")
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
        self._equipment = Equipment(config)
        self._times = Times()
        self._opened = contextlib.AsyncExitStack()
        self._recovered = False
        self._subscribed = False
        self._keep_sandboxes = config.stop_keeps_sandboxes
        self._log_producer: LogProducer | None = None
        self._after_kernel = contextlib.AsyncExitStack()

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
        stack.push_async_callback(self._after_kernel.aclose)
        stack.push_async_callback(self._close_kernel, kernel)
        self._facts = await kernel.start()
        _refuse_without_essentials(self._facts)
        self._events = EventPublisher(self.bus)
        layers = self._layers = LayerService(
            config, kernel, self.bus, self._events, clock=self.clock
        )
        stack.push_async_callback(layers.close)
        await layers.open()
        await stack.enter_async_context(self._equipment)
        self._state = NodeState(rules_of(config, self._facts, self._inventory), self._times)
        source = f"sandboxd-{self._epoch}"
        self._steps = StepLog(self.node, await self._open_log(), source, keeper=store)
        self._shard_news = ShardNews(self.bus)
        agent_sockets = self._given_agent_sockets or self._agent_socket_server()
        directories = RunDirectory(config.run_path)
        stack.callback(directories.close)
        directories.open()
        maker = self._new_maker(kernel, agent_sockets, directories)
        self._sandboxes = Sandboxes(
            self._state,
            Parts(
                kernel=kernel,
                store=store,
                events=self._events,
                steps=self._steps,
                layers=LayerCache(layers.store),
                memory=self._inventory,
                replier=self.bus,
                clock=self.clock,
                maxima=LimitMaxima(pids=config.pids_max, inodes=config.inodes_max),
                meters=self._open_meters(kernel, store, maker),
            ),
            maker,
        )
        self._gate = Gate(self._sandboxes, stack.enter_context(QuickWakes(config.quick_wakes_s)))
        if isinstance(agent_sockets, AgentSocketServer):
            agent_sockets.count_uses(self._gate)
        self._execs = ExecService(
            config,
            self._state,
            kernel,
            self._steps,
            lambda: self._gate,
            clock=self.clock,
            run_path=config.run_path,
        )
        self._execs.open(maker)
        stack.callback(lambda: self._execs.close(keep=self._sandboxes_live_on))
        self._commands = self._execs.commands
        self._after_kernel.push_async_callback(self._commands.aclose)
        self._files = Files(
            self._state, kernel, self._steps, self.clock, idle_s=config.upload_idle_s
        )
        self._sandboxes.take_first_commands(
            FirstCommands(self._commands, self._gate, store, TaskDesk(kernel))
        )
        maker.on_end(self._files, self._files.sandbox_put_back)
        self._pools = PoolKeeper(self._sandboxes, maker, calls_max=config.pool_calls_max)
        stack.push_async_callback(self._pools.close)
        self._actions = Actions(
            self._sandboxes, maker, self._execs, layers.holds, directories, self.bus, self._gate
        )
        self._open_networks(kernel, maker, agent_sockets)
        self._actions.use_networks(self._networking.networks, maker)
        stack.push_async_callback(self._actions.close)
        self._snapshots = SnapshotService(
            config,
            self._sandboxes,
            maker,
            kernel=kernel,
            records=store,
            holds=layers.holds,
            layers=layers.store,
        )
        stack.push_async_callback(self._snapshots.close)
        self._snapshots.open()
        self._reconciler = Reconciler(
            kernel, layers.holds, directories, self._pools.is_somebodys, keepers=[layers.door]
        )
        await self.bus.register("dsec-sandboxd", _VERSION, "Sandboxes and layers of one node")

    def _new_maker(
        self, kernel: Kernel, agent_sockets: AgentSockets, directories: RunDirectory
    ) -> Maker:
        maker = Maker(kernel, self._layers.holds, agent_sockets, directories)
        maker.use_folds(self._layers.folds)
        maker.gpus = gpu_devices_of(self.config, lambda: self._equipment.sample.gpus)
        return maker

    def _open_meters(self, kernel: Kernel, store: RecordStore, maker: Maker) -> Meters:
        gpus = self._gpu_meters = GpuMeters(self.clock, self._state.find)
        interval_s = self.config.metering_interval_s
        meters = self._meters = Meters(
            self.node, kernel, self._log_producer, store.database, self.clock, interval_s, gpus
        )
        maker.on_end(meters, meters.sandbox_put_back)
        maker.on_adoption(meters)
        return meters

    def _open_networks(self, kernel: Kernel, maker: Maker, agent_sockets: AgentSockets) -> None:
        """Put together what sandboxes may reach, and the agents' policies that say so."""
        self._networking = Networking(self.config, self._state, kernel, self._steps, maker)
        self._opened.push_async_callback(self._networking.close)
        gateway = ChronusGateway(self.bus, self._steps, self.node, self.clock, self._shard_news)
        models = self._models = ModelDoors(
            kernel.network_namespace, gateway, self._gate, self.clock
        )
        self._opened.push_async_callback(models.aclose)
        maker.networks = WithModels(self._networking.networks, models)
        maker.on_end(models, models.sandbox_put_back)
        maker.on_adoption(models)
        self._agents = Agents(
            self.bus, self._sandboxes, self._gate, self._networking.networks, agent_sockets
        )
        self._opened.push_async_callback(self._agents.close)
        maker.on_end(self._agents.consistency, self._agents.consistency.sandbox_put_back)
        self._open_tools(maker, agent_sockets)

    def _open_tools(self, maker: Maker, agent_sockets: AgentSockets) -> None:
        """Have agents call tools over their sockets, by the networks' way out."""
        config = self.config
        rates = self._tool_rates = CallRates(
            self._sandboxes.parts.store.database, self.clock.monotonic
        )
        maker.on_end(rates, rates.sandbox_put_back)
        models = ModelServer(config.model_server, config.model_server_secret)
        desk = ToolDesk(
            self._networking.outgoing,
            models if config.model_server else None,
            rates,
            self.clock,
            network_of=self._agents.tool_network,
            log=self._steps.step,
        )
        self._models.admit = desk.count_model_call
        self._agents.use_tools(desk.network_changed)
        if isinstance(agent_sockets, AgentSocketServer):
            agent_sockets.run_tools(desk)

    def _agent_socket_server(self) -> AgentSockets:
        gateway = ChronusGateway(self.bus, self._steps, self.node, self.clock, self._shard_news)
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

    async def recover(self) -> None:
        """Take over the sandboxes of an earlier daemon; remove, and tell the end of, the others."""
        adopted = await self._sandboxes.recover()
        self._execs.table.recovered(self._state.is_living)
        await self._networking.networks.recovered()
        self._agents.recovered(adopted)
        self._actions.recovered(adopted)
        self._tool_rates.recovered({record.local for record in adopted})
        await self._sandboxes.finish_rollbacks()
        self._snapshots.recovered()
        self._recovered = True
        await self._reconciler.run_once()

    async def subscribe(self) -> None:
        """Take requests from services and projects; say that this node is there."""
        bus, node, sandboxes = self.bus, self.node, self._sandboxes
        many = 4 * self.config.sandboxes_max
        await bus.subscribe(subjects.SHARDS_TAKEN, ShardTaken, self._shard_news.taken)
        place = self._agents.placing(self._gate.place)
        await bus.serve(subjects.node_request(node, "place"), PlaceSandbox, place, max_pending=many)
        await bus.serve(subjects.node_request(node, "list"), ListNodeSandboxes, sandboxes.list)
        await bus.serve(subjects.node_request(node, "pools"), SetNodePools, self._pools.set)
        leases = LeaseDoor(sandboxes, self._actions)
        await bus.serve(subjects.node_request(node, "revoke"), RevokeLease, leases.revoke)
        await bus.serve(subjects.node_request(node, "resize"), ResizeLease, leases.resize)
        retiring = Retiring(sandboxes, self._publish_heartbeat)
        await bus.serve(subjects.node_request(node, "retire"), RetireNode, retiring.retire)

        def verb(name: str) -> str:
            return subjects.any_project_sandbox(node, name)

        inside = self._gate.guard
        await self._execs.serve(bus.serve, verb, inside, many)
        await self._actions.serve(bus.serve, verb, inside)
        states = self._agents.consistency
        inspect = states.inspecting(sandboxes.inspect)
        await bus.serve(verb("inspect"), InspectSandbox, inspect)
        await bus.serve(verb("delete"), DeleteSandbox, sandboxes.delete, concurrency=many)
        life = LifeDoors(
            sandboxes, self._agents.check_awake, states.paused_by_owner, states.resumed_by_owner
        )
        await bus.serve(verb("pause"), PauseSandbox, life.pause, concurrency=many)
        await bus.serve(verb("resume"), ResumeSandbox, life.resume, concurrency=many)
        await bus.serve(verb("touch"), TouchSandbox, life.touch)
        await bus.serve(verb("patch"), PatchSandbox, life.patch)
        await self._files.serve(bus, verb, inside, many)
        await self._networking.serve(bus, verb, inside, many)
        await self._snapshots.serve(bus, verb, inside, many)
        await self._agents.serve(self.spawn)
        await self._models.serve(bus, node)
        await self._layers.serve(bus)

        self._subscribed = True
        self.spawn(self._events.run(), "publish events")
        self.spawn(self._layers.upkeep.run(), "look after layers")
        self.spawn(sandboxes.watch_ended(), "watch sandboxes")
        self.spawn(self._housekeeping().run(), "keep house")
        self.spawn(self._beat(), "heartbeat")
        self.spawn(self._equipment.watch(self.clock, self._gpu_meters), "watch GPUs")
        self.spawn(self._reconciler.run(self.clock, self.config.reconcile_interval_s), "reconcile")

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

    def _housekeeping(self) -> Housekeeping:
        chores = (
            self._execs.tick,
            self._layers.door.remove_idle,
            self._files.remove_idle,
            self._pools.tick,
            self._networking.tick,
            self._meters.tick,
        )
        return Housekeeping(
            self.clock, self._times, self._sandboxes.tick, chores, lambda: self._pools.in_use
        )

    async def _beat(self) -> None:
        while True:
            await self._publish_heartbeat()
            await self.clock.sleep(self.config.heartbeat_interval_s)

    async def _publish_heartbeat(self) -> None:
        # While NATS is away nobody hears it anyway; the next one comes in a second.
        with contextlib.suppress(DsecError):
            beat = self.heartbeat()
            await self.bus.publish(subjects.heartbeat(self.node), beat)
            self._sandboxes.unnamed_leases.difference_update(beat.lease_ids)

    def heartbeat(self) -> NodeHeartbeat:
        """Return what this node has and what it has given out, now."""
        rules = self._state.rules
        missing = dict.fromkeys(self._facts.missing, "this kernel lacks it")
        missing |= self._networking.missing | self._equipment.missing
        return NodeHeartbeat(
            sent_at=self.clock.now(),  # by which schedulers know how our clock differs from theirs
            node=self.node,
            epoch=self._epoch,
            store_id=self._layers.store.store_id,
            capacity=rules.capacity,
            allocated=self._state.allocated,
            physical=rules.physical,
            memory_bytes_available=self._inventory.memory_bytes_available(),
            gpus=self._equipment.sample.gpus,
            gpu_readings=self._equipment.sample.readings,
            machine=self._equipment.machine,
            disk_bytes_available=self._equipment.disk_bytes_available,
            lease_ids=self._actions.all_leases(self._sandboxes.unnamed_leases),
            lease_resizes=self._state.lease_resizes | self._actions.lease_resizes,
            labels=self.config.labels,
            version=_VERSION,
            draining=self._state.draining,
            missing=missing,
            warm=self._pools.ready_by_key(),
        )

    # --- Stopping -----------------------------------------------------------------------------

    async def run(self) -> int:
        """Live from start to stop; SIGUSR2 stops it too, and lets the sandboxes live on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, self.request_handover)
        try:
            return await super().run()
        finally:
            loop.remove_signal_handler(signal.SIGUSR2)

    def request_handover(self) -> None:
        """Begin to stop and let the sandboxes live on, for the next daemon of this node."""
        self._keep_sandboxes = True
        self.request_stop()

    @property
    def _sandboxes_live_on(self) -> bool:
        # A start that failed half-way must not end what another attempt can take over.
        return self._keep_sandboxes or not self._subscribed

    async def _close_kernel(self, kernel: Kernel) -> None:
        await kernel.close(keep_sandboxes=self._sandboxes_live_on)

    async def quiesce(self) -> None:
        """Refuse new work, let commands finish for a while, end every sandbox and tell of it.

        Where the sandboxes are to live on, what is being made or removed is finished, no more.
        """
        if not self._recovered:
            return
        # A daemon that failed ends no sandbox, like one that was killed: the next takes over.
        self._keep_sandboxes = self._keep_sandboxes or self.failed
        timeout_s = self.config.drain_timeout_s
        self._sandboxes.handle(DrainBegan(now=self.clock.now()))
        await self._publish_heartbeat()
        if self._sandboxes_live_on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s * _COMMANDS_SHARE):
                    await self._sandboxes.settled()
            return
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
