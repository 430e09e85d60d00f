"""The broker's pure core: events in, effects out, no I/O.

Each node has one shared record. Changes to it queue up while a write is outstanding and go
together into the next one (a group commit); a write that came second is worked out again on
what the other broker wrote. A good answer leaves only after the write that makes it true, a bad
one (no units, no such lease) only after a read: what is known here may be a moment old.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from dsec_broker import record as records
from dsec_broker.compute_units import ComputeUnits
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import (
    Answer,
    DeleteRecord,
    Effect,
    Outcome,
    ReadRecord,
    Refuse,
    WriteRecord,
)
from dsec_broker.errors import (
    bad_amount,
    bad_ttl,
    lease_gone,
    no_node_has,
    node_not_ready,
    node_unknown,
)
from dsec_broker.events import (
    Ask,
    Event,
    GrantAsked,
    HeartbeatSeen,
    Moment,
    RecordRead,
    RecordSeen,
    RecordWritten,
    ReleaseAsked,
    RenewAsked,
    StoreFailed,
    SweepDue,
)
from dsec_broker.record import NodeRecord
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.lease import LeaseGranted, LeaseReleased, LeaseRenewed
from dsec_common.wire.node import NodeHeartbeat, NodeInfo, NodeList

Change: TypeAlias = Ask | HeartbeatSeen | SweepDue
"""What can change a node's record."""

Done: TypeAlias = list[tuple[Change, Outcome | None]]
"""Changes that have been worked into a record, and what each will be answered."""


@dataclass(slots=True)
class _Node:
    """What this broker knows of one node.

    ``record`` is what the bucket holds at ``revision``. While the store is ``busy`` with it,
    ``held`` are the changes that wait for the store's word, and ``writing`` is what a write will
    make of it.
    """

    record: NodeRecord | None = None
    revision: int = 0
    heartbeat: NodeHeartbeat | None = None
    seen_at: Moment | None = None
    waiting: deque[Change] = field(default_factory=deque)
    busy: bool = False
    writing: NodeRecord | None = None
    held: Done = field(default_factory=list)

    def release(self) -> Done:
        """Take back what the store had been asked about."""
        held, self.held, self.writing, self.busy = self.held, [], None, False
        return held


