"""A shard's pure core: events in, effects out, no I/O.

Changes queue up while a frame is outstanding and go together into the next one (group commit). A
change is decided on when its frame is made, against what is durable and what the same frame holds
before it; it takes effect, is answered and is delivered only when the frame is durable. What can
be read here is therefore always in the journal, and a new owner of the shard reads the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, assert_never

from dsec_chronus.acting import Actions
from dsec_chronus.config import ChronusConfig
from dsec_chronus.contents import Contents
from dsec_chronus.drafts import Drafts, payload_bytes
from dsec_chronus.effects import (
    Answer,
    Decided,
    Effect,
    Nothing,
    Outcome,
    PurgeJournal,
    Refuse,
    Wait,
    WaitForAction,
    WriteFrame,
)
from dsec_chronus.errors import too_many_waiting
from dsec_chronus.events import (
    ActionAsked,
    ActionDone,
    AnswersAsked,
    AwaitAsked,
    Change,
    CheckpointsAsked,
    ClockTicked,
    CloseAsked,
    Event,
    FeedbackAsked,
    FrameFailed,
    FrameRead,
    FrameWritten,
    GetAsked,
    GroupOpenAsked,
    GroupTakeAsked,
    InspectAsked,
    JournalRead,
    Look,
    Moment,
    NextAsked,
    OpenAsked,
    PutAsked,
    ReportAsked,
    ShardLost,
    StepsAsked,
    SweepDue,
    Waiting,
)
from dsec_chronus.looks import Looks
from dsec_chronus.polls import Poll, Polls
from dsec_chronus.records import ActionBegun, ActionEnded, Record, size_of
from dsec_chronus.shares import Shares
from dsec_chronus.snapshots import FRAME_BYTES, FRAME_RECORDS, snapshot_parts
from dsec_common.errors import DsecError

_ACTIONS: Final = (ActionBegun, ActionEnded)

WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Payloads of changes that may wait for the journal."""


@dataclass(slots=True)
class _Writing:
    """The outstanding frame: what it holds and who is told what once it is durable."""

    frame: WriteFrame
    outcomes: list[Decided] = field(default_factory=list)


