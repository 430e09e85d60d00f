"""What one broker knows of the nodes, and what it tells of them. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dsec_broker.books import Books
from dsec_broker.claims import Claims
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import Outcome
from dsec_broker.elastic import ProvidedNode, provided
from dsec_broker.errors import node_unknown
from dsec_broker.events import Ask, HeartbeatSeen, Moment, ResizeAsked, SweepDue
from dsec_broker.listing import held
from dsec_broker.record import Lease, NodeRecord, cu_total
from dsec_common.compute.cards import cards_of
from dsec_common.compute.conservation import PROVIDER_LABEL
from dsec_common.compute.model import Card
from dsec_common.compute.units import UnitTable
from dsec_common.wire.lease import NodeLeases
from dsec_common.wire.node import NodeHeartbeat, NodeInfo, NodeList


class CardsLeft(msgspec.Struct, frozen=True, kw_only=True):
    """Cards of a node that fell silent are named by another one."""

    cards: tuple[str, ...]
    to: str
    at: Moment


Change: TypeAlias = Ask | HeartbeatSeen | SweepDue | ResizeAsked | CardsLeft
"""What can change a node's record."""

Done: TypeAlias = list[tuple[Change, Outcome | None]]
"""Changes that have been worked into a record, and what each will be answered."""


@dataclass(slots=True)
class NodeKnown:
    """What this broker knows of one node.

    ``record`` is what the bucket holds at ``revision``, and ``books`` are the same taken apart, or
    None until they are needed. While the store is ``busy`` with it, ``held`` are the changes that
    wait for the store's word, which the books have in them already, and ``writing`` is what a write
    will make of it.
    """

    record: NodeRecord | None = None
    revision: int = 0
    books: Books | None = None
    heartbeat: NodeHeartbeat | None = None
    seen_at: Moment | None = None
    waiting: deque[Change] = field(default_factory=deque)
    busy: bool = False
    writing: NodeRecord | None = None
    held: Done = field(default_factory=list)

    def adopt(self, record: NodeRecord | None, revision: int) -> None:
        """Know what the bucket holds; books that had anything else in them are made again."""
        self.record, self.revision, self.books = record, revision, None

    def release(self) -> Done:
        """Take back what the store had been asked about."""
        held, self.held, self.writing, self.busy = self.held, [], None, False
        return held


class Looking:
    """The part of the broker's core that answers what is asked about nodes."""

    _config: BrokerConfig
    _units: UnitTable
    _nodes: dict[str, NodeKnown]
    _claims: Claims

    def _elsewhere(self, heartbeat: NodeHeartbeat) -> Mapping[str, str]:
        """Return which of a node's cards are counted for which other node."""
        return self._claims.others(heartbeat.node, heartbeat.gpus)

    def _cards(
        self, heartbeat: NodeHeartbeat, elsewhere: Mapping[str, str]
    ) -> tuple[tuple[Card, ...], tuple[str, ...]]:
        own = [gpu for gpu in heartbeat.gpus if gpu.uuid not in elsewhere]
        cards, notes = cards_of(own, self._units)
        return cards, notes + tuple(
            f"{uuid}: CU 0, node {node} has it; name this node's own cards in nodes.yaml"
            for uuid, node in elsewhere.items()
        )

    def _not_ready(self, entry: NodeKnown, at: Moment) -> str:
        """Return why the node takes no lease, or the empty string."""
        if entry.heartbeat is None or entry.seen_at is None:
            return "no heartbeat since this broker started; one comes each second"
        silence_s = at.monotonic_s - entry.seen_at.monotonic_s
        if silence_s > self._config.node_timeout_s:
            return f"no heartbeat for {silence_s:.1f} s; look at its sandboxd"
        if entry.heartbeat.draining:
            return "it is draining"
        return ""

    def _books(self, node: str) -> Books | None:
        entry = self._nodes[node]
        if entry.books is None and entry.record is not None:
            entry.books = Books(entry.record, self._config.clock_skew_s)
        return entry.books

    def _is_full(self, node: str) -> bool:
        """Return whether the node's record takes no further lease."""
        books = self._books(node)
        return books is not None and books.is_full

    @property
    def names(self) -> list[str]:
        """The nodes that have a record."""
        return sorted(name for name, entry in self._nodes.items() if entry.record is not None)

    def nodes(self, at: Moment) -> NodeList:
        """Return all nodes, sorted by name."""
        found = tuple(
            info
            for name in sorted(self._nodes)
            if (info := self._info(self._nodes[name], at)) is not None
        )
        return NodeList(
            nodes=found,
            cu_total=math.fsum(info.cu_total for info in found),
            cu_allocated=math.fsum(info.cu_allocated for info in found),
        )

    def node(self, name: str, at: Moment) -> NodeInfo:
        """Return one node.

        Raises:
            DsecError: ``not_found`` when it never sent a heartbeat.
        """
        entry = self._nodes.get(name)
        info = None if entry is None else self._info(entry, at)
        if info is None:
            raise node_unknown(name)
        return info

    def _info(self, entry: NodeKnown, at: Moment) -> NodeInfo | None:
        heartbeat = entry.heartbeat or (entry.record.heartbeat if entry.record else None)
        if heartbeat is None:
            return None
        reason = self._not_ready(entry, at)
        # Of the heartbeat itself: a node is worth its units before its record is written.
        cards, notes = self._cards(heartbeat, self._elsewhere(heartbeat))
        if self._is_full(heartbeat.node):
            notes = (*notes, "it takes no lease until some end: its record holds no more of them")
        return NodeInfo(
            node=heartbeat.node,
            ready=not reason,
            reason=reason,
            last_seen_at=entry.seen_at.unix_s if entry.seen_at else 0.0,
            cu_total=cu_total(cards),
            cu_allocated=math.fsum(lease.cu for lease in self._living(entry, at)),
            notes=notes,
            heartbeat=heartbeat,
        )

    def _living(self, entry: NodeKnown, at: Moment) -> Iterator[Lease]:
        """Yield the leases that have not run out, whether or not those have been swept."""
        for lease in entry.record.leases if entry.record else ():
            if lease.expires_at + self._config.clock_skew_s > at.unix_s:
                yield lease

    def ready_records(self, at: Moment) -> Iterator[NodeRecord]:
        """Yield the records of the nodes that take leases."""
        for entry in self._nodes.values():
            if entry.record is not None and not self._not_ready(entry, at):
                yield entry.record

    def provided(self, provider: str, at: Moment) -> Iterator[ProvidedNode]:
        """Yield the living nodes of a node provider."""
        for entry in self._nodes.values():
            beat = entry.heartbeat
            if beat is None or beat.labels.get(PROVIDER_LABEL) != provider:
                continue
            if beat.draining or not self._not_ready(entry, at):
                yield provided(beat, entry.record)

    def leases(self, at: Moment) -> Iterator[NodeLeases]:
        """Yield each node's cards and who holds what of them, by name."""
        for name in sorted(self._nodes):
            entry = self._nodes[name]
            if entry.record is None:
                continue
            yield NodeLeases(
                node=name,
                ready=not self._not_ready(entry, at),
                cards=entry.record.cards,
                leases=tuple(held(lease) for lease in self._living(entry, at)),
                full=self._is_full(name),
            )
