"""The scheduler's shell: its doors, its view of the nodes, and its ticking."""

from __future__ import annotations

import functools
import os
import random
import socket
from importlib.metadata import version
from typing import ClassVar, Final

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
from dsec_common.wire.sandbox import CreateSandbox, ListSandboxes, SandboxList
from dsec_scheduler import admission, metrics
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.creation import Creation
from dsec_scheduler.events import ForgetDue, HeartbeatSeen, Moment
from dsec_scheduler.idempotency import RequestRecord, bucket_key
from dsec_scheduler.ledger import BUCKET, Ledger
from dsec_scheduler.listing import list_sandboxes
from dsec_scheduler.placer import Placer
from dsec_scheduler.queue_door import QueueDoor
from dsec_scheduler.state import SchedulerState

log = structlog.get_logger()

QUEUE: Final = "scheduler"
_TICK_S: Final = 0.5


class SchedulerService(Service[SchedulerConfig]):
    """Any number of these share the doors; each has its own view of the nodes."""

    name: ClassVar[str] = "scheduler"

    def __init__(self, config: SchedulerConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self._random = random.Random()  # noqa: S311  spreads load, guards nothing
        self._core = SchedulerState(config, self._random)
        self._placer: Placer
        self._creation: Creation

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
        self._placer = Placer(self.bus, self._core, self.clock, self.config)
        self._creation = Creation(self._placer, ledger, self.clock)
        await self.bus.register("dsec-scheduler", version("dsec"), "Where a sandbox goes")

    async def recover(self) -> None:
        """Learn of all nodes before a request asks for one: "none has room" must be true."""
        await self.bus.subscribe(subjects.HEARTBEATS, NodeHeartbeat, self._on_heartbeat)
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
            subjects.any_project("sandbox.list"), ListSandboxes, self._list, queue=QUEUE
        )
        door = QueueDoor(self.bus, self._creation, self.clock, self.config, self._random)
        await self.bus.consume(
            streams.QUEUE.name,
            QUEUE,
            CreateSandbox,
            door.handle,
            max_in_flight=self.config.queue_in_flight,
        )
        self.spawn(self._tick(), "tick")

    async def close(self) -> None:
        """Let the last leases be given back; all else that outlives this process is in buckets."""
        if hasattr(self, "_placer"):
            await self._placer.finish()

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
        request, project = asked.message, asked.project
        began = self.clock.monotonic()
        outcome = "ok"
        try:
            admission.check(request, self.config.request_timeout_max_s)
            key = request.idempotency_key
            succeeded = await self._creation.create(
                project,
                request,
                request.timeout_s,
                asked.caller,
                bucket_key(project, "caller", key) if key else "",
            )
        except DsecError as error:
            outcome = str(error.code)
            raise
        finally:
            metrics.CREATES.labels("request", outcome).inc()
            metrics.CREATE_SECONDS.labels("request").observe(self.clock.monotonic() - began)
        # A second answer would be one too many for a caller that the node has told.
        return None if succeeded.told else succeeded.created

    async def _list(self, asked: Request[ListSandboxes]) -> SandboxList:
        nodes = [view.name for view in self._core.views]
        return await list_sandboxes(
            self.bus, asked.project, asked.message, nodes, self.config.list_timeout_s
        )

    async def _tick(self) -> None:
        while True:
            await self.clock.sleep(_TICK_S)
            now = self._now()
            self._placer.end_waits_for_silent_nodes()
            self._core.handle(ForgetDue(at=now))
            metrics.NODES.set(len(self._core.views.open_nodes(now.monotonic_s)))

    def _now(self) -> Moment:
        return Moment(self.clock.now(), self.clock.monotonic())