class ShardState:
    """All that is known of one shard; :meth:`handle` is its only way to change.

    It is total over :data:`~dsec_chronus.events.Event` and raises for none of them: what is wrong
    with a request is an effect.

    Args:
        shard: its name.
        config: limits.
        epoch: no other ownership of the shard has the same; positions of steps depend on it.
    """

    def __init__(self, shard: str, config: ChronusConfig, epoch: str) -> None:
        self._shard = shard
        self._config = config
        self._contents = Contents()
        self._looks = Looks(shard, epoch, self._contents)
        self._polls = Polls()
        self._actions = Actions(shard, self._contents)
        self._sizes = Shares()
        self._waiting: deque[Change] = deque()
        # Ends of actions that the journal did not take.
        self._untold: list[ActionDone] = []
        self._waiting_bytes = 0
        self._writing: _Writing | None = None
        self._drafts = Drafts(shard, config, self._contents, self._sizes)
        # The journal since the last snapshot, the parts of one that is being written, and where
        # its first part is.
        self._tail_frames = 0
        self._tail_bytes = 0
        self._parts: deque[WriteFrame] = deque()
        self._snapshot_sequence = 0
        self._snapshot_frames = 0
        # A snapshot that is being read; None when none is.
        self._reading: Contents | None = None

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event and return what is to be done, in order."""
        effects: list[Effect]
        match event:
            case (
                OpenAsked()
                | ReportAsked()
                | FeedbackAsked()
                | CloseAsked()
                | GroupTakeAsked()
                | GroupOpenAsked()
                | AnswersAsked()
                | PutAsked()
                | ActionAsked()
                | ActionDone()
            ):
                effects = self._on_change(event)
            case (
                InspectAsked()
                | GetAsked()
                | CheckpointsAsked()
                | NextAsked()
                | AwaitAsked()
                | StepsAsked()
            ):
                effects = self._on_look(event)
            case JournalRead():
                effects = [*self._actions.resume()]
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
        if isinstance(asked, ActionDone):  # nobody could ask again
            limit = len(self._waiting) + 1
        if len(self._waiting) >= limit:
            refusal = too_many_waiting(self._shard, "changes", limit)
            return [Refuse(request_id=asked.request_id, error=refusal)]
        if self._waiting_bytes >= WAITING_BYTES_MAX and not isinstance(asked, ActionDone):
            refusal = too_many_waiting(self._shard, "bytes of changes", WAITING_BYTES_MAX)
            return [Refuse(request_id=asked.request_id, error=refusal)]
        self._waiting.append(asked)
        self._waiting_bytes += payload_bytes(asked)
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
                effects += self._settle(outcomes)
        return effects

    def _settle(self, outcomes: Iterable[Decided]) -> Iterator[Effect]:
        """Yield the answers to changes that are durable; a step's caller waits on."""
        for outcome in outcomes:
            match outcome:
                case Wait():
                    yield from self._on_look(outcome.asked)
                case WaitForAction():
                    yield from self._actions.wait(outcome)
                case Nothing():
                    pass
                case _:
                    yield outcome

    def _take_waiting(self) -> tuple[list[Record], list[Decided]]:
        records: list[Record] = []
        outcomes: list[Decided] = []
        size = 0
        while self._waiting and size < FRAME_BYTES and len(records) < FRAME_RECORDS:
            asked = self._waiting.popleft()
            self._waiting_bytes -= payload_bytes(asked)
            try:
                added, outcome = self._drafts.decide(asked, size)
            except DsecError as error:
                outcomes.append(Refuse(request_id=asked.request_id, error=error))
                continue
            outcomes.append(outcome)
            records += added
            size += sum(map(size_of, added))
            if isinstance(asked, ActionDone) and added:
                break  # what follows is decided on against what the action has made
        return records, outcomes

    # --- The journal's word -------------------------------------------------------------------

    def _on_written(self, event: FrameWritten) -> list[Effect]:
        if self._writing is None:
            return []
        written, self._writing = self._writing, None
        self._drafts.clear()
        if written.frame.snapshot_part:
            return self._on_part_written(written.frame, event)
        self._count(written.frame.records)
        ended: list[Effect] = []
        taken = self._apply(written.frame.records, ended)
        effects: list[Effect] = [*self._settle(written.outcomes), *ended]
        for local in taken:
            effects += self._deliver(local)
        if self._is_snapshot_due():
            self._parts.extend(snapshot_parts(self._contents.records()))
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
        refused: list[Effect] = []
        for outcome in failed.outcomes:
            if isinstance(outcome, Nothing):
                self._untold.append(outcome.done)
            else:
                refused.append(Refuse(request_id=outcome.request_id, error=event.error))
        return refused + self._advance()

    def _on_read(self, event: FrameRead) -> list[Effect]:
        frame = event.frame
        if not frame.snapshot_part:
            self._reading = None
            self._count(frame.records)
            self._apply(frame.records)
            return []
        if frame.snapshot_part == 1:
            self._reading, self._snapshot_sequence = Contents(), event.sequence
        if self._reading is None:
            return []
        for record in frame.records:
            self._reading.apply(record)
        if not frame.snapshot_complete:
            return []
        self._contents.rollouts = self._reading.rollouts
        self._contents.groups = self._reading.groups
        self._reading = None
        self._sizes.clear()
        for rollout in self._contents.rollouts.values():
            self._sizes.add(rollout.begun.project, rollout.size_bytes)
        self._tail_frames = self._tail_bytes = 0
        self._snapshot_frames = frame.snapshot_part
        return [PurgeJournal(sequence=self._snapshot_sequence)]

    def _apply(
        self, records: Iterable[Record], effects: list[Effect] | None = None
    ) -> dict[str, None]:
        """Take in durable facts; return the rollouts and groups that they are about, in order.

        What they ask for is added to ``effects``.
        """
        about: dict[str, None] = {}
        for record in records:
            is_action = isinstance(record, _ACTIONS)
            action = self._action_of(record.local) if is_action else None
            project, grown = self._contents.apply(record)
            if grown:
                self._sizes.add(project, grown)
            about[record.local] = None
            rollout = self._contents.rollouts.get(record.local)
            if rollout is not None and (group := self._contents.group_of(rollout)) is not None:
                about[group.local] = None
            if effects is not None and is_action:
                effects += self._actions.recorded(action, record)
        return about

    def _action_of(self, local: str) -> ActionBegun | None:
        rollout = self._contents.rollouts.get(local)
        return None if rollout is None else rollout.kept.action

    def _count(self, records: Iterable[Record]) -> None:
        self._tail_frames += 1
        self._tail_bytes += sum(map(size_of, records))

    def _is_snapshot_due(self) -> bool:
        """Return whether the journal is worth shortening: its cost is that of the whole shard."""
        config = self._config
        return (
            self._tail_frames >= config.snapshot_after_frames + 4 * self._snapshot_frames
            or self._tail_bytes >= config.snapshot_after_bytes + self._sizes.total
        )

    # --- Looking and waiting ------------------------------------------------------------------

    def _on_look(self, asked: Look) -> list[Effect]:
        outcome = self._ready(asked)
        if outcome is not None or isinstance(asked, InspectAsked | GetAsked | CheckpointsAsked):
            return [] if outcome is None else [outcome]
        if not isinstance(asked, StepsAsked):
            return self._wait(asked)
        # A trainer waits once for each shard; what it asked before is not listened to any more.
        return [*self._give_up_all(asked.local), *self._wait(asked)]

    def _ready(self, asked: Look) -> Outcome | None:
        """Return what a waiting request gets now; None when it has to wait."""
        try:
            reply = self._looks.ready(asked)
        except DsecError as error:
            return Refuse(request_id=asked.request_id, error=error)
        return None if reply is None else Answer(request_id=asked.request_id, reply=reply)

    def _wait(self, asked: Waiting) -> list[Effect]:
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
        try:
            reply = self._looks.nothing_yet(asked)
        except DsecError as error:
            return Refuse(request_id=asked.request_id, error=error)
        return Answer(request_id=asked.request_id, reply=reply)

    def _give_up_all(self, local: str) -> list[Effect]:
        given_up: list[Effect] = []
        for poll in self._polls.of(local):
            self._polls.remove(poll)
            given_up.append(self._give_up(poll))
        return given_up

    def _deliver(self, local: str) -> list[Effect]:
        """Answer those for whom a rollout or a group now has something."""
        effects: list[Effect] = []
        for poll in self._polls.of(local):
            outcome = self._ready(poll.asked)
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
        self._waiting.extend(self._untold)
        self._untold.clear()
        effects: list[Effect] = [*self._actions.leavings(), *self._advance()]
        now = event.at.unix_s
        for local, rollout in list(self._contents.rollouts.items()):
            keep_s = self._config.closed_keep_s if rollout.closed_at else self._config.idle_keep_s
            # The outstanding frame may be about to change it.
            if now - rollout.touched_at <= keep_s or local in self._drafts or rollout.kept.action:
                continue
            effects += self._actions.forgotten(rollout)
            self._contents.forget(rollout)
            self._sizes.add(rollout.begun.project, -rollout.size_bytes)
            effects += self._give_up_all(local)
            if (group := self._contents.group_of(rollout)) is not None:
                effects += self._deliver(group.local)
        if not self._drafts:
            for group in self._contents.forget_groups(now - self._config.idle_keep_s):
                effects += self._give_up_all(group.local)
        return effects

    def _on_lost(self, event: ShardLost) -> list[Effect]:
        waiting = [asked.request_id for asked in self._waiting]
        waiting += [poll.asked.request_id for poll in self._polls.clear()]
        waiting += self._actions.clear()
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
        return len(self._contents.rollouts)

    @property
    def polls(self) -> int:
        """How many requests wait."""
        return len(self._polls)

    def reporter(self, project: str, local: str, seq: int) -> str:
        """Return the id of the sandbox whose report waits for feedback; see :class:`Looks`."""
        return self._looks.reporter(project, local, seq)

    @property
    def actions(self) -> Actions:
        """What is done to rollouts together with their sandboxes, to be looked at."""
        return self._actions

    def facts(self) -> dict[str, list[Record]]:
        """Return the durable facts by rollout and group: equal for states that are equal."""
        facts: dict[str, list[Record]] = {}
        for record in self._contents.records():
            facts.setdefault(record.local, []).append(record)
        return facts

    def validate_state(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken; tests call it after each event."""
        assert self._writing is not None or not self._waiting  # noqa: S101  invariant
        assert self._writing is not None or not self._drafts  # noqa: S101  invariant
        assert self._writing is not None or not self._parts  # noqa: S101  invariant
        assert self._waiting_bytes == sum(map(payload_bytes, self._waiting))  # noqa: S101  invariant
        sizes = self._contents.validate_state()
        assert self._sizes.counted() == sizes  # noqa: S101  invariant
        assert self._sizes.total == sizes.total()  # noqa: S101  invariant
        for local in [*self._contents.rollouts, *(g.local for g in self._contents.groups.values())]:
            for poll in self._polls.of(local):
                assert self._ready(poll.asked) is None  # noqa: S101  invariant


def _s(at: Moment) -> float:
    return at.monotonic_s
