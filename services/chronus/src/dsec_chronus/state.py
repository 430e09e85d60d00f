"""A shard's pure core: events in, effects out, no I/O.

Changes queue up while a frame is outstanding and go together into the next one (group commit). A
change is decided on when its frame is made, against what is durable and what the same frame holds
before it; it takes effect, is answered and is delivered only when the frame is durable. What can
be read here is therefore always in the journal, and a new owner of the shard reads the same.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, assert_never

from dsec_chronus.config import ChronusConfig
from dsec_chronus.effects import Answer, Effect, Outcome, PurgeJournal, Refuse, WriteFrame
from dsec_chronus.errors import (
    bad_seq,
    rollout_closed,
    rollout_unknown,
    shard_full,
    too_many_waiting,
)
from dsec_chronus.events import (
    AwaitAsked,
    Change,
    ClockTicked,
    CloseAsked,
    Event,
    FeedbackAsked,
    FrameFailed,
    FrameRead,
    FrameWritten,
    InspectAsked,
    Look,
    Moment,
    NextAsked,
    OpenAsked,
    ReportAsked,
    ShardLost,
    SweepDue,
)
from dsec_chronus.polls import Poll, Polls
from dsec_chronus.records import Record, RolloutBegun, size_of
from dsec_chronus.rollout import Draft, Rollout
from dsec_chronus.shares import Shares
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message
from dsec_common.wire.rollout import RolloutOpened, RolloutState

FRAME_BYTES: Final = 256 * 1024
"""A frame takes no further change from here on; with the last one it fits a NATS message."""

FRAME_RECORDS: Final = 1024

WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Payloads of changes that may wait for the journal."""


@dataclass(slots=True)
class _Writing:
    """The outstanding frame: what it holds and who is told what once it is durable."""

    frame: WriteFrame
    outcomes: list[Outcome] = field(default_factory=list)


