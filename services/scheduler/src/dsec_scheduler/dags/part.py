"""The DAGs' part of the scheduler, put together."""

from __future__ import annotations

import random

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.wire.base import new_id
from dsec_common.wire.dag import (
    InspectDagRun,
    ListDags,
    RegisterDag,
    RemoveDag,
    ResumeDagRun,
    RunDag,
)
from dsec_scheduler.agents.registry import Registry
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.creation import Creation
from dsec_scheduler.dags.converters import Converters
from dsec_scheduler.dags.door import DagDoor
from dsec_scheduler.dags.runner import DagRunner
from dsec_scheduler.dags.store import DagStore


class DagPart:
    """What the service knows of DAGs."""

    def __init__(self, bus: Bus, door: DagDoor, runner: DagRunner) -> None:
        self._bus = bus
        self._door = door
        self.follow = runner.follow
        self.run = runner.run

    @classmethod
    async def open(
        cls,
        bus: Bus,
        registry: Registry,
        creation: Creation,
        clock: Clock,
        config: SchedulerConfig,
    ) -> DagPart:
        """Return it once its buckets are there."""
        store = await DagStore.open(
            bus, clock, config.replicas, config.dag_runs_kept_s, config.dag_runs_max_bytes
        )
        converters = Converters()
        runner = DagRunner(
            store,
            creation,
            registry,
            converters,
            clock,
            randomness=random.Random(),  # noqa: S311  spreads load, guards nothing
            owner=new_id(),
            clock_tolerance_ms=round(config.clock_tolerance_s * 1000),
        )
        door = DagDoor(store, registry, converters, runner, config.dags_project_max)
        return cls(bus, door, runner)

    async def serve(self, queue: str) -> None:
        """Open the doors."""
        bus, door = self._bus, self._door

        def verb(name: str) -> str:
            return subjects.any_project(f"dag.{name}")

        await bus.serve(verb("register"), RegisterDag, door.register, queue=queue)
        await bus.serve(verb("list"), ListDags, door.list_dags, queue=queue)
        await bus.serve(verb("remove"), RemoveDag, door.remove, queue=queue)
        await bus.serve(verb("run"), RunDag, door.run, queue=queue)
        await bus.serve(verb("inspect"), InspectDagRun, door.inspect, queue=queue)
        await bus.serve(verb("resume"), ResumeDagRun, door.resume, queue=queue)