class BrokerState:
    """All that the broker knows; :meth:`handle` is its only way to change.

    It is total over :data:`~dsec_broker.events.Event` and raises for none of them: what is wrong
    with a request is an effect.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._units = ComputeUnits(config.cu_table)
        self._nodes: dict[str, _Node] = {}
        # Nodes on which a grant for any node has already been refused.
        self._tried: dict[int, set[str]] = {}

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event and return what is to be done, in order."""
        effects: list[Effect]
        match event:
            case HeartbeatSeen():
                effects = self._on_heartbeat(event)
            case GrantAsked():
                effects = self._on_grant(event)
            case RenewAsked() | ReleaseAsked():
                effects = self._on_lease(event)
            case RecordSeen():
                effects = self._on_record(event)
            case RecordWritten():
                effects = self._on_written(event)
            case RecordRead():
                effects = self._on_read(event)
            case StoreFailed():
                effects = self._on_store_failed(event)
            case SweepDue():
                effects = self._on_sweep(event)
            case _:
                assert_never(event)
        return effects

    # --- Asking -------------------------------------------------------------------------------

    def _on_heartbeat(self, event: HeartbeatSeen) -> list[Effect]:
        entry = self._nodes.setdefault(event.heartbeat.node, _Node())
        entry.heartbeat, entry.seen_at = event.heartbeat, event.at
        return self._change(event.heartbeat.node, event)

    def _on_grant(self, event: GrantAsked) -> list[Effect]:
        refusal: DsecError | None = None
        entry = self._nodes.get(event.node)
        if not 0 < event.cu < math.inf:
            refusal = bad_amount(event.cu)
        elif not 0 < event.ttl_s <= self._config.lease_ttl_max_s:
            refusal = bad_ttl(event.ttl_s, self._config.lease_ttl_max_s)
        elif not event.node:
            self._tried[event.request_id] = set()
            return self._grant_anywhere(event, event.at)
        elif entry is None:
            refusal = node_unknown(event.node)
        elif reason := self._not_ready(entry, event.at):
            refusal = node_not_ready(event.node, reason)
        if refusal is not None:
            return [_refuse(event.request_id, refusal)]
        return self._change(event.node, event)

    def _grant_anywhere(self, event: GrantAsked, at: Moment) -> list[Effect]:
        """Try the ready node with the most free units that has not refused yet.

        When all look full, the best of them is asked all the same: it may have been a moment ago.
        """
        ready = {
            name: entry.record
            for name, entry in self._nodes.items()
            if entry.record is not None and not self._not_ready(entry, at)
        }
        tried = self._tried[event.request_id]
        left = [name for name in ready if name not in tried]
        best = max(left, key=lambda name: (ready[name].cu_free, name), default=None)
        if best is not None and (not tried or ready[best].cu_free >= event.cu):
            tried.add(best)
            return self._change(best, event)
        del self._tried[event.request_id]
        largest = max((record.cu_total for record in ready.values()), default=0.0)
        error = no_node_has(event.cu, largest, ready=len(ready))
        return [Refuse(request_id=event.request_id, error=error)]

    def _on_lease(self, event: RenewAsked | ReleaseAsked) -> list[Effect]:
        try:
            node = ScopedId.parse(event.lease_id, "lease id").owner
        except DsecError as malformed:
            return [_refuse(event.request_id, malformed)]
        if isinstance(event, RenewAsked) and not 0 < event.ttl_s <= self._config.lease_ttl_max_s:
            too_long = bad_ttl(event.ttl_s, self._config.lease_ttl_max_s)
            return [_refuse(event.request_id, too_long)]
        if node not in self._nodes:
            return [_outcome_without_record(node, event)]
        return self._change(node, event)

    # --- The shared record --------------------------------------------------------------------

    def _change(self, node: str, change: Change) -> list[Effect]:
        self._nodes[node].waiting.append(change)
        return self._advance(node, change.at)

    def _advance(self, node: str, at: Moment, *, fresh: bool = False) -> list[Effect]:
        """Work waiting changes into the record: one write for all, or answers when none is due.

        Args:
            node: whose record.
            at: now.
            fresh: the record here is the bucket's of this moment, so bad answers are certain.
        """
        entry = self._nodes[node]
        if entry.busy or not entry.waiting:
            return []
        changes, entry.waiting = entry.waiting, deque()
        current = entry.record
        done: Done = []
        elsewhere: list[GrantAsked] = []
        doubtful = False
        for change in changes:
            doubtful |= not fresh and _is_missing(current, change)
            current, outcome = self._apply(node, current, change, at)
            doubtful |= not fresh and _is_refusal_for_want(outcome)
            if isinstance(change, GrantAsked) and fresh and self._may_go_elsewhere(change, outcome):
                elsewhere.append(change)
            else:
                done.append((change, outcome))
        effects: list[Effect] = []
        if doubtful:
            entry.busy, entry.held = True, done
            effects.append(ReadRecord(node=node))
        elif current is not None and current != entry.record:
            entry.busy, entry.held, entry.writing = True, done, current
            effects.append(WriteRecord(node=node, record=current, revision=entry.revision))
        else:
            effects += self._conclude(done)
        for grant in elsewhere:
            effects += self._grant_anywhere(grant, at)
        return effects

    def _apply(
        self, node: str, record: NodeRecord | None, change: Change, at: Moment
    ) -> tuple[NodeRecord | None, Outcome | None]:
        if isinstance(change, HeartbeatSeen):
            heartbeat = change.heartbeat
            base = record or NodeRecord(heartbeat=records.lasting(heartbeat))
            units = self._units.of_node(heartbeat.gpus)
            ttl_s = self._config.lease_ttl_s
            return records.observe(base, heartbeat, units, at.unix_s, ttl_s), None
        if isinstance(change, SweepDue):
            return (None if record is None else records.sweep(record, at.unix_s)), None
        if record is None:
            return None, _outcome_without_record(node, change)
        try:
            return self._apply_ask(record, change, at)
        except DsecError as error:
            return record, Refuse(request_id=change.request_id, error=error)

    def _apply_ask(
        self, record: NodeRecord, ask: Ask, at: Moment
    ) -> tuple[NodeRecord, Outcome | None]:
        match ask:
            case GrantAsked():
                record, lease = records.grant(
                    # What has run out is free, whether or not it has been swept.
                    records.sweep(record, at.unix_s),
                    lease_id=f"{record.node}.{ask.local}",
                    project=ask.project,
                    holder=ask.holder,
                    cu=ask.cu,
                    now=at.unix_s,
                    ttl_s=ask.ttl_s,
                )
                granted = LeaseGranted(
                    lease_id=lease.lease_id,
                    node=record.node,
                    cu=lease.cu,
                    expires_at=lease.expires_at,
                    token=lease.token,
                )
                return record, Answer(request_id=ask.request_id, reply=granted)
            case RenewAsked():
                record, lease = records.renew(record, ask.lease_id, at.unix_s, ask.ttl_s)
                renewed = LeaseRenewed(lease_id=lease.lease_id, expires_at=lease.expires_at)
                return record, Answer(request_id=ask.request_id, reply=renewed)
            case ReleaseAsked():
                released = LeaseReleased(lease_id=ask.lease_id)
                return (
                    records.release(record, ask.lease_id),
                    Answer(request_id=ask.request_id, reply=released),
                )
            case _:
                assert_never(ask)

    def _may_go_elsewhere(self, grant: GrantAsked, outcome: Outcome | None) -> bool:
        return (
            grant.request_id in self._tried
            and isinstance(outcome, Refuse)
            and outcome.error.code is ErrorCode.EXHAUSTED
        )

    def _conclude(self, done: Done) -> list[Effect]:
        effects: list[Effect] = []
        for _, outcome in done:
            if outcome is not None:
                self._tried.pop(outcome.request_id, None)
                effects.append(outcome)
        return effects

    # --- The store's word ---------------------------------------------------------------------

    def _on_written(self, event: RecordWritten) -> list[Effect]:
        entry = self._nodes[event.node]
        entry.record, entry.revision = entry.writing, event.revision
        concluded = self._conclude(entry.release())
        return concluded + self._advance(event.node, event.at, fresh=True)

    def _on_read(self, event: RecordRead) -> list[Effect]:
        """Work out again, on what is there now, all that was held.

        A record is deleted only when it has no leases, so one that is gone while leases are known
        went with its bucket: what is known is then written again.
        """
        entry = self._nodes[event.node]
        entry.record, entry.revision = event.record or entry.record, event.revision
        entry.waiting.extendleft(change for change, _ in reversed(entry.release()))
        return self._advance(event.node, event.at, fresh=True)

    def _on_store_failed(self, event: StoreFailed) -> list[Effect]:
        """Refuse what was held.

        If a write took effect after all, its leases have no holder and run out; the record here
        is then old, which the next write finds out.
        """
        refused: Done = [
            (change, None if outcome is None else _refuse(outcome.request_id, event.error))
            for change, outcome in self._nodes[event.node].release()
        ]
        return self._conclude(refused) + self._advance(event.node, event.at)

    def _on_record(self, event: RecordSeen) -> list[Effect]:
        """Take over what another broker wrote.

        While the store is busy its word says more, and an older revision says nothing.
        """
        entry = self._nodes.setdefault(event.node, _Node())
        if not entry.busy and event.revision > entry.revision:
            entry.record = event.record
            # The next write of a deleted record creates it.
            entry.revision = event.revision if event.record is not None else 0
        if entry.record is None and entry.seen_at is None and not entry.busy:
            del self._nodes[event.node]
        return []

    # --- Time ---------------------------------------------------------------------------------

    def _on_sweep(self, event: SweepDue) -> list[Effect]:
        effects: list[Effect] = []
        for name in list(self._nodes):
            effects += self._change(name, event)
        for name, entry in list(self._nodes.items()):
            if self._is_forgotten(entry, event.at):
                effects.append(DeleteRecord(node=name, revision=entry.revision))
                del self._nodes[name]
        return effects

    def _is_forgotten(self, entry: _Node, at: Moment) -> bool:
        if entry.record is None or entry.record.leases or entry.busy:
            return False
        if entry.seen_at is None:
            # Known only from an earlier life: its silence counts from the first sweep of this one.
            entry.seen_at = Moment(0.0, at.monotonic_s)
            return False
        return at.monotonic_s - entry.seen_at.monotonic_s > self._config.node_forget_s

    def _not_ready(self, entry: _Node, at: Moment) -> str:
        """Return why the node takes no lease, or the empty string."""
        if entry.heartbeat is None or entry.seen_at is None:
            return "no heartbeat since this broker started; one comes each second"
        silence_s = at.monotonic_s - entry.seen_at.monotonic_s
        if silence_s > self._config.node_timeout_s:
            return f"no heartbeat for {silence_s:.1f} s; look at its sandboxd"
        if entry.heartbeat.draining:
            return "it is draining"
        return ""

    # --- Looking ------------------------------------------------------------------------------

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

    def _info(self, entry: _Node, at: Moment) -> NodeInfo | None:
        heartbeat = entry.heartbeat or (entry.record.heartbeat if entry.record else None)
        if heartbeat is None:
            return None
        reason = self._not_ready(entry, at)
        # Of the heartbeat itself: a node is worth its units before its record is written.
        cu_total, notes = self._units.of_node(heartbeat.gpus)
        return NodeInfo(
            node=heartbeat.node,
            ready=not reason,
            reason=reason,
            last_seen_at=entry.seen_at.unix_s if entry.seen_at else 0.0,
            cu_total=cu_total,
            cu_allocated=entry.record.cu_allocated if entry.record else 0.0,
            notes=notes,
            heartbeat=heartbeat,
        )

    def validate_state(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken; tests call it after each event."""
        waiting: set[int] = set()
        for name, entry in self._nodes.items():
            assert entry.busy or not (entry.held or entry.writing), name  # noqa: S101  invariant
            assert entry.busy or not entry.waiting, name  # noqa: S101  invariant
            for record in filter(None, (entry.record, entry.writing)):
                ids = [lease.lease_id for lease in record.leases]
                tokens = [lease.token for lease in record.leases]
                assert record.node == name  # noqa: S101  invariant
                assert len(set(ids)) == len(ids)  # noqa: S101  invariant
                assert all(ScopedId.parse(lease_id).owner == name for lease_id in ids)  # noqa: S101  invariant
                assert tokens == sorted(set(tokens))  # noqa: S101  invariant
                assert all(token <= record.last_token for token in tokens)  # noqa: S101  invariant
            changes = [*entry.waiting, *(change for change, _ in entry.held)]
            waiting |= {change.request_id for change in changes if isinstance(change, GrantAsked)}
        assert set(self._tried) <= waiting  # noqa: S101  invariant


def _refuse(request_id: int, error: DsecError) -> Outcome:
    return Refuse(request_id=request_id, error=error)


def _is_missing(record: NodeRecord | None, change: Change) -> bool:
    """Return whether a lease is to be given back that the record does not hold."""
    if record is None or not isinstance(change, ReleaseAsked):
        return isinstance(change, ReleaseAsked)
    return all(lease.lease_id != change.lease_id for lease in record.leases)


def _is_refusal_for_want(outcome: Outcome | None) -> bool:
    """Return whether a refusal may be untrue by now: another broker changes units and leases."""
    wants = {ErrorCode.EXHAUSTED, ErrorCode.EXPIRED}
    return isinstance(outcome, Refuse) and outcome.error.code in wants


def _outcome_without_record(node: str, ask: Ask) -> Outcome:
    """Return what a request about a node without a record gets."""
    match ask:
        case GrantAsked():
            return _refuse(ask.request_id, node_not_ready(node, "it is not known yet"))
        case RenewAsked():
            return _refuse(ask.request_id, lease_gone(ask.lease_id))
        case ReleaseAsked():
            # Nothing holds the units: what was asked for is so.
            return Answer(request_id=ask.request_id, reply=LeaseReleased(lease_id=ask.lease_id))
        case _:
            assert_never(ask)
