"""One rollout: what is durable of it, what a frame is about to add, and the rules between them.

A report and a feedback are known by their number: the same number with the same content is the
same message sent twice and answered again, with other content it is a conflict. That makes every
request safe to repeat, whoever vanished in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, assert_never

from dsec_chronus.errors import (
    answered_by_group,
    answered_otherwise,
    bad_seq,
    history_forgotten,
    nothing_to_answer,
    opened_otherwise,
    report_gap,
    reported_otherwise,
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
from dsec_chronus.records import (
    PAYLOAD_BYTES_MAX,
    FeedbackGiven,
    HistoryForgotten,
    Record,
    RolloutBegun,
    RolloutEnded,
    StageReported,
    same_payload,
    size_of,
    unpack,
)
from dsec_common.wire.base import Message
from dsec_common.wire.rollout import (
    FeedbackAccepted,
    FeedbackState,
    RolloutInfo,
    RolloutOpened,
    RolloutState,
    StageAccepted,
    StageBatch,
    StageReport,
)

BATCH_REPORTS_MAX: Final = 256

HISTORY_KEPT: Final = 64
"""Answered reports before the newest step that got its feedback are kept up to so many."""

UNANSWERED_MAX: Final = 256
"""So far may an agent of a group be ahead of its trainer."""


@dataclass(slots=True)
class Rollout:
    """What the journal holds of one rollout. ``closed_at`` is 0 while it is open.

    Reports up to ``forgotten_seq`` are answered and dropped, ``reports`` begins after them.
    ``stepped_seq`` is the newest step whose feedback went out: who steps has its answers before it
    goes on. It is this owner's own knowledge and in no record.
    """

    begun: RolloutBegun
    reports: list[StageReported] = field(default_factory=list)
    feedback: dict[int, FeedbackGiven] = field(default_factory=dict)
    closed_at: float = 0.0
    touched_at: float = 0.0
    answered_seq: int = 0
    total_reward: float = 0.0
    size_bytes: int = 0
    forgotten_seq: int = 0
    forgotten_reward: float = 0.0
    stepped_seq: int = 0

    @property
    def last_seq(self) -> int:
        """The number of the newest report; 0 when there is none."""
        return self.forgotten_seq + len(self.reports)

    @property
    def unanswered(self) -> int:
        """How many reports have no feedback."""
        return len(self.reports) - len(self.feedback)

    @property
    def state(self) -> RolloutState:
        """Whether it takes reports and feedback."""
        return RolloutState.CLOSED if self.closed_at else RolloutState.OPEN

    def apply(
        self, record: StageReported | FeedbackGiven | RolloutEnded | HistoryForgotten
    ) -> bool:
        """Take in a durable fact; return False for one that was there, which changes nothing."""
        match record:
            case StageReported():
                if record.seq != self.last_seq + 1:
                    return False
                self.reports.append(record)
            case FeedbackGiven():
                if record.seq in self.feedback or record.seq <= self.forgotten_seq:
                    return False
                self.feedback[record.seq] = record
                self.answered_seq = max(self.answered_seq, record.seq)
                self.total_reward += record.reward or 0.0
            case RolloutEnded():
                if self.closed_at:
                    return False
                self.closed_at = record.at
            case HistoryForgotten():
                if record.seq <= self.forgotten_seq:
                    return False
                self._forget(record)
                return True
            case _:
                assert_never(record)
        self.touched_at = max(self.touched_at, record.at)
        self.size_bytes += size_of(record)
        return True

    def _forget(self, record: HistoryForgotten) -> None:
        if not self.reports:  # the beginning of a snapshot
            self.total_reward = record.reward
            self.answered_seq = record.seq
            self.size_bytes += size_of(record)
            self.touched_at = max(self.touched_at, record.at)
        elif not self.forgotten_seq:
            self.size_bytes += size_of(record)
        dropped = self.reports[: record.seq - self.forgotten_seq]
        del self.reports[: len(dropped)]
        for report in dropped:
            self.size_bytes -= size_of(report) + size_of(self.feedback.pop(report.seq))
        self.forgotten_seq = record.seq
        self.forgotten_reward = record.reward

    def forgettable(self) -> HistoryForgotten | None:
        """Return the fact that drops what is over, when that is worth a record."""
        last = self.stepped_seq - HISTORY_KEPT
        if last < self.forgotten_seq + HISTORY_KEPT:
            return None
        reward, through = self.forgotten_reward, self.forgotten_seq
        while through < last and (given := self.feedback.get(through + 1)) is not None:
            through += 1
            reward += given.reward or 0.0
        if through < self.forgotten_seq + HISTORY_KEPT:
            return None
        return HistoryForgotten(
            local=self.begun.local, at=self.touched_at, seq=through, reward=reward
        )

    def records(self) -> Iterator[Record]:
        """Yield the facts that make a rollout like this one."""
        yield self.begun
        if self.forgotten_seq:
            yield HistoryForgotten(
                local=self.begun.local,
                at=self.begun.at,
                seq=self.forgotten_seq,
                reward=self.forgotten_reward,
            )
        yield from self.reports
        yield from self.feedback.values()
        if self.closed_at:
            yield RolloutEnded(local=self.begun.local, at=self.closed_at)

    def info(self, rollout_id: str) -> RolloutInfo:
        """Return what a trainer may know."""
        return RolloutInfo(
            rollout_id=rollout_id,
            state=self.state,
            last_seq=self.last_seq,
            answered_seq=self.answered_seq,
            total_reward=self.total_reward,
            labels=self.begun.labels,
        )

    def batch(self, after_seq: int, limit: int, rollout_id: str) -> StageBatch:
        """Return the reports after ``after_seq``: as many as fit one message, one at least.

        After 0, or less, are all that are kept.

        Raises:
            DsecError: ``expired`` when reports after ``after_seq`` are kept no more.
        """
        if 0 < after_seq < self.forgotten_seq:
            raise history_forgotten(rollout_id, after_seq + 1, self.forgotten_seq, self.last_seq)
        chosen: list[StageReported] = []
        size = 0
        first = max(after_seq - self.forgotten_seq, 0)
        for report in self.reports[first : first + max(1, min(limit, BATCH_REPORTS_MAX))]:
            size += size_of(report)
            if chosen and size > PAYLOAD_BYTES_MAX:
                break
            chosen.append(report)
        return StageBatch(reports=tuple(map(_as_sent, chosen)), state=self.state)

    def feedback_to(self, seq: int) -> FeedbackState:
        """Return the feedback to report ``seq``; ``ready`` is false when there is none yet."""
        given = self.feedback.get(seq)
        if given is None:
            return FeedbackState(ready=False, seq=seq)
        return FeedbackState(
            ready=True,
            seq=seq,
            payload=unpack(given.payload),
            reward=given.reward,
            done=given.done,
        )


def _as_sent(report: StageReported) -> StageReport:
    return StageReport(
        seq=report.seq,
        stage=report.stage,
        payload=unpack(report.payload),
        sandbox_id=report.sandbox_id,
        sent_at=report.at,
    )


@dataclass(slots=True)
class Draft:
    """A rollout as it will be once the frame that is being made is durable."""

    rollout: Rollout
    reports: list[StageReported] = field(default_factory=list)
    feedback: dict[int, FeedbackGiven] = field(default_factory=dict)
    closed: bool = False
    forgets: bool = False

    @property
    def last_seq(self) -> int:
        """The number of the newest report."""
        return self.rollout.last_seq + len(self.reports)

    def _report(self, seq: int) -> StageReported | None:
        rollout = self.rollout
        if rollout.forgotten_seq < seq <= rollout.last_seq:
            return rollout.reports[seq - rollout.forgotten_seq - 1]
        if rollout.last_seq < seq <= self.last_seq:
            return self.reports[seq - rollout.last_seq - 1]
        return None

    def _need_kept(self, seq: int, rollout_id: str) -> None:
        forgotten = self.rollout.forgotten_seq
        if 1 <= seq <= forgotten:
            raise history_forgotten(rollout_id, seq, forgotten, self.last_seq)

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
                if asked.labels != self.rollout.begun.labels:
                    raise opened_otherwise(rollout_id)
                record, reply = None, RolloutOpened(rollout_id=rollout_id)
            case ReportAsked():
                record, reply = self._decide_report(asked, rollout_id)
            case FeedbackAsked():
                if self.rollout.begun.group:
                    raise answered_by_group(rollout_id, self.rollout.begun.group)
                record, reply = self.answer(asked, asked.at, rollout_id)
            case CloseAsked():
                record, reply = self._decide_close(asked, rollout_id)
            case _:
                assert_never(asked)
        return record, reply

    def _decide_report(
        self, asked: ReportAsked, rollout_id: str
    ) -> tuple[Record | None, StageAccepted]:
        if asked.seq < 1:
            raise bad_seq(asked.seq)
        self._need_kept(asked.seq, rollout_id)
        known = self._report(asked.seq)
        if known is not None:
            if known.stage != asked.stage or not same_payload(known.payload, asked.payload):
                raise reported_otherwise(rollout_id, asked.seq, self.last_seq)
            return None, StageAccepted(seq=asked.seq, duplicate=True)
        if self.closed or self.rollout.closed_at:
            raise rollout_closed(rollout_id)
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
        return record, StageAccepted(seq=asked.seq)

    def answer(
        self, asked: FeedbackAsked | AnswerGiven, at: Moment, rollout_id: str
    ) -> tuple[FeedbackGiven | None, FeedbackAccepted]:
        """Return the feedback that is new, if it is, and the reply; errors as of :meth:`decide`."""
        self._need_kept(asked.seq, rollout_id)
        known = self.rollout.feedback.get(asked.seq) or self.feedback.get(asked.seq)
        if known is not None:
            same = (known.reward, known.done) == (asked.reward, asked.done)
            if not same or not same_payload(known.payload, asked.payload):
                raise answered_otherwise(rollout_id, asked.seq)
            return None, FeedbackAccepted(seq=asked.seq, duplicate=True)
        if self.closed or self.rollout.closed_at:
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
        return record, FeedbackAccepted(seq=asked.seq)

    def _decide_close(
        self, asked: CloseAsked, rollout_id: str
    ) -> tuple[Record | None, RolloutInfo]:
        info = RolloutInfo(
            rollout_id=rollout_id,
            state=RolloutState.CLOSED,
            last_seq=self.last_seq,
            answered_seq=max([self.rollout.answered_seq, *self.feedback]),
            total_reward=self.rollout.total_reward
            + sum(given.reward or 0.0 for given in self.feedback.values()),
            labels=self.rollout.begun.labels,
        )
        return self.close(asked.at), info

    def close(self, at: Moment) -> RolloutEnded | None:
        """Return the fact that closes the rollout; None when it is closed."""
        if self.closed or self.rollout.closed_at:
            return None
        self.closed = True
        return RolloutEnded(local=self.rollout.begun.local, at=at.unix_s)