class ShardState:
    """All that is known of one shard; :meth:`handle` is its only way to change.

    It is total over :data:`~dsec_chronus.events.Event` and raises for none of them: what is wrong
    with a request is an effect.
    """

    def __init__(self, shard: str, config: ChronusConfig) -> None:
        self._shard = shard
        self._config = config
        self._rollouts: dict[str, Rollout] = {}
        self._polls = Polls()
        self._sizes = Shares()
        self._waiting: deque[Change] = deque()
        self._waiting_bytes = 0
        self._writing: _Writing | None = None
        self._drafts: dict[str, Draft] = {}
        # The journal since the last snapshot, the parts of one that is being written, and where
        # its first part is.
        self._tail_frames = 0
        self._tail_bytes = 0
        self._parts: deque[WriteFrame] = deque()
        self._snapshot_sequence = 0
        self._snapshot_frames = 0
        # A snapshot that is being read; None when none is.
        self._reading: dict[str, Rollout] | None = None

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event and return what is to be done, in order."""
        effects: list[Effect]
        match event:
            case OpenAsked() | ReportAsked() | FeedbackAsked() | CloseAsked():
                effects = self._on_change(event)
            case InspectAsked() | NextAsked() | AwaitAsked():
                effects = self._on_look(event)
            case FrameRead():
                effects = self._on_read(event)
            case FrameWritten():
                effects = self._on_written(event)
            case FrameFailed():
                effects = self._on_failed(event)
            case ClockTicked():
                effects = [self._give_up(poll) for poll in self._polls.expired(_s(event.at))]
            case SweepDue():
                effects = self._on_sweep(event)
            case ShardLost():
                effects = self._on_lost(event)
            case _:
                assert_never(event)
        return effects

    # --- Changes ------------------------------------------------------------------------------

    def _on_change(self, asked: Change) -> list[Effect]:
        limit = self._config.waiting_max
        if len(self._waiting) >= limit:
            refusal = too_many_waiting(self._shard, "changes", limit)
            return [Refuse(request_id=asked.request_id, error=refusal)]
        if self._waiting_bytes >= WAITING_BYTES_MAX:
            refusal = too_many_waiting(self._shard, "bytes of changes", WAITING_BYTES_MAX)
            return [Refuse(request_id=asked.request_id, error=refusal)]
        self._waiting.append(asked)
        self._waiting_bytes += _payload_bytes(asked)
        return self._advance()

    def _advance(self) -> list[Effect]:
        """Make a frame of the waiting changes; answer at once those that need none."""
        effects: list[Effect] = []
        while self._writing is None and self._waiting:
            records, outcomes = self._take_waiting()
            if records:
                frame = WriteFrame(records=tuple(records))
                self._writing = _Writing(frame, outcomes)
                effects.append(frame)
            else:
                self._drafts.clear()
                effects += outcomes
        return effects

    def _take_waiting(self) -> tuple[list[Record], list[Outcome]]:
        records: list[Record] = []
        outcomes: list[Outcome] = []
        size = 0
        while self._waiting and size < FRAME_BYTES and len(records) < FRAME_RECORDS:
            asked = self._waiting.popleft()
            self._waiting_bytes -= _payload_bytes(asked)
            try:
                record, reply = self._decide(asked, size)
            except DsecError as error:
                outcomes.append(Refuse(request_id=asked.request_id, error=error))
                continue
            outcomes.append(Answer(request_id=asked.request_id, reply=reply))
            if record is not None:
                records.append(record)
                size += size_of(record)
        return records, outcomes

    def _decide(self, asked: Change, frame_bytes: int) -> tuple[Record | None, Message]:
        draft = self._draft(asked)
        if not isinstance(asked, CloseAsked) and (
            not self._sizes.has_room(asked.project, self._config.shard_bytes_max, frame_bytes)
        ):
            # Closing is how room is made again.
            limit = self._sizes.limit_of(asked.project, self._config.shard_bytes_max)
            raise shard_full(self._shard, limit)
        if draft is None and isinstance(asked, OpenAsked):
            begun = RolloutBegun(
                local=asked.local, at=asked.at.unix_s, project=asked.project, labels=asked.labels
            )
            self._drafts[asked.local] = Draft(Rollout(begun))
            return begun, RolloutOpened(rollout_id=self._id(asked.local))
        if draft is None or draft.rollout.begun.project != asked.project:
            raise rollout_unknown(self._id(asked.local))
        return draft.decide(asked, self._id(asked.local))

    def _draft(self, asked: Change) -> Draft | None:
        draft = self._drafts.get(asked.local)
        rollout = self._rollouts.get(asked.local)
        if draft is None and rollout is not None:
            draft = self._drafts[asked.local] = Draft(rollout)
        return draft

    def _id(self, local: str) -> str:
        return f"{self._shard}.{local}"

    # --- The journal's word -------------------------------------------------------------------

    def _on_written(self, event: FrameWritten) -> list[Effect]:
        if self._writing is None:
            return []
        written, self._writing = self._writing, None
        self._drafts.clear()
        if written.frame.snapshot_part:
            return self._on_part_written(written.frame, event)
        self._count(written.frame.records)
        for record in written.frame.records:
            self._apply(record, self._rollouts)
        effects: list[Effect] = [*written.outcomes]
        for local in dict.fromkeys(record.local for record in written.frame.records):
            effects += self._deliver(local)
        if self._is_snapshot_due():
            self._parts.extend(self._snapshot())
        return effects + self._continue()

    def _on_part_written(self, frame: WriteFrame, event: FrameWritten) -> list[Effect]:
        if frame.snapshot_part == 1:
            self._snapshot_sequence = event.sequence
        effects: list[Effect] = []
        if frame.snapshot_complete:
            self._tail_frames = self._tail_bytes = 0
            self._snapshot_frames = frame.snapshot_part
            effects.append(PurgeJournal(sequence=self._snapshot_sequence))
        return effects + self._continue()

    def _continue(self) -> list[Effect]:
        """Write the next part of a snapshot before anything else, since nothing may come between.

        All parts go out without a pause, so that changes wait for milliseconds.
        """
        if not self._parts:
            return self._advance()
        part = self._parts.popleft()
        self._writing = _Writing(part)
        return [part]

    def _on_failed(self, event: FrameFailed) -> list[Effect]:
        if self._writing is None:
            return []
        failed, self._writing = self._writing, None
        self._drafts.clear()
        if failed.frame.snapshot_part:
            # The next snapshot is due after as many frames again.
            self._parts.clear()
            self._tail_frames = self._tail_bytes = 0
        refused: list[Effect] = [
            Refuse(request_id=outcome.request_id, error=event.error) for outcome in failed.outcomes
        ]
        return refused + self._advance()

    def _on_read(self, event: FrameRead) -> list[Effect]:
        frame = event.frame
        if not frame.snapshot_part:
            self._reading = None
            self._count(frame.records)
            for record in frame.records:
                self._apply(record, self._rollouts)
            return []
        if frame.snapshot_part == 1:
            self._reading, self._snapshot_sequence = {}, event.sequence
        if self._reading is None:
            return []
        for record in frame.records:
            self._apply(record, self._reading)
        if not frame.snapshot_complete:
            return []
        self._rollouts, self._reading = self._reading, None
        self._sizes.clear()
        for rollout in self._rollouts.values():
            self._sizes.add(rollout.begun.project, rollout.size_bytes)
        self._tail_frames = self._tail_bytes = 0
        self._snapshot_frames = frame.snapshot_part
        return [PurgeJournal(sequence=self._snapshot_sequence)]

    def _apply(self, record: Record, rollouts: dict[str, Rollout]) -> None:
        """Take in a durable fact; one about a rollout that is forgotten is forgotten too."""
        if isinstance(record, RolloutBegun):
            if record.local in rollouts:
                return
            rollout = rollouts[record.local] = Rollout(
                record, touched_at=record.at, size_bytes=size_of(record)
            )
            before = 0
        elif (found := rollouts.get(record.local)) is not None:
            rollout, before = found, found.size_bytes
            rollout.apply(record)
        else:
            return
        if rollouts is self._rollouts:
            self._sizes.add(rollout.begun.project, rollout.size_bytes - before)

    def _count(self, records: Iterable[Record]) -> None:
        self._tail_frames += 1
        self._tail_bytes += sum(map(size_of, records))

    # --- Snapshots ----------------------------------------------------------------------------

    def _is_snapshot_due(self) -> bool:
        """Return whether the journal is worth shortening: its cost is that of the whole shard."""
        config = self._config
        return (
            self._tail_frames >= config.snapshot_after_frames + 4 * self._snapshot_frames
            or self._tail_bytes >= config.snapshot_after_bytes + self._sizes.total
        )

    def _snapshot(self) -> Iterator[WriteFrame]:
        """Yield the parts of a snapshot of what is durable now."""
        records: list[Record] = []
        size, part = 0, 0
        for rollout in self._rollouts.values():
            for record in rollout.records():
                if size >= FRAME_BYTES or len(records) >= FRAME_RECORDS:
                    part += 1
                    yield WriteFrame(records=tuple(records), snapshot_part=part)
                    records, size = [], 0
                records.append(record)
                size += size_of(record)
        yield WriteFrame(records=tuple(records), snapshot_part=part + 1, snapshot_complete=True)

    # --- Looking and waiting ------------------------------------------------------------------

    def _on_look(self, asked: Look) -> list[Effect]:
        rollout = self._rollouts.get(asked.local)
        request_id = asked.request_id
        if rollout is None or rollout.begun.project != asked.project:
            return [Refuse(request_id=request_id, error=rollout_unknown(self._id(asked.local)))]
        match asked:
            case InspectAsked():
                return [Answer(request_id=request_id, reply=rollout.info(self._id(asked.local)))]
            case AwaitAsked() if asked.seq < 1:
                return [Refuse(request_id=request_id, error=bad_seq(asked.seq))]
            case NextAsked() | AwaitAsked():
                outcome = self._ready(asked, rollout)
                return [outcome] if outcome is not None else self._wait(asked)
            case _:
                assert_never(asked)

    def _ready(self, asked: NextAsked | AwaitAsked, rollout: Rollout) -> Outcome | None:
        """Return what a waiting request gets now; None when it has to wait."""
        closed = rollout.state is RolloutState.CLOSED
        if isinstance(asked, NextAsked):
            if rollout.last_seq <= max(asked.after_seq, 0) and not closed:
                return None
            reply = rollout.batch(asked.after_seq, asked.limit)
            return Answer(request_id=asked.request_id, reply=reply)
        if asked.seq in rollout.feedback:
            return Answer(request_id=asked.request_id, reply=rollout.feedback_to(asked.seq))
        if closed:
            return Refuse(request_id=asked.request_id, error=rollout_closed(self._id(asked.local)))
        return None

    def _wait(self, asked: NextAsked | AwaitAsked) -> list[Effect]:
        wait_s = min(asked.wait_s, self._config.poll_max_s)
        deadline_s = _s(asked.at) + (wait_s if wait_s > 0 else 0.0)
        if deadline_s <= _s(asked.at) or math.isnan(deadline_s):
            return [self._give_up(Poll(asked, deadline_s))]
        if not self._polls.has_room(asked.project, self._config.polls_max):
            error = too_many_waiting(self._shard, "requests", self._config.polls_max)
            return [Refuse(request_id=asked.request_id, error=error)]
        given_up = self._polls.add(asked, deadline_s)
        return [] if given_up is None else [self._give_up(given_up)]

    def _give_up(self, poll: Poll) -> Outcome:
        """Return what a request gets that has waited long enough."""
        asked = poll.asked
        rollout = self._rollouts.get(asked.local)
        if rollout is None:
            return Refuse(request_id=asked.request_id, error=rollout_unknown(self._id(asked.local)))
        if isinstance(asked, NextAsked):
            reply: Message = rollout.batch(max(asked.after_seq, rollout.last_seq), 1)
        else:
            reply = rollout.feedback_to(asked.seq)
        return Answer(request_id=asked.request_id, reply=reply)

    def _deliver(self, local: str) -> list[Effect]:
        """Answer those for whom a rollout now has something."""
        rollout = self._rollouts.get(local)
        effects: list[Effect] = []
        if rollout is None:
            return effects
        for poll in self._polls.of(local):
            outcome = self._ready(poll.asked, rollout)
            if outcome is not None:
                self._polls.remove(poll)
                effects.append(outcome)
        return effects

    @property
    def next_deadline_s(self) -> float | None:
        """When ``ClockTicked`` is due next, in monotonic seconds; None when nobody waits."""
        return self._polls.next_deadline_s

    # --- The end of rollouts, and of the shard ------------------------------------------------

    def _on_sweep(self, event: SweepDue) -> list[Effect]:
        """Forget rollouts that are over; a new owner of the shard forgets them by the same rule."""
        effects: list[Effect] = []
        now = event.at.unix_s
        for local, rollout in list(self._rollouts.items()):
            keep_s = self._config.closed_keep_s if rollout.closed_at else self._config.idle_keep_s
            # The outstanding frame may be about to change it.
            if now - rollout.touched_at <= keep_s or local in self._drafts:
                continue
            del self._rollouts[local]
            self._sizes.add(rollout.begun.project, -rollout.size_bytes)
            for poll in self._polls.of(local):
                self._polls.remove(poll)
                effects.append(self._give_up(poll))
        return effects

    def _on_lost(self, event: ShardLost) -> list[Effect]:
        waiting = [asked.request_id for asked in self._waiting]
        waiting += [poll.asked.request_id for poll in self._polls.clear()]
        if self._writing is not None:
            waiting += [outcome.request_id for outcome in self._writing.outcomes]
        self._waiting.clear()
        self._waiting_bytes = 0
        self._parts.clear()
        self._drafts.clear()
        self._writing = None
        return [Refuse(request_id=request_id, error=event.error) for request_id in waiting]

    # --- What is to be seen -------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether nothing waits for the journal."""
        return self._writing is None and not self._waiting

    @property
    def rollouts(self) -> int:
        """How many rollouts are known."""
        return len(self._rollouts)

    @property
    def polls(self) -> int:
        """How many requests wait."""
        return len(self._polls)

    def facts(self) -> dict[str, list[Record]]:
        """Return the durable facts by rollout: equal for states that are equal."""
        return {local: list(rollout.records()) for local, rollout in self._rollouts.items()}

    def validate_state(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken; tests call it after each event."""
        assert self._writing is not None or not self._waiting  # noqa: S101  invariant
        assert self._writing is not None or not self._drafts  # noqa: S101  invariant
        assert self._writing is not None or not self._parts  # noqa: S101  invariant
        assert self._waiting_bytes == sum(map(_payload_bytes, self._waiting))  # noqa: S101  invariant
        sizes: Counter[str] = Counter()
        for rollout in self._rollouts.values():
            sizes[rollout.begun.project] += rollout.size_bytes
        assert self._sizes.counted() == sizes  # noqa: S101  invariant
        assert self._sizes.total == sizes.total()  # noqa: S101  invariant
        for local, rollout in self._rollouts.items():
            assert rollout.begun.local == local  # noqa: S101  invariant
            numbers = [report.seq for report in rollout.reports]
            assert numbers == list(range(1, len(numbers) + 1))  # noqa: S101  invariant
            assert set(rollout.feedback) <= set(numbers)  # noqa: S101  invariant
            for poll in self._polls.of(local):
                assert self._ready(poll.asked, rollout) is None  # noqa: S101  invariant


def _payload_bytes(asked: Change) -> int:
    return len(asked.payload) if isinstance(asked, ReportAsked | FeedbackAsked) else 0


def _s(at: Moment) -> float:
    return at.monotonic_s
