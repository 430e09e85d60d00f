"""The broker's pure core: events in, effects out, no I/O.

Each node has one shared record. Changes to it queue up while a write is outstanding and go
together into the next one (a group commit); a write that came second is worked out again on
what the other broker wrote. A good answer leaves only after the write that makes it true, one that
needs no write and a bad one (no units, no such lease) only after a read: what is known here may be
a moment old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import assert_never

from dsec_broker import audit
from dsec_broker.asks import (
    apply_ask,
    flaw_of_names,
    is_doubtful,
    outcome_without_record,
    refuse,
)
from dsec_broker.books import Books
from dsec_broker.choosing import Candidate, in_order
from dsec_broker.claims import Claims
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import (
    Alarm,
    Answer,
    DeleteRecord,
    Effect,
    Outcome,
    ReadRecord,
    Refuse,
    Resize,
    TellSegments,
    WriteRecord,
)
from dsec_broker.errors import (
    bad_demand,
    bad_ttl,
    no_node_has,
    node_not_ready,
    node_unknown,
)
from dsec_broker.events import (
    Event,
    GrantAsked,
    HeartbeatSeen,
    Moment,
    RecordRead,
    RecordSeen,
    RecordWritten,
    ReleaseAsked,
    RenewAsked,
    ResizeAsked,
    SegmentsTold,
    StoreFailed,
    SweepDue,
    TransferAsked,
    UnlockAsked,
)
from dsec_broker.looking import CardsLeft, Change, Done, Looking, NodeKnown
from dsec_broker.metering import PriceOf, left_untold, newly_untold
from dsec_broker.record import NodeRecord, lasting
from dsec_broker.revoking import gone
from dsec_broker.shares import newly_resized, resize, room_for, unheard
from dsec_common.compute.units import DEFAULT_PRICE, UnitTable, prices
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.node import NodeHeartbeat

_REORDERED_S = 5.0
"""A heartbeat sent up to so long before the newest one came late; further back, a clock was set."""

_LEFT_S = 30.0
"""A node that is silent for so long leaves cards without leases to another that names them."""


class BrokerState(Looking):
    """All that the broker knows; :meth:`handle` is its only way to change.

    It is total over :data:`~dsec_broker.events.Event` and raises for none of them: what is wrong
    with a request is an effect.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._units = UnitTable(config.cu_table)
        self._prices = prices(config.prices)
        self._nodes: dict[str, NodeKnown] = {}
        self._claims = Claims()
        # Nodes on which a grant for any node has already been refused.
        self._tried: dict[int, set[str]] = {}

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901  one case per kind of event
        """Take in one event and return what is to be done, in order."""
        effects: list[Effect]
        match event:
            case HeartbeatSeen():
                effects = self._on_heartbeat(event)
            case GrantAsked():
                effects = self._on_grant(event)
            case RenewAsked() | ReleaseAsked() | TransferAsked():
                effects = self._on_lease(event)
            case UnlockAsked() | ResizeAsked():
                effects = self._on_one_node(event)
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
            case SegmentsTold():
                effects = self._on_told(event)
            case _:
                assert_never(event)
        return effects

    # --- Asking -------------------------------------------------------------------------------

    def _on_heartbeat(self, event: HeartbeatSeen) -> list[Effect]:
        beat = event.heartbeat
        entry = self._nodes.setdefault(beat.node, NodeKnown())
        last = entry.heartbeat
        late_s = last.sent_at - beat.sent_at if last and last.epoch == beat.epoch else 0.0
        if 0 < late_s < _REORDERED_S:
            return []
        entry.heartbeat, entry.seen_at = beat, event.at
        told: list[Effect] = []
        if entry.record is not None:
            resized = unheard(entry.record, beat)
            told += [Resize(node=beat.node, lease=lease) for lease in resized]
        return told + self._claim(beat, event.at) + self._change(beat.node, event)

    def _claim(self, beat: NodeHeartbeat, at: Moment) -> list[Effect]:
        """Have nodes that left their cards to this one lose them, which it gets after that."""
        effects: list[Effect] = []
        elsewhere = self._elsewhere(beat)
        for node in dict.fromkeys(elsewhere.values()):
            seen_at = self._nodes[node].seen_at
            if seen_at is not None and at.monotonic_s - seen_at.monotonic_s > _LEFT_S:
                cards = tuple(uuid for uuid, other in elsewhere.items() if other == node)
                effects += self._change(node, CardsLeft(cards=cards, to=beat.node, at=at))
        return effects

    def _on_grant(self, event: GrantAsked) -> list[Effect]:
        refusal: DsecError | None = None
        asked = event.asked
        entry = self._nodes.get(asked.node)
        if asked.wanted.flaw:
            refusal = bad_demand(asked.wanted)
        elif not 0 < asked.ttl_s <= self._config.lease_ttl_max_s:
            refusal = bad_ttl(asked.ttl_s, self._config.lease_ttl_max_s)
        elif flaw := flaw_of_names(asked.holder, asked.agent):
            refusal = flaw
        elif not asked.node:
            self._tried[event.request_id] = set()
            return self._grant_anywhere(event, event.at)
        elif entry is None:
            refusal = node_unknown(asked.node)
        elif reason := self._not_ready(entry, event.at):
            refusal = node_not_ready(asked.node, reason)
        if refusal is not None:
            return [refuse(event.request_id, refusal)]
        return self._change(asked.node, event)

    def _grant_anywhere(self, event: GrantAsked, at: Moment) -> list[Effect]:
        """Try the first ready node that can give it and has not refused yet.

        A node that has granted just this before is asked first, the others as
        :func:`~dsec_broker.choosing.in_order` says. When all look full, the first of them is asked
        all the same: it may have been full a moment ago only.
        """
        tried = self._tried[event.request_id]
        best = self._best_node(event, at, tried)
        if best:
            tried.add(best)
            return self._change(best, event)
        del self._tried[event.request_id]
        demand = event.asked.wanted
        ready = [books for _, books, _ in self._ready(at)]
        possible = any(books.fits_when_empty(demand) for books in ready)
        largest_cu = max((books.cu_total for books in ready), default=0.0)
        full = sum(books.is_full for books in ready)
        error = no_node_has(demand, largest_cu, ready=len(ready), possible=possible, full=full)
        return [refuse(event.request_id, error)]

    def _best_node(self, event: GrantAsked, at: Moment, tried: set[str]) -> str:
        """Return the node to try next, or the empty string."""
        asked = event.asked
        for name in self._nodes:
            books = self._books(name)
            if name not in tried and books and books.lease(f"{name}.{event.local}"):
                return name
        ready = (Candidate(name, books, beat) for name, books, beat in self._ready(at))
        ordered = in_order(ready, asked, self._prices, self._config.burst_factor)
        left = [candidate for candidate in ordered if candidate.name not in tried]
        for name, books, _ in left:
            fits = books.pool.has(asked.slices) if asked.slices else books.pool.find(asked.wanted)
            if fits:
                return name
        for name, books, _ in left:
            if room_for(books, asked):
                return name
        return left[0].name if left and not tried else ""

    def _ready(self, at: Moment) -> Iterator[tuple[str, Books, NodeHeartbeat]]:
        for name, entry in self._nodes.items():
            books, beat = self._books(name), entry.heartbeat
            if books is not None and beat is not None and not self._not_ready(entry, at):
                yield name, books, beat

    def _on_lease(self, event: RenewAsked | ReleaseAsked | TransferAsked) -> list[Effect]:
        try:
            node = ScopedId.parse(event.lease_id, "lease id").owner
        except DsecError as malformed:
            return [refuse(event.request_id, malformed)]
        most_s = self._config.lease_ttl_max_s
        if not isinstance(event, ReleaseAsked) and not 0 < event.ttl_s <= most_s:
            return [refuse(event.request_id, bad_ttl(event.ttl_s, most_s))]
        if isinstance(event, TransferAsked) and (flaw := flaw_of_names(event.holder, event.agent)):
            return [refuse(event.request_id, flaw)]
        if node not in self._nodes:
            return [outcome_without_record(node, event)]
        return self._change(node, event)

    def _on_one_node(self, event: UnlockAsked | ResizeAsked) -> list[Effect]:
        if event.node in self._nodes:
            return self._change(event.node, event)
        if isinstance(event, ResizeAsked):
            return []
        return [refuse(event.request_id, node_unknown(event.node))]

    # --- The shared record --------------------------------------------------------------------

    def _change(self, node: str, change: Change) -> list[Effect]:
        self._nodes[node].waiting.append(change)
        return self._advance(node, change.at)

    def _advance(
        self, node: str, at: Moment, *, fresh: bool = False, judged: int = 0
    ) -> list[Effect]:
        """Work waiting changes into the record: one write for all, or answers when none is due.

        Args:
            node: whose record.
            at: now.
            fresh: the record here is the bucket's of this moment, so bad answers are certain.
            judged: so many of the changes waited already when that was read. Of a heartbeat that
                has come since, the record says nothing yet.
        """
        entry = self._nodes[node]
        if entry.busy or not entry.waiting:
            return []
        changes, entry.waiting = entry.waiting, deque()
        done: Done = []
        elsewhere: list[GrantAsked] = []
        doubtful = False
        for number, change in enumerate(changes):
            certain = number < judged if isinstance(change, HeartbeatSeen) else fresh
            doubtful |= not certain and is_doubtful(self._books(node), change)
            outcome = self._apply(node, change, at)
            doubtful |= not fresh and _is_refusal_for_want(outcome)
            if isinstance(change, GrantAsked) and fresh and self._may_go_elsewhere(change, outcome):
                elsewhere.append(change)
            else:
                done.append((change, outcome))
        books = self._books(node)
        is_changed = books is not None and books.dirty
        # What no write will confirm, such as a grant that is sent again, another may have ended.
        doubtful |= not fresh and not is_changed and any(_is_good(outcome) for _, outcome in done)
        effects: list[Effect] = []
        if doubtful:
            entry.busy, entry.held = True, done
            effects.append(ReadRecord(node=node))
        elif books is not None and is_changed:
            if self._config.meters:
                books.meter(at.unix_s, self._config.metering_interval_s, self._price_of(entry))
            entry.busy, entry.held, entry.writing = True, done, books.record()
            effects.append(WriteRecord(node=node, record=entry.writing, revision=entry.revision))
        else:
            effects += self._conclude(done)
        for grant in elsewhere:
            effects += self._grant_anywhere(grant, at)
        return effects

    def _apply(self, node: str, change: Change, at: Moment) -> Outcome | None:
        """Work one change into the node's books; return what it will be answered."""
        books = self._books(node)
        if isinstance(change, HeartbeatSeen):
            if books is None:
                fresh = NodeRecord(heartbeat=lasting(change.heartbeat))
                books = self._nodes[node].books = Books(fresh, self._config.clock_skew_s)
                books.dirty = True
            beat, ttl_s = change.heartbeat, self._config.lease_ttl_s
            books.observe(beat, self._elsewhere(beat), self._cards, at.unix_s, ttl_s)
            return None
        if isinstance(change, SweepDue | ResizeAsked | CardsLeft):
            if books is not None:
                self._note(books, change, at)
            return None
        if books is None:
            return outcome_without_record(node, change)
        try:
            return apply_ask(books, change, at)
        except DsecError as error:
            return Refuse(request_id=change.request_id, error=error)

    def _note(self, books: Books, change: SweepDue | ResizeAsked | CardsLeft, at: Moment) -> None:
        match change:
            case SweepDue():
                books.sweep(at.unix_s)
                if self._config.meters:
                    books.tidy(at.unix_s, self._config.metering_interval_s)
            case ResizeAsked():
                resize(books, change.targets, change.reason)
            case CardsLeft():
                books.leave(change.cards, change.to)
            case _:
                assert_never(change)

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
        told = newly_resized(entry.record, entry.writing)
        untold = newly_untold(entry.record, entry.writing)
        entry.record, entry.revision = entry.writing, event.revision
        self._claims.know(event.node, entry.record)
        effects = self._check(event.node)
        effects += [Resize(node=event.node, lease=lease) for lease in told]
        if untold:
            effects.append(TellSegments(node=event.node, segments=untold))
        effects += self._conclude(entry.release())
        return effects + self._advance(event.node, event.at, fresh=True)

    def _on_told(self, event: SegmentsTold) -> list[Effect]:
        books = self._books(event.node) if event.node in self._nodes else None
        if books is not None:
            books.told(event.keys)
        return []

    def _price_of(self, entry: NodeKnown) -> PriceOf:
        """Return what a unit of a slice of this node costs for an hour."""
        heartbeat = entry.heartbeat or (entry.record.heartbeat if entry.record else None)
        # Of all its cards: a lease outlives what becomes of its card.
        cards = self._cards(heartbeat, {})[0] if heartbeat else ()
        models = {card.uuid: card.model for card in cards}
        return lambda slice_: self._prices.get(models.get(slice_.card, ""), DEFAULT_PRICE)

    def _check(self, node: str) -> list[Effect]:
        """Return the alarm when what was just written does not add up."""
        entry = self._nodes[node]
        books = self._books(node)
        if entry.record is None or books is None:
            return []
        found = audit.violations(entry.record, books.pool.free())
        return [Alarm(node=node, violations=found)] if found else []

    def _on_read(self, event: RecordRead) -> list[Effect]:
        """Work out again, on what is there now, all that was held.

        A record is deleted only when it has no leases, so one that is gone while leases are known
        went with its bucket: what is known is then written again, and until something is written no
        lease is known to have ended.
        """
        entry = self._nodes[event.node]
        entry.adopt(event.record or entry.record, event.revision)
        self._claims.know(event.node, entry.record)
        held = [change for change, _ in entry.release()]
        beats = [change.heartbeat for change in held if isinstance(change, HeartbeatSeen)]
        if event.record is None and beats and (books := self._books(event.node)):
            books.dirty = True
        told = [*gone(event.record, beats[-1])] if event.record and beats else []
        entry.waiting.extendleft(reversed(held))
        return told + self._advance(event.node, event.at, fresh=True, judged=len(held))

    def _on_store_failed(self, event: StoreFailed) -> list[Effect]:
        """Refuse what was held.

        If a write took effect after all, its leases have no holder and run out; the record here
        is then old, which the next write finds out.
        """
        entry = self._nodes[event.node]
        entry.adopt(entry.record, entry.revision)
        refused: Done = [
            (change, None if outcome is None else refuse(outcome.request_id, event.error))
            for change, outcome in entry.release()
        ]
        return self._conclude(refused) + self._advance(event.node, event.at)

    def _on_record(self, event: RecordSeen) -> list[Effect]:
        """Take over what another broker wrote.

        While the store is busy its word says more, and an older revision says nothing.
        """
        entry = self._nodes.setdefault(event.node, NodeKnown())
        if not entry.busy and event.revision > entry.revision:
            # The next write of a deleted record creates it.
            entry.adopt(event.record, event.revision if event.record is not None else 0)
            self._claims.know(event.node, event.record)
        if entry.record is None and entry.seen_at is None and not entry.busy:
            del self._nodes[event.node]
        return []

    # --- Time ---------------------------------------------------------------------------------

    def _on_sweep(self, event: SweepDue) -> list[Effect]:
        effects: list[Effect] = []
        for name in list(self._nodes):
            effects += self._change(name, event)
            if self._config.meters and (left := left_untold(self._nodes[name].record, event.at)):
                effects.append(TellSegments(node=name, segments=left))
        for name, entry in list(self._nodes.items()):
            if self._is_forgotten(entry, event.at):
                effects.append(DeleteRecord(node=name, revision=entry.revision))
                self._claims.know(name, None)
                del self._nodes[name]
        return effects

    def _is_forgotten(self, entry: NodeKnown, at: Moment) -> bool:
        if entry.record is None or entry.record.leases or entry.record.untold or entry.busy:
            return False
        if entry.seen_at is None:
            # Known only from an earlier life: its silence counts from the first sweep of this one.
            entry.seen_at = Moment(0.0, at.monotonic_s)
            return False
        return at.monotonic_s - entry.seen_at.monotonic_s > self._config.node_forget_s

    def validate_state(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken; tests call it after each event."""
        waiting: set[int] = set()
        for name, entry in self._nodes.items():
            assert entry.busy or not (entry.held or entry.writing), name  # noqa: S101  invariant
            assert entry.busy or not entry.waiting, name  # noqa: S101  invariant
            if entry.record is not None and not entry.busy and (books := self._books(name)):
                assert not books.dirty, name  # noqa: S101  invariant
                assert not audit.violations(entry.record, books.pool.free()), name  # noqa: S101  invariant
            for record in filter(None, (entry.record, entry.writing)):
                audit.check_record(name, record)
            changes = [*entry.waiting, *(change for change, _ in entry.held)]
            waiting |= {change.request_id for change in changes if isinstance(change, GrantAsked)}
        assert set(self._tried) <= waiting  # noqa: S101  invariant


def _is_good(outcome: Outcome | None) -> bool:
    return isinstance(outcome, Answer)


def _is_refusal_for_want(outcome: Outcome | None) -> bool:
    """Return whether a refusal may be untrue by now: another broker changes units and leases."""
    wants = {ErrorCode.EXHAUSTED, ErrorCode.EXPIRED}
    return isinstance(outcome, Refuse) and outcome.error.code in wants
