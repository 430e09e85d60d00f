"""Bringing changes of agents to the nodes, and what nodes tell of instances into the registry.

A change is durable before any node hears of it. Nodes are told at once and say when it is in force;
one that cannot be told, or whose scheduler died in between, says with its next report which
revisions it knows, and is answered with the rest.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

import structlog

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.agent import AgentRolledBack, Governed, Refusal, shard_of
from dsec_common.wire.agent_node import (
    AgentRules,
    GovernNode,
    InstanceEnded,
    InstancesReported,
    InstanceStarted,
    NodeGoverned,
    ReportInstances,
)
from dsec_scheduler.agents import changes, shards
from dsec_scheduler.agents.records import AgentRecord, InstanceRecord, ShardRecord
from dsec_scheduler.agents.registry import Registry

_log: Final = structlog.get_logger(__name__)

_NODE_TIMEOUT_S: Final = 5.0
_REFUSED_SHOWN_MAX: Final = 100
_JUDGE_INTERVAL_S: Final = 0.5
_SWEEP_INTERVAL_S: Final = 60.0

ReportedT = TypeVar("ReportedT", InstanceStarted, InstanceEnded)

Pins = Mapping[str, int]
"""Revisions of single instances' own policies, by sandbox id."""


class Governor:
    """Tells nodes, hears from them, and judges new versions."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        nodes: Callable[[], list[str]],
        clock: Clock,
        forget_s: float,
    ) -> None:
        """Take the parts.

        Args:
            bus: to the nodes.
            registry: the documents.
            nodes: those that are heard of now.
            clock: for pauses.
            forget_s: a node that was not heard of for so long is gone, with its instances.
        """
        self._bus = bus
        self._registry = registry
        self._nodes = nodes
        self._clock = clock
        self._forget_s = forget_s
        self._to_judge: set[tuple[str, str]] = set()
        self._wake = asyncio.Event()
        self._missed_since: dict[str, float] = {}

    # --- Telling nodes ------------------------------------------------------------------------

    async def tell(
        self,
        record: AgentRecord,
        pins: Pins | None = None,
        *,
        single: bool = False,
        documents: Iterable[ShardRecord] | None = None,
    ) -> Governed:
        """Tell the nodes what an agent's document says, and return what they answer.

        Args:
            record: as it is kept.
            pins: single instances' own policies that changed, as they are kept.
            single: nothing else has changed: only the nodes of ``pins`` are told.
            documents: of the project's instances, if they were read just now.
        """
        by_node: dict[str, dict[str, int]] = {}
        for sandbox_id, revision in (pins or {}).items():
            node, _, local = sandbox_id.partition(".")
            by_node.setdefault(node, {})[local] = revision
        first = set(by_node) if single else {*self._nodes(), *by_node}

        def tell_node(node: str) -> asyncio.Task[NodeGoverned | DsecError]:
            rules = changes.rules_of(record, by_node.get(node))
            return asyncio.create_task(self._tell_node(node, rules), name=f"govern {node}")

        told = {node: tell_node(node) for node in first}
        # Read meanwhile: whoever holds instances and is not heard of must not be passed over.
        found = set(by_node) if single else await self._holders(record, documents)
        told |= {node: tell_node(node) for node in found - first}
        answers = dict(zip(told, await asyncio.gather(*told.values()), strict=True))
        agreed = {node: one for node, one in answers.items() if isinstance(one, NodeGoverned)}
        refused = [refusal for answer in agreed.values() for refusal in answer.refused]
        if single:
            in_force = sum(len(by_node[node]) for node in agreed) - len(refused)
        else:
            in_force = sum(answer.instances for answer in agreed.values())
        return Governed(
            name=record.name,
            revision=record.revision,
            instances=in_force,
            nodes=len(agreed),
            silent_nodes=tuple(sorted(found - agreed.keys())),
            refused=tuple(refused[:_REFUSED_SHOWN_MAX]),
        )

    async def _holders(
        self, record: AgentRecord, documents: Iterable[ShardRecord] | None
    ) -> set[str]:
        if documents is None:
            documents = (await self._registry.shards(record.project)).values()
        return {
            shards.node_of(sandbox_id)
            for sandbox_id, _ in shards.instances_of(documents, record.name)
        }

    async def _tell_node(self, node: str, rules: AgentRules) -> NodeGoverned | DsecError:
        try:
            return await self._bus.request(
                subjects.node_request(node, "govern"),
                GovernNode(rules=rules),
                NodeGoverned,
                timeout_s=_NODE_TIMEOUT_S,
            )
        except DsecError as error:
            _log.info("a node was not told of an agent", node=node, error=str(error))
            return error

    async def pin(self, record: AgentRecord, pins: Pins) -> tuple[dict[str, int], list[Refusal]]:
        """Keep single instances' own policies; return those kept, and who is no instance."""
        present: dict[str, list[str]] = {}

        def change(shard: str, own: Pins, document: ShardRecord) -> ShardRecord | None:
            present[shard] = [
                one
                for one in own
                if (found := document.instances.get(one)) and found.agent == record.name
            ]
            return shards.pinned(document, record.name, own)

        await self._registry.change_shards(
            record.project,
            {
                shard: functools.partial(change, shard, {one: pins[one] for one in ids})
                for shard, ids in shards.by_shard(pins).items()
            },
        )
        kept = {one: pins[one] for ids in present.values() for one in ids}
        return kept, [
            Refusal(
                what=one,
                code=ErrorCode.NOT_FOUND,
                reason=f"no instance of {record.name}; one that has just begun is known within "
                "two seconds",
            )
            for one in pins
            if one not in kept
        ]

    # --- Hearing from nodes -------------------------------------------------------------------

    async def report(self, asked: Request[ReportInstances]) -> InstancesReported:
        """Keep what a node tells of its instances, and tell it what it has missed.

        Raises:
            DsecError: ``denied`` for a report in another node's name; ``unavailable`` when it could
                not be kept: the node tells it again.
        """
        report = asked.message
        if asked.tokens[-1] != report.node:
            raise DsecError(ErrorCode.DENIED, "a node reports in its own name only")
        ended = list(report.ended)
        if report.complete:
            there = {one.local for one in report.started} | {one.local for one in ended}
            known = await self._registry.all_shards()
            ended += [
                InstanceEnded(project=project, local=local)
                for project, sandbox_id, _ in known.on_node(report.node)
                if (local := sandbox_id.partition(".")[2]) not in there
            ]
        projects = {one.project for one in report.started} | {one.project for one in ended}
        await asyncio.gather(
            *(
                self._keep(
                    report.node,
                    project,
                    [one for one in report.started if one.project == project],
                    [one for one in ended if one.project == project],
                )
                for project in projects
            )
        )
        return InstancesReported(
            cause_id=report.message_id, rules=await self._missed(report.node, report.revisions)
        )

    async def _keep(
        self,
        node: str,
        project: str,
        began: Iterable[InstanceStarted],
        over: Iterable[InstanceEnded],
    ) -> None:
        started, ended = _grouped(node, began), _grouped(node, over)

        def change(shard: str, document: ShardRecord) -> ShardRecord | None:
            left = ended.get(shard, ())
            for one in left:
                known = document.instances.get(f"{node}.{one.local}")
                if known is not None and self._may_be_watched(project, known.agent):
                    self._to_judge.add((project, known.agent))
            return shards.reported(document, node, started.get(shard, ()), left)

        await self._registry.change_shards(
            project,
            {shard: functools.partial(change, shard) for shard in started.keys() | ended.keys()},
        )
        if self._to_judge:
            self._wake.set()

    def _may_be_watched(self, project: str, name: str) -> bool:
        record = self._registry.known(project, name)
        return record is None or changes.is_watched(record)

    async def _missed(
        self, node: str, known: Mapping[str, Mapping[str, int]]
    ) -> tuple[AgentRules, ...]:
        behind = [
            record
            for project, revisions in sorted(known.items())
            for name, revision in sorted(revisions.items())
            if (record := self._registry.known(project, name)) and record.revision > revision
        ]
        if not behind:
            return ()
        pins: dict[tuple[str, str], dict[str, int]] = {}
        held: list[tuple[str, str, InstanceRecord]] = []
        if any(changes.has_own_policies(record) for record in behind):
            held = (await self._registry.all_shards()).on_node(node)
        for project, sandbox_id, one in held:
            if one.policy:
                local = sandbox_id.partition(".")[2]
                pins.setdefault((project, one.agent), {})[local] = one.policy
        return tuple(
            changes.rules_of(record, pins.get((record.project, record.name))) for record in behind
        )

    # --- Watching new versions ----------------------------------------------------------------

    async def run(self) -> None:
        """Judge new versions as their instances fail, and forget lost nodes, until cancelled."""
        swept_at = self._clock.monotonic()
        while True:
            try:
                async with asyncio.timeout(_SWEEP_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            due, self._to_judge = self._to_judge, set()
            for project, name in sorted(due):
                await self._quietly("judge", self.judge(project, name))
            if self._clock.monotonic() - swept_at >= _SWEEP_INTERVAL_S:
                swept_at = self._clock.monotonic()
                await self._quietly("sweep", self.sweep())
            await self._clock.sleep(_JUDGE_INTERVAL_S)

    async def _quietly(self, what: str, work: Awaitable[None]) -> None:
        try:
            await work
        except DsecError as error:
            _log.warning("registry_work_failed", what=what, error=str(error))

    async def judge(self, project: str, name: str) -> None:
        """Take an agent's new version back when too many of its instances have failed."""
        record = await self._registry.read(project, name)
        if not changes.is_watched(record) or record.rollout is None:
            return
        version = record.rollout.to_version
        documents = await self._registry.shards(project)
        so_far = shards.outcome_of(documents.values(), name, version)

        def change(now_kept: AgentRecord | None) -> AgentRecord:
            if now_kept is None or now_kept.rollout is None:
                return record
            if now_kept.rollout.to_version != version:
                return now_kept
            return changes.judged(now_kept, so_far, self._clock.now())

        judged = await self._registry.change(project, name, change)
        rollout = judged.rollout
        if rollout is None or rollout.state != "rolled_back" or judged.revision == record.revision:
            return
        _log.warning("agent_rolled_back", project=project, agent=name, reason=rollout.reason)
        await self._bus.js_publish(
            subjects.agent_event(project, name, "rolled_back"),
            AgentRolledBack(
                name=name,
                from_version=rollout.to_version,
                to_version=rollout.from_version,
                finished=so_far.finished - rollout.finished_before,
                failed=so_far.failed - rollout.failed_before,
            ),
        )
        await self.tell(judged)

    async def sweep(self) -> None:
        """Drop the instances of nodes that nobody has heard of for very long."""
        now_s, heard = self._clock.monotonic(), set(self._nodes())
        known = await self._registry.all_shards()
        since = self._missed_since
        since = self._missed_since = {n: since.get(n, now_s) for n in known.nodes - heard}
        lost = frozenset(
            node
            for node, since_s in self._missed_since.items()
            if now_s - since_s >= self._forget_s
        )
        if not lost:
            return
        _log.info("instances_of_lost_nodes_dropped", nodes=sorted(lost))
        for project, shard in known.documents:
            await self._registry.change_shards(
                project, {shard: lambda document: shards.without_nodes(document, lost)}
            )


def _grouped(node: str, reports: Iterable[ReportedT]) -> dict[str, list[ReportedT]]:
    found: dict[str, list[ReportedT]] = {}
    for one in reports:
        found.setdefault(shard_of(f"{node}.{one.local}"), []).append(one)
    return found
