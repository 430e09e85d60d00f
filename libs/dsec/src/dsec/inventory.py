"""What a client reads of the platform: its nodes, as its broker knows them, and traces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import msgspec

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec_common import subjects
from dsec_common.subjects import ScopedId
from dsec_common.wire.cost import Cost, GetCost
from dsec_common.wire.lease import ForceUnlock, LeasesUnlocked, UnlockedLease
from dsec_common.wire.node import InspectNode, ListNodes, NodeInfo, NodeList
from dsec_common.wire.trace import GetTrace, Trace

_TIMEOUT_S: Final = 10.0


async def list_nodes(channel: Channel) -> NodeList:
    """Return all nodes, of as many pages as there are, and the cluster's Compute Units.

    Raises:
        DsecError: ``unavailable`` or ``timeout`` when no broker answers.
    """
    found: list[NodeInfo] = []
    while True:
        page = await channel.ask(
            subjects.node(channel.project, "list"),
            ListNodes(after=found[-1].node if found else ""),
            NodeList,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )
        found += page.nodes
        if not page.more or not page.nodes:
            return msgspec.structs.replace(page, nodes=tuple(found), more=False)


class Readings(ABC):
    """What the client has of nodes and traces."""

    @abstractmethod
    def _connected(self) -> Channel:
        """Return the connection, or raise ``invalid`` before there is one."""

    async def nodes(self) -> NodeList:
        """Return all nodes, ready or not, and the cluster's Compute Units."""
        return await list_nodes(self._connected())

    async def node(self, name: str) -> NodeInfo:
        """Return one node.

        Raises:
            DsecError: ``not_found`` when the broker does not know it.
        """
        return await self._connected().ask(
            subjects.node(self._connected().project, "inspect"),
            InspectNode(node=subjects.validate_node(name)),
            NodeInfo,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def cost(self, *, since: float = 0.0, until: float = 0.0, by_agent: bool = True) -> Cost:
        """Return what the project held and used, added up by the hour in which it ended.

        What goes on is in it up to its last segment, a few minutes ago at most.

        Args:
            since: Unix seconds.
            until: Unix seconds, or 0: now.
            by_agent: a row for each kind of agent; else one in all.

        Raises:
            DsecError: ``unavailable`` or ``timeout`` when no tracer answers.
        """
        return await self._connected().ask(
            subjects.trace(self._connected().project, "cost"),
            GetCost(since=since, until=until, by_agent=by_agent),
            Cost,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def force_unlock(
        self, *, lease_id: str = "", node: str = "", reason: str = ""
    ) -> LeasesUnlocked:
        """End leases of the project on Compute Units, whoever holds them, and return which.

        One by its id, all on a node, or with neither all there are. Their units are free at once;
        sandboxes that live on them end. ``reason`` is told in the audit event.

        Raises:
            DsecError: ``not_found`` for a node that the broker does not know; what fails after some
                have ended leaves the others, and the events tell which ended.
        """
        found: list[UnlockedLease] = []
        after = ""
        while True:
            page = await self._connected().ask(
                subjects.force_unlock(self._connected().project),
                ForceUnlock(lease_id=lease_id, node=node, reason=reason, after=after),
                LeasesUnlocked,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
            found += page.leases
            if not page.more:
                return msgspec.structs.replace(page, leases=tuple(found))
            after = ScopedId.parse(found[-1].lease_id, "lease id").owner

    async def trace(self, sandbox_id: str) -> Trace:
        """Return all steps of a sandbox in order, from its behaviour log; it may have ended.

        Raises:
            DsecError: ``not_found`` when the tracer has read nothing of it (yet).
        """
        ScopedId.parse(sandbox_id)
        after_seq = 0
        whole: Trace | None = None
        while True:
            page = await self._connected().ask(
                subjects.trace(self._connected().project, "get"),
                GetTrace(sandbox_id=sandbox_id, after_seq=after_seq),
                Trace,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
            steps = (whole.steps if whole else ()) + page.steps
            whole = msgspec.structs.replace(page, steps=steps, more=False)
            if not page.more or not page.steps:
                return whole
            after_seq = page.steps[-1].seq
