"""One rollout: what is durable of it, what a frame is about to add, and the rules between them.

A report and a feedback are known by their number: the same number with the same content is the
same message sent twice and answered again, with other content it is a conflict. That makes every
request safe to repeat, whoever vanished in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, assert_never

from dsec_chronus.errors import (
    history_forgotten,
)
from dsec_chronus.kept import Kept
from dsec_chronus.records import (
    PAYLOAD_BYTES_MAX,
    ActionBegun,
    ActionEnded,
    ActionKind,
    FeedbackGiven,
    HistoryForgotten,
    KeptRecord,
    Record,
    RolloutBegun,
    RolloutEnded,
    RolloutKept,
    StageReported,
    StateWritten,
    size_of,
    unpack,
)
from dsec_common.wire.rollout import (
    FeedbackState,
    Restoration,
    RolloutInfo,
    RolloutState,
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

    Reports up to ``forgotten_seq`` are answered and dropped, ``reports`` begins after them. Numbers
    up to ``last_seq`` that no report has were those of reports that a rollback made void, or are
    left out so that nothing which was under way then can be taken for something new.
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
    last_seq: int = 0
    kept: Kept = field(default_factory=Kept)

    def _count_to(self, seq: int) -> int:
        """Return how many of ``reports`` have a number up to ``seq``."""
        return bisect_right(self.reports, seq, key=_seq_of)

    def report(self, seq: int) -> StageReported | None:
        """Return the report with this number, if it is kept."""
        at = seq - self.forgotten_seq - 1  # where it is without a rollback
        if not (0 <= at < len(self.reports) and self.reports[at].seq == seq):
            at = self._count_to(seq) - 1
        found = self.reports[at] if at >= 0 else None
        return found if found is not None and found.seq == seq else None

    def has_after(self, seq: int) -> bool:
        """Return whether there is a report after ``seq``."""
        return bool(self.reports) and self.reports[-1].seq > seq

    def is_void(self, seq: int) -> bool:
        """Return whether a rollback has used this number up."""
        if self.kept.back_to < 0:
            return False
        return self.forgotten_seq < seq <= self.last_seq and self.report(seq) is None

    def waiting(self) -> tuple[int, ...]:
        """Return the numbers of the reports that have no feedback."""
        return tuple(report.seq for report in self.reports if report.seq not in self.feedback)

    @property
    def unanswered(self) -> int:
        """How many reports have no feedback."""
        return len(self.reports) - len(self.feedback)

    @property
    def state(self) -> RolloutState:
        """Whether it takes reports and feedback."""
        return RolloutState.CLOSED if self.closed_at else RolloutState.OPEN

    def apply(
        self,
        record: StageReported | FeedbackGiven | RolloutEnded | HistoryForgotten | KeptRecord,
    ) -> bool:
        """Take in a durable fact; return False for one that was there, which changes nothing."""
        match record:
            case StageReported():
                if record.seq <= self.last_seq:
                    return False
                self.reports.append(record)
                self.last_seq = record.seq
                self.kept.reported(record.sandbox_id)
            case FeedbackGiven():
                if record.seq in self.feedback or self.report(record.seq) is None:
                    return False
                self.feedback[record.seq] = record
                self.answered_seq = max(self.answered_seq, record.seq)
                self.total_reward += record.reward or 0.0
                self.kept.rewarded(record.seq, record.reward or 0.0)
            case RolloutEnded():
                if self.closed_at:
                    return False
                self.closed_at = record.at
            case HistoryForgotten():
                return self._forget(record)
            case StateWritten() | ActionBegun() | ActionEnded() | RolloutKept():
                return self._apply_kept(record)
            case _:
                assert_never(record)
        self.touched_at = max(self.touched_at, record.at)
        self.size_bytes += size_of(record)
        return True

    def _apply_kept(self, record: KeptRecord) -> bool:
        before, begun = self.kept.size_bytes, self.kept.action
        if not self.kept.apply(record):
            return False
        self.size_bytes += self.kept.size_bytes - before
        self.touched_at = max(self.touched_at, record.at)
        if isinstance(record, RolloutKept):
            self.last_seq = max(self.last_seq, record.last_seq)
        elif isinstance(record, ActionEnded) and begun is not None and goes_back(begun, record):
            self._go_back(begun, record)
        return True

    def _go_back(self, begun: ActionBegun, record: ActionEnded) -> None:
        """Make what came after the checkpoint void, and what nobody waits for any more."""
        for report in self.reports:
            if report.seq > begun.step or report.seq not in self.feedback:
                self.size_bytes -= size_of(report)
                if (given := self.feedback.pop(report.seq, None)) is not None:
                    self.size_bytes -= size_of(given)
        self.reports = [report for report in self.reports if report.seq in self.feedback]
        self.total_reward = self.kept.checkpoints[begun.checkpoint].reward
        if self.forgotten_seq > begun.step:
            self.forgotten_reward = self.total_reward
        self.answered_seq = max(
            [min(self.forgotten_seq, begun.step), *self.feedback],
        )
        self.last_seq = max(self.last_seq, record.last_seq)

    def _forget(self, record: HistoryForgotten) -> bool:
        if record.seq <= self.forgotten_seq:
            return False
        if not self.reports:  # the beginning of a snapshot
            self.total_reward = record.reward
            self.answered_seq = record.seq
            self.last_seq = max(self.last_seq, record.seq)
            self.size_bytes += size_of(record)
            self.touched_at = max(self.touched_at, record.at)
        elif not self.forgotten_seq:
            self.size_bytes += size_of(record)
        dropped = self.reports[: self._count_to(record.seq)]
        del self.reports[: len(dropped)]
        for report in dropped:
            self.size_bytes -= size_of(report) + size_of(self.feedback.pop(report.seq))
        self.forgotten_seq = record.seq
        self.forgotten_reward = record.reward
        return True

    def forgettable(self) -> HistoryForgotten | None:
        """Return the fact that drops what is over, when that is worth a record."""
        count = self._count_to(self.stepped_seq) - HISTORY_KEPT
        if count < HISTORY_KEPT:
            return None
        reward, through = self.forgotten_reward, 0
        for passed, report in enumerate(self.reports[:count]):
            given = self.feedback.get(report.seq)
            if given is None:
                if passed < HISTORY_KEPT:
                    return None
                break
            through = report.seq
            reward += given.reward or 0.0
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
        yield from self.kept.records(self.begun.local, self.touched_at, self.last_seq)
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
            parent=self.begun.parent,
            parent_step=self.begun.parent_step,
            sandbox_id=self.kept.sandbox_id,
            restoration=self._restoration(),
        )

    def _restoration(self) -> Restoration | None:
        kept = self.kept
        if kept.back_to >= 0:
            reason = "node_lost" if kept.lost else "rollback"
            return Restoration(step=kept.back_to, reason=reason, at=kept.back_at)
        if self.begun.parent:
            return Restoration(step=self.begun.parent_step, reason="branch", at=self.begun.at)
        return None

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
        first = self._count_to(after_seq)
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


def goes_back(begun: ActionBegun, ended: ActionEnded) -> bool:
    """Return whether the end of an action puts its rollout back."""
    return begun.kind is ActionKind.ROLLBACK and ended.error is None and not ended.told


def _seq_of(report: StageReported) -> int:
    return report.seq


def _as_sent(report: StageReported) -> StageReport:
    return StageReport(
        seq=report.seq,
        stage=report.stage,
        payload=unpack(report.payload),
        sandbox_id=report.sandbox_id,
        sent_at=report.at,
    )
