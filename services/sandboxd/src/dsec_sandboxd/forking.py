"""Forking: many sandboxes from one snapshot of a running one, admitted one by one."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError
from dsec_common.wire.base import ErrorReply, new_id
from dsec_common.wire.sandbox import Limits, SandboxState
from dsec_common.wire.snapshot import (
    FORK_CHILDREN_MAX,
    ForkedChild,
    ForkSandbox,
    SandboxForked,
)
from dsec_sandboxd.admission import check_env, check_labels, check_limits, check_seconds
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.lifecycle import Sandboxes, local_of
from dsec_sandboxd.making import Maker
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.snapshot_store import SnapshotStore
from dsec_sandboxd.snapshot_taking import SnapshotMaker
from dsec_sandboxd.snapshot_tree import SnapshotRecord

#: The longest that all children of one fork may take.
FORK_TIMEOUT_MAX_S: Final = 300.0
_AGENT_MAX: Final = 64


class Forks:
    """Serves fork requests."""

    def __init__(
        self, taking: SnapshotMaker, store: SnapshotStore, sandboxes: Sandboxes, maker: Maker
    ) -> None:
        self._taking = taking
        self._maker = maker
        self._store = store
        self._sandboxes = sandboxes
        self._node = sandboxes.node

    async def fork(self, request: Request[ForkSandbox]) -> SandboxForked:
        """Make the children and answer with what became of each.

        Raises:
            DsecError: ``invalid`` for the request; what taking the snapshot refused. A child that
                could not be made is no error of the request.
        """
        asked = request.message
        record = self._sandboxes.state.find(request.project, local_of(request))
        limits = self._check(asked, record)
        started_at = time.perf_counter()
        snapshot = await self._taking.take(record, transient=True)
        # Counted as a user, so that the snapshot outlives even children that all fail.
        hold = await self._store.hold(snapshot.local, snapshot.chain)
        try:
            valid_until = self._sandboxes.parts.clock.now() + asked.timeout_s
            layers = self._store.layers_below(record.project, record)
            first = self._record(record, snapshot, asked, limits)
            with self._sandboxes.announced_later(asked.message_id):
                children = await self._children(asked.count, first, layers, valid_until)
        finally:
            hold.release()
        made = sum(child.created is not None for child in children)
        self._sandboxes.parts.steps.step(
            record,
            "fork",
            latency_ms=(time.perf_counter() - started_at) * 1000,
            attributes={
                "snapshot": f"{self._node}.{snapshot.local}",
                "children": f"{made} of {asked.count}",
            },
        )
        return SandboxForked(
            cause_id=asked.message_id,
            snapshot_id=f"{self._node}.{snapshot.local}",
            children=tuple(children),
        )

    def _check(self, asked: ForkSandbox, record: SandboxRecord) -> Limits:
        if not 1 <= asked.count <= FORK_CHILDREN_MAX:
            raise invalid_field("count", f"{asked.count}: from 1 to {FORK_CHILDREN_MAX} children")
        if not 0 < asked.timeout_s <= FORK_TIMEOUT_MAX_S:
            raise invalid_field(
                "timeout_s",
                f"{asked.timeout_s}: more than 0, at most {FORK_TIMEOUT_MAX_S:g}",
            )
        check_env(asked.env or {}, "env")
        check_labels(asked.labels or {})
        check_seconds(asked.ttl_s, "ttl_s")
        agent = asked.agent or ""
        if len(agent) > _AGENT_MAX or not agent.isprintable():
            raise invalid_field("agent", f"use at most {_AGENT_MAX} printable characters")
        limits = asked.limits or msgspec.structs.replace(record.limits, cu=0.0)
        if limits.cu > 0:
            raise invalid_field(
                "limits.cu",
                "Compute Units need a lease for each sandbox: take a snapshot and create from it",
            )
        return check_limits(limits, self._sandboxes.parts.maxima)

    def _record(
        self, parent: SandboxRecord, snapshot: SnapshotRecord, asked: ForkSandbox, limits: Limits
    ) -> SandboxRecord:
        """Return what all children have in common."""
        # What is in force, not what the parent was created with.
        networks = self._maker.networks
        network, setup_network = networks.inherited(parent.local) if networks else (None, None)
        same_agent = asked.agent in {None, parent.agent}
        return SandboxRecord(
            local="",
            project=parent.project,
            placement_id="",
            request_id=asked.message_id,
            state=SandboxState.CREATING,
            created_at=self._sandboxes.parts.clock.now(),
            layer_references=parent.layer_references,
            layer_digests=parent.layer_digests,
            limits=limits,
            env=parent.env if asked.env is None else {**parent.defaults.env, **asked.env},
            defaults=parent.defaults,
            labels=parent.labels if asked.labels is None else asked.labels,
            agent=parent.agent if asked.agent is None else asked.agent,
            agent_version=parent.agent_version if same_agent else "",
            deadline_s=parent.deadline_s if same_agent else 0.0,
            tools=parent.tools if same_agent else None,
            action_terms=parent.action_terms if same_agent else None,
            ttl_s=asked.ttl_s,
            network=network,
            setup_network=setup_network,
            snapshot=snapshot.local,
            snapshot_layers=snapshot.chain,
        )

    async def _children(
        self, count: int, first: SandboxRecord, layers: tuple[Layer, ...], valid_until: float
    ) -> list[ForkedChild]:
        tasks = []
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                record = msgspec.structs.replace(first, local=new_id(), placement_id=new_id())
                tasks.append(group.create_task(self._child(record, layers, valid_until)))
                # The spawner begins with this one while the next is admitted.
                await asyncio.sleep(0)
        return [task.result() for task in tasks]

    async def _child(
        self, record: SandboxRecord, layers: tuple[Layer, ...], valid_until: float
    ) -> ForkedChild:
        outcome = await self._sandboxes.admit(record, layers, valid_until)
        if isinstance(outcome, DsecError):
            return ForkedChild(error=ErrorReply.of(outcome))
        return ForkedChild(created=outcome.created(self._node))
