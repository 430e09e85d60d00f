"""A rollout as the frame that is being made will leave it, and the rules for what may be added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from dsec_chronus.errors import (
    acting,
    answered_by_group,
    answered_otherwise,
    bad_seq,
    history_forgotten,
    nothing_to_answer,
    opened_otherwise,
    replaced,
    report_gap,
    reported_otherwise,
    rolled_back,
    rollout_closed,
    too_many_unanswered,
)
from dsec_chronus.events import (
    AnswerGiven,
    CloseAsked,
    FeedbackAsked,
    Moment,
    OpenAsked,
    ReportAsked,
    RolloutChange,
)
from dsec_chronus.kept import Kept
from dsec_chronus.records import (
    ActionKind,
    FeedbackGiven,
    Record,
    RolloutBegun,
    RolloutEnded,
    StageReported,
    same_payload,
)
from dsec_chronus.rollout import UNANSWERED_MAX, Rollout
from dsec_common.wire.base import Message
from dsec_common.wire.rollout import (
    FeedbackAccepted,
    RolloutInfo,
    RolloutOpened,
    RolloutState,
    StageAccepted,
)


@dataclass(slots=True)
class Draft:
    """A rollout as it will be once the frame that is being made is durable."""

    rollout: Rollout
    reports: list[StageReported] = field(default_factory=list)
    feedback: dict[int, FeedbackGiven] = field(default_factory=dict)
    closed: bool = False
    forgets: bool = False
    _kept: Kept | None = None

    @property
    def last_seq(self) -> int:
        """The last number that is used up."""
        return self.rollout.last_seq + len(self.reports)

    @property
    def kept(self) -> Kept:
        """What is kept of it, with what this frame adds; records are taken in as they are made."""
        if self._kept is None:
            self._kept = self.rollout.kept.copy()
        return self._kept

    @property
    def is_put_back(self) -> bool:
        """Whether a rollback is under way."""
        action = (self._kept or self.rollout.kept).action
        return action is not None and action.kind is ActionKind.ROLLBACK

    @property
    def sandbox_id(self) -> str:
        """The sandbox that speaks for it; empty before any has."""
        reporting = self.reports[-1].sandbox_id if self.reports else ""
        return reporting or self.rollout.kept.sandbox_id

    @property
    def last_step(self) -> int:
        """The number of the newest report that is not void."""
        newest = self.reports or self.rollout.reports
        if newest:
            return newest[-1].seq
        back_to = self.rollout.kept.back_to
        return back_to if back_to >= 0 else self.rollout.last_seq

    @property
    def reward(self) -> float:
        """The sum of the rewards so far."""
        more = sum(given.reward or 0.0 for given in self.feedback.values())
        return self.rollout.total_reward + more

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing more."""
        return self.closed or bool(self.rollout.closed_at)

    def _report(self, seq: int) -> StageReported | None:
        if self.rollout.last_seq < seq <= self.last_seq:
            return self.reports[seq - self.rollout.last_seq - 1]
        return self.rollout.report(seq)

    def _need_kept(self, seq: int, rollout_id: str) -> None:
        forgotten = self.rollout.forgotten_seq
        if 1 <= seq <= forgotten:
            raise history_forgotten(rollout_id, seq, forgotten, self.last_seq)
        if self.rollout.is_void(seq):
            raise rolled_back(rollout_id, seq, self.rollout.kept.back_to, self.last_seq)

    def decide(self, asked: RolloutChange, rollout_id: str) -> tuple[Record | None, Message]:
        """Return what the journal must hold before the reply may be sent, and the reply.

        No record means that all of it is known already.

        Raises:
            DsecError: ``invalid``, ``conflict`` or ``expired``, as the rules say.
        """
        record: Record | None
        reply: Message
        match asked:
            case OpenAsked():
                if not _is_same(asked, self.rollout.begun):
                    raise opened_otherwise(rollout_id)
                record, reply = None, RolloutOpened(rollout_id=rollout_id)
            case ReportAsked():
                record = self.report(asked, rollout_id)
                reply = StageAccepted(seq=asked.seq, duplicate=record is None)
            case FeedbackAsked():
                if self.rollout.begun.group:
                    raise answered_by_group(rollout_id, self.rollout.begun.group)
                record = self.answer(asked, asked.at, rollout_id)
                reply = FeedbackAccepted(seq=asked.seq, duplicate=record is None)
            case CloseAsked():
                record, reply = self._decide_close(asked, rollout_id)
            case _:
                assert_never(asked)
        return record, reply

    def report(self, asked: ReportAsked, rollout_id: str) -> StageReported | None:
        """Return the report if it is new; errors as of :meth:`decide`."""
        if asked.seq < 1:
            raise bad_seq(asked.seq)
        if asked.sandbox_id in self.rollout.kept.replaced:
            raise replaced(rollout_id, asked.sandbox_id, self.rollout.kept.sandbox_id)
        self._need_kept(asked.seq, rollout_id)
        known = self._report(asked.seq)
        if known is not None:
            if known.stage != asked.stage or not same_payload(known.payload, asked.payload):
                raise reported_otherwise(rollout_id, asked.seq, self.last_seq)
            return None
        if self.is_closed:
            raise rollout_closed(rollout_id)
        if self.is_put_back:
            raise acting(rollout_id, ActionKind.ROLLBACK)
        if asked.seq != self.last_seq + 1:
            raise report_gap(rollout_id, asked.seq, self.last_seq + 1)
        if self.rollout.begun.group:
            unanswered = self.rollout.unanswered + len(self.reports) - len(self.feedback)
            if unanswered >= UNANSWERED_MAX:
                raise too_many_unanswered(rollout_id, UNANSWERED_MAX)
        record = StageReported(
            local=asked.local,
            at=asked.at.unix_s,
            seq=asked.seq,
            stage=asked.stage,
            payload=asked.payload,
            sandbox_id=asked.sandbox_id,
        )
        self.reports.append(record)
        return record

    def answer(
        self, asked: FeedbackAsked | AnswerGiven, at: Moment, rollout_id: str
    ) -> FeedbackGiven | None:
        """Return the feedback if it is new; errors as of :meth:`decide`."""
        self._need_kept(asked.seq, rollout_id)
        known = self.rollout.feedback.get(asked.seq) or self.feedback.get(asked.seq)
        if known is not None:
            same = (known.reward, known.done) == (asked.reward, asked.done)
            if not same or not same_payload(known.payload, asked.payload):
                raise answered_otherwise(rollout_id, asked.seq)
            return None
        if self.is_closed:
            raise rollout_closed(rollout_id)
        if self._report(asked.seq) is None:
            raise nothing_to_answer(rollout_id, asked.seq, self.last_seq)
        record = FeedbackGiven(
            local=asked.local,
            at=at.unix_s,
            seq=asked.seq,
            payload=asked.payload,
            reward=asked.reward,
            done=asked.done,
        )
        self.feedback[asked.seq] = record
        return record

    def _decide_close(
        self, asked: CloseAsked, rollout_id: str
    ) -> tuple[Record | None, RolloutInfo]:
        info = RolloutInfo(
            rollout_id=rollout_id,
            state=RolloutState.CLOSED,
            last_seq=self.last_seq,
            answered_seq=max([self.rollout.answered_seq, *self.feedback]),
            total_reward=self.reward,
            labels=self.rollout.begun.labels,
        )
        return self.close(asked.at), info

    def close(self, at: Moment) -> RolloutEnded | None:
        """Return the fact that closes the rollout; None when it is closed."""
        if self.is_closed:
            return None
        self.closed = True
        return RolloutEnded(local=self.rollout.begun.local, at=at.unix_s)


def _is_same(asked: OpenAsked, begun: RolloutBegun) -> bool:
    options = (begun.labels, begun.checkpoint_every, begun.durable)
    return (asked.labels, asked.checkpoint_every, asked.durable) == options
