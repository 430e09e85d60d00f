"""Has instances of agents that fall behind their dependencies synchronised by their nodes.

Every scheduler looks, and every one may ask: a node does for one instance one thing at a time, and
answers the same question again with what is so. So a scheduler that dies leaves nothing half done,
and what it had not asked for yet, the others ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

import structlog

from dsec_common import subjects
from dsec_common.bus import Bus, KeyValue
from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.fair_places import FairPlaces
from dsec_common.retry import until_available
from dsec_common.subjects import ScopedId
from dsec_common.wire.agent import validate_name
from dsec_common.wire.consistency import (
    SYNCHRONISE_TIMEOUT_S,
    DependencyVersions,
    InstancesSynchronised,
    InstanceState,
    InstanceSynchronised,
    ListDependencies,
    ReportDependencies,
    SynchroniseInstance,
    SynchroniseInstances,
)
from dsec_scheduler.agents.records import AgentRecord, InstanceRecord
from dsec_scheduler.agents.registry import Registry
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.dependencies import (
    BUCKET,
    Declared,
    DependencyRecord,
    InstanceBehind,
    behind,
    check_report,
    declared_in,
    needed_by,
    reported,
)
from dsec_scheduler.swapping import swap

_log: Final = structlog.get_logger(__name__)

#: Without a change somebody looks so often: for instances that began, or could not be asked.
_LOOK_S: Final = 3.0
_AT_ONCE: Final = 32
_INSTANCES_MAX: Final = 32
_NODE_GRACE_S: Final = 30.0
#: With these the instance is over; the registry learns of it by itself.
_OVER: Final = frozenset({ErrorCode.EXPIRED, ErrorCode.NOT_FOUND})


class Keeper:
    """What projects say of dependencies, and what follows from it for their instances."""

    def __init__(
        self,
        bus: Bus,
        bucket: KeyValue[DependencyRecord],
        registry: Registry,
        clock: Clock,
        config: SchedulerConfig,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._registry = registry
        self._clock = clock
        self._tolerance_ms = round(config.clock_tolerance_s * 1000)
        self._declarations: dict[tuple[str, str, str], Declared] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._settled: dict[str, dict[str, int]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._places = FairPlaces(_AT_ONCE)
        self._changed = asyncio.Event()

    @classmethod
    async def open(
        cls, bus: Bus, registry: Registry, clock: Clock, config: SchedulerConfig
    ) -> Keeper:
        """Return it once its bucket is there."""
        bucket = await until_available(
            f"the bucket {BUCKET}",
            lambda: bus.kv(BUCKET, DependencyRecord, replicas=config.replicas),
            clock,
        )
        return cls(bus, bucket, registry, clock, config)

    async def serve(self, queue: str) -> None:
        """Open the doors of projects."""
        bus = self._bus
        report = subjects.any_project("agent.report_dependencies")
        await bus.serve(report, ReportDependencies, self.report, queue=queue)
        known = subjects.any_project("agent.dependencies")
        await bus.serve(known, ListDependencies, self.list_dependencies, queue=queue)
        now = subjects.any_project("agent.synchronise")
        await bus.serve(now, SynchroniseInstances, self.synchronise, queue=queue)

    # --- What projects ask --------------------------------------------------------------------

    async def report(self, asked: Request[ReportDependencies]) -> DependencyVersions:
        """Keep how new a project's dependencies are; on return that is durable.

        Raises:
            DsecError: ``invalid``; ``exhausted`` for too many; then nothing has changed.
        """
        request, project = asked.message, asked.project
        check_report(request, self._now_ms())
        kept = await swap(
            self._bucket, project, lambda before: reported(before, request), self._pause
        )
        self._learn(project, kept)
        return DependencyVersions(cause_id=request.message_id, versions=kept.versions)

    async def list_dependencies(self, asked: Request[ListDependencies]) -> DependencyVersions:
        """Return a project's dependencies as they are kept."""
        versions = await self._versions(asked.project)
        return DependencyVersions(cause_id=asked.message.message_id, versions=versions)

    async def synchronise(self, asked: Request[SynchroniseInstances]) -> InstancesSynchronised:
        """Have instances that are behind synchronised, and answer when that is done or has failed.

        Raises:
            DsecError: ``not_found`` for an agent, or one that is no instance of it; ``invalid`` for
                none or too many; what a node refused.
        """
        request, project = asked.message, asked.project
        if not 1 <= len(request.instances) <= _INSTANCES_MAX:
            raise invalid(f"name 1 to {_INSTANCES_MAX} instances", field="instances")
        record = await self._registry.read(project, validate_name(request.name))
        known = await self._versions(project)
        instances = await self._instances(project)
        found = []
        for sandbox_id in request.instances:
            ScopedId.parse(sandbox_id)
            one = instances.get(sandbox_id)
            if one is None or one.agent != record.name:
                raise not_found(
                    f"{sandbox_id} is no instance of {record.name}; one that has just begun is "
                    "known within two seconds",
                    sandbox=sandbox_id,
                )
            declared = await self._declared(record, one.version)
            if not declared.depends_on:
                raise invalid(f"the contract of {record.name} {one.version} has no depends_on")
            versions = needed_by(declared, known)
            found.append(InstanceBehind(sandbox_id, record.name, declared.synchronise, versions, 0))
        states = await asyncio.gather(*(self._ask(project, one, again=True) for one in found))
        return InstancesSynchronised(cause_id=request.message_id, states=tuple(states))

    async def _versions(self, project: str) -> dict[str, int]:
        try:
            entry = await self._bucket.get(project)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return {}
        return {} if entry.value is None else entry.value.versions

    # --- Looking ------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep up with what any scheduler is told, until cancelled."""
        while True:
            try:
                async with contextlib.aclosing(self._bucket.watch("*")) as entries:
                    async for entry in entries:
                        if entry is not None and entry.value is not None:
                            self._learn(entry.key, entry.value)
            except DsecError as error:
                _log.info("dependencies_not_read", error=str(error))
            await self._clock.sleep(_LOOK_S)

    def _learn(self, project: str, record: DependencyRecord) -> None:
        self._known[project] = record.versions
        self._changed.set()

    async def run(self) -> None:
        """Look at once after a change, and every few seconds without one, until cancelled."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S if self._known else None):
                        await self._changed.wait()
                self._changed.clear()
                for project in list(self._known):
                    try:
                        await self.look(project)
                    except DsecError as error:
                        _log.info("instances_not_looked_at", project=project, error=str(error))
        finally:
            asking = list(self._asking.values())
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def look(self, project: str) -> None:
        """Begin to have the project's instances that are behind synchronised.

        Raises:
            DsecError: its instances cannot be read now.
        """
        known = self._known.get(project, {})
        instances = await self._instances(project)
        settled = {
            sandbox_id: version_ms
            for sandbox_id, version_ms in self._settled.get(project, {}).items()
            if sandbox_id in instances
        }
        self._settled[project] = settled
        declared = await self._all_declared(project, instances)
        for one in behind(instances, declared, known, settled, self._tolerance_ms):
            if one.sandbox_id not in self._asking:
                self._asking[one.sandbox_id] = asyncio.create_task(
                    self._bring_up(project, one), name=f"synchronise {one.sandbox_id}"
                )

    async def _all_declared(
        self, project: str, instances: Mapping[str, InstanceRecord]
    ) -> dict[tuple[str, str], Declared]:
        found = {}
        for agent, version in {(one.agent, one.version) for one in instances.values()}:
            record = self._registry.known(project, agent)
            if record is not None:
                found[agent, version] = await self._declared(record, version)
        return found

    async def _declared(self, record: AgentRecord, version: str) -> Declared:
        """Return what a version's contract declares; one that makes no sense declares nothing."""
        kept = record.versions.get(version)
        digest = "" if kept is None else kept.contract_sha256
        key = (record.project, record.name, digest)
        if digest and key not in self._declarations:  # a contract never changes
            contract = await self._registry.contract(*key)
            try:
                self._declarations[key] = declared_in(contract)
            except DsecError as error:
                _log.warning("contract_not_understood", agent=record.name, error=str(error))
                self._declarations[key] = Declared()
        return self._declarations.get(key, Declared())

    async def _instances(self, project: str) -> dict[str, InstanceRecord]:
        documents = (await self._registry.shards(project)).values()
        return {key: one for shard in documents for key, one in shard.instances.items()}

    async def _bring_up(self, project: str, one: InstanceBehind) -> None:
        known = self._known.get(project)
        try:
            async with self._places.place(project):
                state = await self._ask(project, one)
            if state.error:
                _log.warning("instance_stands_still", sandbox=one.sandbox_id, error=state.error)
        except DsecError as error:
            if error.code not in _OVER:  # it is asked again at the next look
                _log.info("instance_not_asked", sandbox=one.sandbox_id, error=str(error))
                return
        finally:
            self._asking.pop(one.sandbox_id, None)
            if self._known.get(project) != known:
                self._changed.set()  # it may be behind again, and was passed over
        self._settled.setdefault(project, {})[one.sandbox_id] = one.required_ms

    async def _ask(
        self, project: str, one: InstanceBehind, *, again: bool = False
    ) -> InstanceState:
        node, _, local = one.sandbox_id.partition(".")
        answer = await self._bus.request(
            subjects.node_request(node, "synchronise"),
            SynchroniseInstance(
                project=project,
                local=local,
                agent=one.agent,
                versions=one.versions,
                command=one.command,
                clock_tolerance_ms=self._tolerance_ms,
                again=again,
            ),
            InstanceSynchronised,
            timeout_s=SYNCHRONISE_TIMEOUT_S + _NODE_GRACE_S,
        )
        return answer.state

    async def _pause(self, attempt: int) -> None:
        await self._clock.sleep(min(0.01 * attempt, 0.1))

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)
