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
    answered_otherwise,
    bad_seq,
    nothing_to_answer,
    opened_otherwise,
    report_gap,
    reported_otherwise,
    rollout_closed,
)
from dsec_chronus.events import Change, CloseAsked, FeedbackAsked, OpenAsked, ReportAsked
from dsec_chronus.records import (
    PAYLOAD_BYTES_MAX,
    FeedbackGiven,
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


@dataclass(slots=True)
class Rollout:
    """What the journal holds of one rollout. ``closed_at`` is 0 while it is open."""

    begun: RolloutBegun
    reports: list[StageReported] = field(default_factory=list)
    feedback: dict[int, FeedbackGiven] = field(default_factory=dict)
    closed_at: float = 0.0
    touched_at: float = 0.0
    answered_seq: int = 0
    total_reward: float = 0.0
    size_bytes: int = 0

    @property
    def last_seq(self) -> int:
        """The number of the newest report; 0 when there is none."""
        return len(self.reports)

    @property
    def state(self) -> RolloutState:
        """Whether it takes reports and feedback."""
        return RolloutState.CLOSED if self.closed_at else RolloutState.OPEN

    def apply(self, record: StageReported | FeedbackGiven | RolloutEnded) -> None:
        """Take in a durable fact; one that is already there changes nothing."""
        match record:
            case StageReported():
                if record.seq != self.last_seq + 1:
                    return
                self.reports.append(record)
            case FeedbackGiven():
                if record.seq in self.feedback:
                    return
                self.feedback[record.seq] = record
                self.answered_seq = max(self.answered_seq, record.seq)
                self.total_reward += record.reward or 0.0
            case RolloutEnded():
                self.closed_at = self.closed_at or record.at
            case _:
                assert_never(record)
        self.touched_at = max(self.touched_at, record.at)
        self.size_bytes += size_of(record)

    def records(self) -> Iterator[Record]:
        """Yield the facts that make a rollout like this one."""
        yield self.begun
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

    def batch(self, after_seq: int, limit: int) -> StageBatch:
        """Return the reports after ``after_seq``: as many as fit one message, one at least."""
        chosen: list[StageReported] = []
        size = 0
        first = max(after_seq, 0)
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

    @property
    def last_seq(self) -> int:
        """The number of the newest report."""
        return self.rollout.last_seq + len(self.reports)

    def _report(self, seq: int) -> StageReported | None:
        durable = self.rollout.reports
        if 1 <= seq <= len(durable):
            return durable[seq - 1]
        if len(durable) < seq <= self.last_seq:
            return self.reports[seq - len(durable) - 1]
        return None

    def decide(self, asked: Change, rollout_id: str) -> tuple[Record | None, Message]:
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
                record, reply = self._decide_feedback(asked, rollout_id)
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
        known = self._report(asked.seq)
        if known is not None:
            if known.stage != asked.stage or not same_payload(known.payload, asked.payload):
                raise reported_otherwise(rollout_id, asked.seq, self.last_seq)
            return None, StageAccepted(seq=asked.seq, duplicate=True)
        if self.closed or self.rollout.closed_at:
            raise rollout_closed(rollout_id)
        if asked.seq != self.last_seq + 1:
            raise report_gap(rollout_id, asked.seq, self.last_seq + 1)
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

    def _decide_feedback(
        self, asked: FeedbackAsked, rollout_id: str
    ) -> tuple[Record | None, FeedbackAccepted]:
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
            at=asked.at.unix_s,
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
        if self.closed or self.rollout.closed_at:
            return None, info
        self.closed = True
        return RolloutEnded(local=asked.local, at=asked.at.unix_s), info
