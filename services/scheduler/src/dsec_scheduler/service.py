"""The scheduler's shell: its doors, its view of the nodes, and its ticking."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import socket
from collections.abc import Awaitable
from importlib.metadata import version
from typing import Any, ClassVar, Final

import msgspec
import structlog

from dsec_common import streams, subjects
from dsec_common.bus import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.retry import until_available
from dsec_common.service import Service
from dsec_common.wire.base import Message
from dsec_common.wire.node import NodeHeartbeat
from dsec_common.wire.pool import CallFunction, ListPools, PoolSpec, RemovePool, SetPool
from dsec_common.wire.sandbox import CreateSandbox, ListSandboxes, SandboxList
from dsec_common.wire.waiting import CreateGang
from dsec_scheduler import admission, metrics
from dsec_scheduler.agents.part import AgentPart
from dsec_scheduler.agents.registry import Registry
from dsec_scheduler.agents.resolving import Resolver
from dsec_scheduler.calls import CallDoor, request_of
from dsec_scheduler.cancelling import Cancellations, QueuedRecord
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.creation import Creation
from dsec_scheduler.dags.part import DagPart
from dsec_scheduler.errors import failed_unexpectedly, no_turn
from dsec_scheduler.events import ForgetDue, HeartbeatSeen, Moment
from dsec_scheduler.gangs import GangDoor
from dsec_scheduler.idempotency import RequestRecord, bucket_key
from dsec_scheduler.keeper import Keeper
from dsec_scheduler.leasing import Leasing
from dsec_scheduler.ledger import BUCKET, Ledger
from dsec_scheduler.listing import list_sandboxes
from dsec_scheduler.placer import Placer
from dsec_scheduler.pools import BUCKET as POOLS_BUCKET
from dsec_scheduler.pools import PoolDoor
from dsec_scheduler.queue_door import QueueDoor
from dsec_scheduler.state import SchedulerState
from dsec_scheduler.turns import LINE_SHARE
from dsec_scheduler.unit_desk import UnitDesk
from dsec_scheduler.waiting_door import WaitingDoor

log = structlog.get_logger()

QUEUE: Final = "scheduler"
_TICK_S: Final = 0.5
_FORGET_INTERVAL_S: Final = 60.0
#: Looked up once: a label costs more than a count.
_CREATE_SECONDS: Final = metrics.CREATE_SECONDS.labels("request")
_CREATED: Final = metrics.CREATES.labels("request", "ok")


class SchedulerService(Service[SchedulerConfig]):
    """Any number of these share the doors; each has its own view of the nodes."""

    name: ClassVar[str] = "scheduler"

    def __init__(self, config: SchedulerConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self._random = random.Random()  # noqa: S311  spreads load, guards nothing
        self._core = SchedulerState(config, self._random)
        self._leasing: Leasing
        self._desk: UnitDesk
        self._placer: Placer
        self._gangs: GangDoor
        self._waits: set[asyncio.Task[None]] = set()
        self._creation: Creation
        self._cancellations: Cancellations
        self._pools: PoolDoor
        self._calls: CallDoor
        self._registry: Registry
        self._agents: Resolver
        self._agent_part: AgentPart
        self._dags: DagPart
        self._keeper: Keeper

    # --- The life cycle -----------------------------------------------------------------------

    async def open(self) -> None:
        """Make sure of the streams and the bucket, waiting for JetStream."""
        replicas = self.config.replicas
        for spec in (streams.EVENTS, streams.QUEUE):
            wanted = msgspec.structs.replace(spec, replicas=replicas)
            await until_available(
                f"the stream {spec.name}",
                functools.partial(self.bus.ensure_stream, wanted),
                self.clock,
            )
        records = await until_available(
            f"the bucket {BUCKET}",
            lambda: self.bus.kv(
                BUCKET, RequestRecord, ttl_s=self.config.idempotency_ttl_s, replicas=replicas
            ),
            self.clock,
        )
        owner = f"{socket.gethostname()} {os.getpid()}"
        ledger = Ledger(records, owner, self.config.idempotency_grace_s)
        queued = await self.bus.kv(
            BUCKET, QueuedRecord, ttl_s=self.config.idempotency_ttl_s, replicas=replicas
        )
        self._cancellations = Cancellations(queued, self.clock)
        self._registry = await Registry.open(self.bus, self.clock, replicas, self._random)
        self._agents = Resolver(self._registry)
        self._leasing = Leasing(self.bus)
        self._desk = UnitDesk(
            self.bus, self.clock, self.config, self._leasing, self._core.views.is_other
        )
        self._placer = Placer(
            self.bus,
            self._core,
            self.clock,
            self.config,
            agents=self._agents,
            desk=self._desk,
            leasing=self._leasing,
        )
        self._creation = Creation(self._placer, ledger, self.clock)
        self._gangs = GangDoor(
            self.bus, self._placer, ledger, self._agents, clock=self.clock, config=self.config
        )
        pools = await until_available(
            f"the bucket {POOLS_BUCKET}",
            lambda: self.bus.kv(POOLS_BUCKET, PoolSpec, replicas=replicas),
            self.clock,
        )
        self._pools = PoolDoor(self.bus, pools, self._open_heartbeats, self.clock)
        self._calls = CallDoor(self._creation, self._agents, self.config.request_timeout_max_s)
        self._dags = await DagPart.open(
            self.bus, self._registry, self._creation, self.clock, self.config
        )
        self._agent_part = await AgentPart.open(
            self.bus, self._registry, self._nodes_heard_of, self.clock, self.config
        )
        self._keeper = await Keeper.open(self.bus, self._registry, self.clock, self.config)
        await self.bus.register("dsec-scheduler", version("dsec"), "Where a sandbox goes")

    async def recover(self) -> None:
        """Learn of all nodes before a request asks for one: "none has room" must be true."""
        await self.bus.subscribe(subjects.HEARTBEATS, NodeHeartbeat, self._on_heartbeat)
        self.spawn(self._registry.follow(), "follow agents")
        await self.clock.sleep(self.config.warm_up_s)

    async def subscribe(self) -> None:
        """Open the doors."""
        await self.bus.serve(
            subjects.any_project("sandbox.create"),
            CreateSandbox,
            self._create,
            queue=QUEUE,
            concurrency=self.config.concurrency,
            max_pending=4 * self.config.concurrency,
        )
        await self.bus.serve(
            subjects.any_project("sandbox.create_gang"), CreateGang, self._create_gang, queue=QUEUE
        )
        await self.bus.serve(
            subjects.any_project("sandbox.list"), ListSandboxes, self._list, queue=QUEUE
        )
        pools = self._pools
        await self.bus.serve(subjects.any_project("pool.set"), SetPool, pools.set, queue=QUEUE)
        await self.bus.serve(
            subjects.any_project("pool.list"), ListPools, pools.list_pools, queue=QUEUE
        )
        await self.bus.serve(
            subjects.any_project("pool.remove"), RemovePool, pools.remove, queue=QUEUE
        )
        await self.bus.serve(
            subjects.any_project("function.call"),
            CallFunction,
            self._call,
            queue=QUEUE,
            concurrency=self.config.concurrency,
            max_pending=4 * self.config.concurrency,
        )
        door = QueueDoor(
            self.bus,
            self._creation,
            self.clock,
            self.config,
            self._random,
            agents=self._agents,
            cancellations=self._cancellations,
        )
        await self.bus.consume(
            streams.QUEUE.name,
            QUEUE,
            CreateSandbox,
            door.handle,
            max_in_flight=self.config.queue_in_flight + self.config.queue_waiting_max,
        )
        await self._desk.reports.listen()
        await WaitingDoor(self.bus, self._desk, self._cancellations).serve(QUEUE)
        await self._agent_part.serve(QUEUE)
        await self._dags.serve(QUEUE)
        await self._keeper.serve(QUEUE)
        self.spawn(self._keeper.follow(), "follow dependencies")
        self.spawn(self._keeper.run(), "keep instances consistent")
        self.spawn(self._dags.follow(), "follow runs of DAGs")
        self.spawn(self._dags.run(), "take over runs of DAGs")
        self.spawn(self._agent_part.run(), "judge new versions of agents")
        self.spawn(self._end_waits(), "end waits for silent nodes")
        self.spawn(self._forget(), "forget silent nodes")
        metrics.NODES.set_function(lambda: len(self._open_heartbeats()))
        self.spawn(pools.follow(), "follow pools")
        self.spawn(pools.run(), "tell nodes their pools")

    async def quiesce(self) -> None:
        """Send those who wait for units to another scheduler."""
        if hasattr(self, "_desk"):
            self._desk.stop()
        if self._waits:
            await asyncio.wait(set(self._waits), timeout=self.config.drain_timeout_s)

    async def close(self) -> None:
        """Let the last leases be given back; all else that outlives this process is in buckets."""
        if hasattr(self, "_desk"):
            await self._desk.finish()
            await self._leasing.finish()

    # --- What comes in ------------------------------------------------------------------------

    async def _on_heartbeat(self, request: Request[NodeHeartbeat]) -> None:
        heartbeat = request.message
        if request.tokens[-1] != heartbeat.node:
            log.warning("dropped a heartbeat that names another node", subject=request.subject)
            return
        view = self._core.views.get(heartbeat.node)
        epoch = view.heartbeat.epoch if view is not None else heartbeat.epoch
        self._core.handle(HeartbeatSeen(heartbeat=heartbeat, at=self._now()))
        if epoch != heartbeat.epoch:
            self._placer.end_waits(heartbeat.node)

    async def _create(self, asked: Request[CreateSandbox]) -> Message | None:
        if not self._agents.wants_units(asked.project, asked.message):
            return await self._create_now(asked)
        self._answer_later(asked, self._create_now(asked))
        return None

    async def _create_gang(self, asked: Request[CreateGang]) -> None:
        self._answer_later(asked, self._gangs.create(asked))

    async def _call(self, asked: Request[CallFunction]) -> Message | None:
        if not self._agents.wants_units(asked.project, request_of(asked.message)):
            return await self._calls.call(asked)
        self._answer_later(asked, self._calls.call(asked))
        return None

    def _answer_later(self, asked: Request[Any], work: Awaitable[Message | None]) -> None:
        """Have what may wait for long hold no place of those who need not."""
        wait = asyncio.create_task(self._answer(asked, work), name="create with Compute Units")
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)

    async def _answer(self, asked: Request[Any], work: Awaitable[Message | None]) -> None:
        try:
            answer = await work
        except DsecError as error:
            await self.bus.reply_error(asked.caller, error)
        except Exception:
            log.exception("a creation failed", request=asked.message.message_id)
            await self.bus.reply_error(asked.caller, failed_unexpectedly())
        else:
            if answer is not None:
                await self.bus.reply(asked.caller, answer)

    async def _create_now(self, asked: Request[CreateSandbox]) -> Message | None:
        request, project = asked.message, asked.project
        began = self.clock.monotonic()
        counted = _CREATED
        try:
            meant = await self._agents.learn(project, request) if request.agent else request
            admission.check(meant, self.config.request_timeout_max_s)
            key = request.idempotency_key
            # Nobody waits for longer than asked for, and time in the line counts.
            left_s = request.timeout_s - asked.waited_s
            if asked.waited_s > LINE_SHARE * request.timeout_s:
                raise no_turn(request.timeout_s, self.config.retry_after_s)
            succeeded = await self._creation.create(
                project,
                request,
                left_s,
                asked.caller,
                bucket_key(project, "caller", key) if key else "",
            )
        except DsecError as error:
            counted = metrics.CREATES.labels("request", str(error.code))
            raise
        finally:
            counted.inc()
            _CREATE_SECONDS.observe(self.clock.monotonic() - began)
        # A second answer would be one too many for a caller that the node has told.
        return None if succeeded.told else succeeded.created

    async def _list(self, asked: Request[ListSandboxes]) -> SandboxList:
        nodes = [view.name for view in self._core.views]
        return await list_sandboxes(
            self.bus, asked.project, asked.message, nodes, self.config.list_timeout_s
        )

    async def _end_waits(self) -> None:
        """While somebody waits for a node, look whether it has fallen silent."""
        while True:
            await self._placer.waiting.wait()
            await self.clock.sleep(_TICK_S)
            self._placer.end_waits_for_silent_nodes()

    async def _forget(self) -> None:
        while True:
            await self.clock.sleep(_FORGET_INTERVAL_S)
            self._core.handle(ForgetDue(at=self._now()))

    def _open_heartbeats(self) -> list[NodeHeartbeat]:
        views = self._core.views.open_nodes(self._now().monotonic_s)
        return [view.heartbeat for view in views]

    def _nodes_heard_of(self) -> list[str]:
        now_s = self._now().monotonic_s
        return [
            view.name for view in self._core.views if not self._core.views.is_silent(view, now_s)
        ]

    def _now(self) -> Moment:
        return Moment(self.clock.now(), self.clock.monotonic())
