"""What a frame that is being made is about to add, and what each change in it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dsec_chronus import acting
from dsec_chronus.config import ChronusConfig
from dsec_chronus.contents import Contents
from dsec_chronus.draft import Draft
from dsec_chronus.effects import Answer, Decided, Nothing, Wait
from dsec_chronus.errors import (
    answered_by_group,
    fenced,
    group_unknown,
    rollout_unknown,
    shard_full,
    task_otherwise,
)
from dsec_chronus.events import (
    ActionAsked,
    ActionDone,
    AnswersAsked,
    AwaitAsked,
    Change,
    CloseAsked,
    FeedbackAsked,
    GroupOpenAsked,
    GroupTakeAsked,
    OpenAsked,
    PutAsked,
    ReportAsked,
    RolloutChange,
    StepAsked,
    TaskGiven,
)
from dsec_chronus.records import GroupTaken, Record, RolloutBegun, same_payload
from dsec_chronus.rollout import Rollout
from dsec_chronus.shares import Shares
from dsec_common.errors import DsecError
from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.rollout import RolloutOpened
from dsec_common.wire.rollout_group import GroupLease, GroupOpened, StepOutcome, StepsAnswered

_FOR_ANSWERS: Final = 8
"""One part in so many of a shard is for answers alone: they are what lets agents go on."""


@dataclass(slots=True)
class Drafts:
    """Decides changes against what is durable and what the same frame holds before them."""

    shard: str
    config: ChronusConfig
    contents: Contents
    sizes: Shares
    _rollouts: dict[str, Draft] = field(default_factory=dict)
    _fences: dict[tuple[str, str], int] = field(default_factory=dict)
    # What branches that begin in the frame are going to take.
    _promised_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self._rollouts or self._fences)

    def __contains__(self, local: str) -> bool:
        return local in self._rollouts

    def clear(self) -> None:
        """Forget the frame: it is durable, or it never was."""
        self._rollouts.clear()
        self._fences.clear()
        self._promised_bytes = 0

    def decide(self, asked: Change, frame_bytes: int) -> tuple[list[Record], Decided]:
        """Return what the journal must hold before the change may be answered, and the answer.

        Args:
            asked: what is to change.
            frame_bytes: what the frame holds already.

        Raises:
            DsecError: the refusal; the frame is as before.
        """
        self._need_room(asked, frame_bytes)
        reply: Message
        match asked:
            case GroupTakeAsked():
                records, reply = self._take_group(asked)
            case GroupOpenAsked():
                records, reply = self._open_group(asked)
            case AnswersAsked():
                records, reply = self._answer_steps(asked)
            case PutAsked():
                draft = self._need_trainer(asked)
                records, reply = acting.put(asked, draft, self._id(asked.local))
            case ActionAsked():
                return self._begin_action(asked, frame_bytes)
            case ActionDone():
                return self._end_action(asked)
            case StepAsked():
                return self._step(asked), Wait(asked=_wait_of(asked))
            case _:
                records, reply = self._change_rollout(asked)
        return records, Answer(request_id=asked.request_id, reply=reply)

    def _need_room(self, asked: Change, frame_bytes: int) -> None:
        # Closing is how room is made again, and what is done is done.
        if isinstance(asked, CloseAsked | ActionDone):
            return
        limit = self.config.shard_bytes_max
        if not isinstance(asked, AnswersAsked | FeedbackAsked):
            limit = self._limit
        if not self.sizes.has_room(asked.project, limit, frame_bytes + self._promised_bytes):
            raise shard_full(self.shard, self.sizes.limit_of(asked.project, limit))

    @property
    def _limit(self) -> int:
        limit = self.config.shard_bytes_max
        return limit - limit // _FOR_ANSWERS

    def _id(self, local: str) -> str:
        return f"{self.shard}.{local}"

    # --- One rollout --------------------------------------------------------------------------

    def _change_rollout(self, asked: RolloutChange) -> tuple[list[Record], Message]:
        draft = self._draft(asked.local)
        if draft is None and isinstance(asked, OpenAsked):
            begun = RolloutBegun(
                local=asked.local,
                at=asked.at.unix_s,
                project=asked.project,
                labels=asked.labels,
                checkpoint_every=asked.checkpoint_every,
                durable=asked.durable,
            )
            self._rollouts[asked.local] = Draft(Rollout(begun))
            return [begun], RolloutOpened(rollout_id=self._id(asked.local))
        if isinstance(asked, CloseAsked) and asked.fence:
            draft = self._need_trainer(asked)
        else:
            draft = self._need_draft(asked)
        record, reply = draft.decide(asked, self._id(asked.local))
        records = [] if record is None else [record]
        if isinstance(asked, ReportAsked) and record is not None:
            records += self._after_report(asked, draft)
        return records, reply

    def _step(self, asked: StepAsked) -> list[Record]:
        draft = self._need_draft(asked)
        record = draft.report(asked, self._id(asked.local))
        return [] if record is None else [record, *self._after_report(asked, draft)]

    def _after_report(self, asked: ReportAsked, draft: Draft) -> Iterator[Record]:
        due = acting.automatic(draft, asked.seq, asked.at)
        if due is not None:
            yield due
        forgotten = None if draft.forgets else draft.rollout.forgettable()
        if forgotten is not None:
            draft.forgets = True
            yield forgotten

    def _begin_action(self, asked: ActionAsked, frame_bytes: int) -> tuple[list[Record], Decided]:
        draft = self._need_draft(asked) if asked.lost else self._need_trainer(asked)
        room = self.sizes.room_of(asked.project, self._limit) - frame_bytes - self._promised_bytes
        records, decided = acting.begin(asked, draft, self.shard, room)
        self._promised_bytes += sum(it.room_bytes for it in records)
        return [*records], decided

    def _end_action(self, asked: ActionDone) -> tuple[list[Record], Decided]:
        draft = self._draft(asked.local)
        records = [] if draft is None else acting.end(asked, draft, self.shard)
        for record in records:
            if isinstance(record, RolloutBegun):
                self._rollouts[record.local] = Draft(Rollout(record))
        return records, Nothing(request_id=asked.request_id, done=asked)

    def _need_draft(self, asked: RolloutChange | PutAsked | ActionAsked) -> Draft:
        draft = self._draft(asked.local)
        if draft is None or draft.rollout.begun.project != asked.project:
            raise rollout_unknown(self._id(asked.local))
        return draft

    def _need_trainer(self, asked: CloseAsked | PutAsked | ActionAsked) -> Draft:
        draft = self._need_draft(asked)
        begun = draft.rollout.begun
        if begun.group:
            if not asked.fence:
                raise answered_by_group(self._id(asked.local), begun.group)
            newest = self._fence(begun.project, begun.group)
            need_fence(begun.group, asked.fence, newest, self.shard)
        return draft

    def _draft(self, local: str) -> Draft | None:
        draft = self._rollouts.get(local)
        if draft is None and (rollout := self.contents.rollouts.get(local)) is not None:
            draft = self._rollouts[local] = Draft(rollout)
        return draft

    # --- A group ------------------------------------------------------------------------------

    def _fence(self, project: str, name: str) -> int:
        group = self.contents.groups.get((project, name))
        return max(self._fences.get((project, name), 0), 0 if group is None else group.fence)

    def _is_known(self, project: str, name: str) -> bool:
        return (project, name) in self._fences or (project, name) in self.contents.groups

    def _set_fence(self, asked: GroupTakeAsked | GroupOpenAsked, fence: int) -> GroupTaken:
        self._fences[asked.project, asked.group] = fence
        return GroupTaken(
            local=asked.local,
            at=asked.at.unix_s,
            project=asked.project,
            group=asked.group,
            fence=fence,
        )

    def _take_group(self, asked: GroupTakeAsked) -> tuple[list[Record], Message]:
        # Never less than the time: a group that this shard has forgotten may live in others.
        known = self._fence(asked.project, asked.group)
        fence = max(known + 1, int(asked.at.unix_s * 1000))
        return [self._set_fence(asked, fence)], GroupLease(fence=fence)

    def _open_group(self, asked: GroupOpenAsked) -> tuple[list[Record], Message]:
        known = self._fence(asked.project, asked.group)
        if 0 < asked.fence < known:
            raise fenced(asked.group, asked.fence, known)
        fresh = [task for task in asked.tasks if self._is_fresh(asked, task)]
        records: list[Record] = []
        if asked.fence > known or not self._is_known(asked.project, asked.group):
            records.append(self._set_fence(asked, asked.fence))
        for task in fresh:
            begun = RolloutBegun(
                local=task.local,
                at=asked.at.unix_s,
                project=asked.project,
                labels=asked.labels,
                group=asked.group,
                index=task.index,
                task=task.task,
                checkpoint_every=asked.checkpoint_every,
                durable=asked.durable,
            )
            self._rollouts[task.local] = Draft(Rollout(begun))
            records.append(begun)
        return records, GroupOpened(rollouts=tuple(self._id(task.local) for task in asked.tasks))

    def _is_fresh(self, asked: GroupOpenAsked, task: TaskGiven) -> bool:
        draft = self._draft(task.local)
        if draft is None:
            return True
        begun = draft.rollout.begun
        options = (begun.labels, begun.group, begun.checkpoint_every, begun.durable)
        same = options == (asked.labels, asked.group, asked.checkpoint_every, asked.durable)
        if not same or not same_payload(begun.task, task.task):
            raise task_otherwise(asked.group, task.index, self._id(task.local))
        return False

    def _answer_steps(self, asked: AnswersAsked) -> tuple[list[Record], Message]:
        known = self._fence(asked.project, asked.group)
        need_fence(asked.group, asked.fence, known, self.shard)
        records: list[Record] = []
        outcomes: list[StepOutcome] = []
        for answer in asked.answers:
            rollout_id = self._id(answer.local)
            draft = self._draft(answer.local)
            try:
                if answer.refusal is not None:
                    raise answer.refusal
                if draft is None or not _belongs(draft.rollout, asked):
                    raise rollout_unknown(rollout_id)
                record = draft.answer(answer, asked.at, rollout_id)
            except DsecError as error:
                outcomes.append(StepOutcome(error=ErrorReply.of(error)))
                continue
            if record is not None:
                records.append(record)
                if record.done and (ended := draft.close(asked.at)) is not None:
                    records.append(ended)
            outcomes.append(StepOutcome(duplicate=record is None))
        return records, StepsAnswered(outcomes=tuple(outcomes))


def need_fence(group: str, fence: int, newest: int, shard: str) -> None:
    """Return if whoever asks is the group's trainer, as this shard knows it.

    Raises:
        DsecError: ``conflict`` when another trainer is newer; ``not_found`` without such a group.
    """
    if fence < max(newest, 1):  # 0 opens rollouts, and is nobody's number
        raise fenced(group, fence, newest)
    if fence > newest:
        raise group_unknown(group, shard)


def _belongs(rollout: Rollout, asked: AnswersAsked) -> bool:
    return (rollout.begun.project, rollout.begun.group) == (asked.project, asked.group)


def _wait_of(asked: StepAsked) -> AwaitAsked:
    return AwaitAsked(
        request_id=asked.request_id,
        project=asked.project,
        local=asked.local,
        at=asked.at,
        seq=asked.seq,
        wait_s=asked.wait_s,
        of_step=True,
    )


def payload_bytes(asked: Change) -> int:
    """Return how many bytes a change holds while it waits for the journal."""
    match asked:
        case ReportAsked() | FeedbackAsked():
            return len(asked.payload)
        case AnswersAsked():
            return sum(len(answer.payload) for answer in asked.answers)
        case GroupOpenAsked():
            return sum(len(task.task) for task in asked.tasks)
        case PutAsked():
            return sum(map(len, asked.values.values()))
        case _:
            return 0
