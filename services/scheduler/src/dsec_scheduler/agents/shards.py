"""Hashed documents of instances: who is in them, and what is counted. No I/O.

Each function takes a document and returns it changed, or None when there is nothing to change, so
that it can be tried again on whatever another scheduler wrote in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from dsec_common.wire.agent import shard_of
from dsec_common.wire.agent_node import InstanceEnded, InstanceStarted
from dsec_scheduler.agents.records import AgentRecord, InstanceRecord, Outcome, ShardRecord


def reported(
    shard: ShardRecord,
    node: str,
    started: Iterable[InstanceStarted],
    ended: Iterable[InstanceEnded],
) -> ShardRecord | None:
    """Return the document with what a node reports of it; the same report again changes nothing."""
    begun = {
        sandbox_id: InstanceRecord(one.agent, one.version, one.started_at)
        for one in started
        if (sandbox_id := f"{node}.{one.local}") not in shard.instances
    }
    over = {
        sandbox_id: one.failed
        for one in ended
        if (sandbox_id := f"{node}.{one.local}") in shard.instances or sandbox_id in begun
    }
    if not begun and not over:
        return None
    instances = shard.instances | begun
    outcomes = shard.outcomes
    for sandbox_id, failed in over.items():
        left = instances.pop(sandbox_id)
        of_agent = outcomes.get(left.agent, {})
        after = of_agent.get(left.version, Outcome()) + Outcome(1, int(failed))
        outcomes = {**outcomes, left.agent: {**of_agent, left.version: after}}
    return ShardRecord(instances=instances, outcomes=outcomes)


def without_nodes(shard: ShardRecord, lost: frozenset[str]) -> ShardRecord | None:
    """Return the document without the instances of nodes that are gone for good."""
    kept = {
        sandbox_id: one
        for sandbox_id, one in shard.instances.items()
        if node_of(sandbox_id) not in lost
    }
    if len(kept) == len(shard.instances):
        return None
    return ShardRecord(instances=kept, outcomes=shard.outcomes)


def pinned(shard: ShardRecord, agent: str, pins: Mapping[str, int]) -> ShardRecord | None:
    """Return the document with policies of single instances; the higher revision holds."""
    changed = {
        sandbox_id: msgspec.structs.replace(one, policy=revision)
        for sandbox_id, revision in pins.items()
        if (one := shard.instances.get(sandbox_id)) is not None
        and one.agent == agent
        and one.policy < revision
    }
    if not changed:
        return None
    return ShardRecord(instances={**shard.instances, **changed}, outcomes=shard.outcomes)


class Known:
    """All documents as they were read at one time, and who is where."""

    def __init__(self, documents: Mapping[tuple[str, str], ShardRecord]) -> None:
        """Take the documents by project and name."""
        self.documents = documents
        self._by_node: dict[str, list[tuple[str, str, InstanceRecord]]] | None = None

    def on_node(self, node: str) -> list[tuple[str, str, InstanceRecord]]:
        """Return a node's instances: project, sandbox id, and what is kept of each."""
        if self._by_node is None:
            self._by_node = {}
            for (project, _), document in self.documents.items():
                for sandbox_id, one in document.instances.items():
                    held = self._by_node.setdefault(node_of(sandbox_id), [])
                    held.append((project, sandbox_id, one))
        return self._by_node.get(node, [])

    @property
    def nodes(self) -> set[str]:
        """The nodes that hold instances."""
        self.on_node("")
        return set(self._by_node or ())


def by_shard(sandbox_ids: Iterable[str]) -> dict[str, list[str]]:
    """Return the ids by the document that they are in."""
    found: dict[str, list[str]] = {}
    for sandbox_id in sandbox_ids:
        found.setdefault(shard_of(sandbox_id), []).append(sandbox_id)
    return found


def instances_of(shards: Iterable[ShardRecord], agent: str) -> Iterator[tuple[str, InstanceRecord]]:
    """Yield an agent's instances."""
    for shard in shards:
        for sandbox_id, one in shard.instances.items():
            if one.agent == agent:
                yield sandbox_id, one


def outcome_of(shards: Iterable[ShardRecord], agent: str, version: str) -> Outcome:
    """Return how a version's instances have ended so far, in all documents."""
    found = Outcome()
    for shard in shards:
        found += shard.outcomes.get(agent, {}).get(version, Outcome())
    return found


def node_of(sandbox_id: str) -> str:
    """Return the node in a sandbox id."""
    return sandbox_id.partition(".")[0]


def revision_for(record: AgentRecord, instance: InstanceRecord) -> int:
    """Return the revision of the policy that holds for an instance; 0 for none."""
    version = record.versions.get(instance.version)
    return max(instance.policy, version.policy if version else 0)
