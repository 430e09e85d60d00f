"""Reads every frame that Chronus writes and says what does not add up. Believes no Chronus."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

import msgspec

from dsec_chronus.journal import STREAM
from dsec_chronus.records import (
    ActionBegun,
    ActionEnded,
    FeedbackGiven,
    Frame,
    GroupTaken,
    HistoryForgotten,
    Record,
    RolloutBegun,
    RolloutEnded,
    RolloutKept,
    StageReported,
    StateTaken,
    StateWritten,
)
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError
from dsec_common.wire.base import decode
from soak.chaos_run import RunModel

_PAUSE_S: Final = 0.05
_TRY_S: Final = 2.0
_NO_MESSAGE_FOUND: Final = 10037


@dataclass(slots=True, eq=False)
class Written:
    """What the journal says of one rollout: its reports and their answers, by number."""

    reports: dict[int, StageReported] = field(default_factory=dict)
    answers: dict[int, FeedbackGiven] = field(default_factory=dict)
    ended: bool = False


class JournalAuditor:
    """Holds each frame of each shard against those before.

    Attributes:
        rollouts: what is written, by the rollout's id.
        frames: how many were looked at.
        unseen: how many a snapshot had replaced before they could be; the snapshot, and those who
            were told, say what they did.
        owners: how often a shard was taken.
    """

    def __init__(self, model: RunModel) -> None:
        self.rollouts: dict[str, Written] = {}
        self.frames = 0
        self.unseen = 0
        self.owners = 0
        self._model = model
        self._last_sequence = 0
        self._epochs: dict[str, list[str]] = {}
        self._numbers: dict[str, int] = {}
        self._fences: dict[tuple[str, str], int] = {}

    async def run(self, bus: Bus) -> None:
        """Look at every frame until cancelled."""
        while True:
            await self.read_on(bus)
            await asyncio.sleep(_PAUSE_S)

    async def read_on(self, bus: Bus) -> bool:
        """Look at what is there; return False when NATS went away meanwhile."""
        while True:
            query = {"seq": self._last_sequence + 1, "next_by_subj": subjects.ROLLOUT_JOURNALS}
            try:
                body = await bus.request_raw(
                    f"$JS.API.STREAM.MSG.GET.{STREAM}", msgspec.json.encode(query), timeout_s=_TRY_S
                )
            except DsecError:
                return False
            answer: dict[str, Any] = msgspec.json.decode(body)
            if "error" in answer:
                return bool(answer["error"].get("err_code") == _NO_MESSAGE_FOUND)
            message = answer["message"]
            shard = str(message["subject"]).rpartition(".")[2]
            self.see(int(message["seq"]), shard, decode(base64.b64decode(message["data"]), Frame))

    def see(self, sequence: int, shard: str, frame: Frame) -> None:
        """Look at one frame."""
        self.frames += 1
        self.unseen += sequence - self._last_sequence - 1
        self._last_sequence = sequence
        self._has_its_turn(shard, frame)
        for record in frame.records:
            if frame.snapshot_part:
                self._says_the_same(shard, record)
            else:
                self._happened(shard, record)

    def _has_its_turn(self, shard: str, frame: Frame) -> None:
        """Check that one owner follows another and each counts its frames."""
        epochs = self._epochs.setdefault(shard, [])
        if frame.epoch not in epochs:
            if frame.number and not self.unseen:
                self._wrong(shard, f"an owner began with frame {frame.number}")
            epochs.append(frame.epoch)
            self.owners += 1
        elif frame.epoch != epochs[-1]:
            self._wrong(shard, f"frame {frame.number} of an owner that another had followed")
        elif frame.number <= self._numbers[shard]:
            self._wrong(shard, f"frame {frame.number} came after {self._numbers[shard]}")
        self._numbers[shard] = frame.number

    def _happened(self, shard: str, record: Record) -> None:
        written = self._written(shard, record)
        rollout = f"{shard}.{record.local}"
        match record:
            case RolloutBegun():
                if written.reports:
                    self._wrong(rollout, "began again")
            case StageReported():
                self._reported(rollout, written, record)
            case FeedbackGiven():
                self._answered(rollout, written, record)
            case RolloutEnded():
                self._is_open(rollout, written, "an end")
                written.ended = True
            case HistoryForgotten():
                unanswered = {*range(1, record.seq + 1)} - {*written.answers}
                if unanswered and not self.unseen:
                    self._wrong(rollout, f"forgotten without an answer: {sorted(unanswered)}")
            case GroupTaken():
                self._taken(shard, record)
            case StateTaken() | StateWritten() | ActionBegun() | ActionEnded() | RolloutKept():
                self._wrong(rollout, "was kept or put back, for which nobody asked in this run")
            case _:
                assert_never(record)

    def _reported(self, rollout: str, written: Written, record: StageReported) -> None:
        last = max(written.reports, default=0)
        if record.seq in written.reports:
            self._wrong(rollout, f"report {record.seq} is there twice")
        elif record.seq != last + 1 and not self.unseen:
            self._wrong(rollout, f"report {record.seq} came after {last}")
        self._is_open(rollout, written, f"report {record.seq}")
        written.reports[record.seq] = record

    def _answered(self, rollout: str, written: Written, record: FeedbackGiven) -> None:
        if record.seq in written.answers:
            self._wrong(rollout, f"report {record.seq} is answered twice")
        elif record.seq not in written.reports and not self.unseen:
            self._wrong(rollout, f"the answer to {record.seq} came before the report")
        self._is_open(rollout, written, f"the answer to {record.seq}")
        written.answers[record.seq] = record

    def _taken(self, shard: str, record: GroupTaken) -> None:
        # A shard may know a group, by its tasks, before anyone is its trainer: number 0.
        last = self._fences.get((shard, record.group), -1)
        if record.fence <= last:
            self._wrong(shard, f"{record.group} was taken as {record.fence} after {last}")
        self._fences[shard, record.group] = record.fence

    def _says_the_same(self, shard: str, record: Record) -> None:
        """Check a snapshot against what happened; what was not seen is learnt from it."""
        written = self._written(shard, record)
        rollout = f"{shard}.{record.local}"
        match record:
            case StageReported():
                before = written.reports.setdefault(record.seq, record)
                if (before.payload, before.stage) != (record.payload, record.stage):
                    self._wrong(rollout, f"a snapshot has another report {record.seq}")
            case FeedbackGiven():
                given = written.answers.setdefault(record.seq, record)
                if told(given) != told(record):
                    self._wrong(rollout, f"a snapshot has another answer to {record.seq}")
            case RolloutEnded():
                if not written.ended and not self.unseen:
                    self._wrong(rollout, "a snapshot says that it ended")
                written.ended = True
            case RolloutBegun() | HistoryForgotten() | GroupTaken():
                pass
            case StateTaken() | StateWritten() | ActionBegun() | ActionEnded() | RolloutKept():
                self._wrong(rollout, "is kept in a snapshot, for which nobody asked in this run")
            case _:
                assert_never(record)

    def _is_open(self, rollout: str, written: Written, what: str) -> None:
        if written.ended:
            self._wrong(rollout, f"{what} came after the end")

    def _written(self, shard: str, record: Record) -> Written:
        if isinstance(record, GroupTaken):
            return Written()
        return self.rollouts.setdefault(f"{shard}.{record.local}", Written())

    def _wrong(self, who: str, what: str) -> None:
        self._model.violate(f"journal {self._last_sequence}: {what}", who)


def told(answer: FeedbackGiven) -> tuple[bytes, float | None, bool]:
    """Return what an answer says, without when it was given."""
    return answer.payload, answer.reward, answer.done
