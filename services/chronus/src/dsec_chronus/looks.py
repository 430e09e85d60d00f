"""What those who look get: what is there, or nothing yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from dsec_chronus.contents import Contents
from dsec_chronus.drafts import need_fence
from dsec_chronus.errors import (
    acting,
    bad_seq,
    group_unknown,
    history_forgotten,
    no_checkpoint,
    nobody_waits,
    rolled_back,
    rollout_closed,
    rollout_unknown,
)
from dsec_chronus.events import (
    AwaitAsked,
    CheckpointsAsked,
    GetAsked,
    InspectAsked,
    Look,
    NextAsked,
    StepsAsked,
    Waiting,
)
from dsec_chronus.groups import Group
from dsec_chronus.records import unpack
from dsec_chronus.rollout import Rollout
from dsec_common.wire.base import Message
from dsec_common.wire.checkpoint import CheckpointList, RolloutStateValues
from dsec_common.wire.rollout import FeedbackState
from dsec_common.wire.rollout_group import StepBatch


@dataclass(frozen=True, slots=True)
class Looks:
    """Reads what is durable of a shard, for whoever asks in its own project."""

    shard: str
    epoch: str
    contents: Contents

    def ready(self, asked: Look) -> Message | None:
        """Return what a request gets now; None when it has to wait.

        Raises:
            DsecError: the refusal.
        """
        match asked:
            case InspectAsked():
                return self._rollout_of(asked).info(self._id(asked.local))
            case GetAsked():
                return self._values(asked)
            case CheckpointsAsked():
                kept = self._rollout_of(asked).kept.checkpoints.values()
                return CheckpointList(checkpoints=tuple(it.info() for it in kept))
            case NextAsked():
                return self._stages(asked)
            case AwaitAsked():
                return self._feedback(asked)
            case StepsAsked():
                return self._steps(asked)
            case _:
                assert_never(asked)

    def nothing_yet(self, asked: Waiting) -> Message:
        """Return what a request gets that has waited long enough.

        Raises:
            DsecError: the refusal.
        """
        if isinstance(asked, StepsAsked):
            group = self._group_of(asked)
            return StepBatch(epoch=self.epoch, after=self._after(asked), open_rollouts=group.open)
        rollout = self._rollout_of(asked)
        if isinstance(asked, NextAsked):
            after_seq = max(asked.after_seq, rollout.last_seq)
            return rollout.batch(after_seq, 1, self._id(asked.local))
        if rollout.kept.holds_feedback:
            return FeedbackState(ready=False, seq=asked.seq)
        return rollout.feedback_to(asked.seq)

    def reporter(self, project: str, local: str, seq: int) -> str:
        """Return the id of the sandbox whose report has no feedback yet.

        Raises:
            DsecError: ``not_found`` or ``expired`` when it does not wait for any; ``unavailable``
                while feedback is held back.
        """
        rollout, rollout_id = self.contents.rollouts.get(local), self._id(local)
        if rollout is None or rollout.begun.project != project:
            raise rollout_unknown(rollout_id)
        action = rollout.kept.action
        if action is not None and rollout.kept.holds_feedback:
            raise acting(rollout_id, action.kind)
        if not rollout.closed_at and seq not in rollout.feedback:
            for report in reversed(rollout.reports):  # a new one, mostly
                if report.seq == seq:
                    return report.sandbox_id
        raise nobody_waits(rollout_id, seq)

    def _id(self, local: str) -> str:
        return f"{self.shard}.{local}"

    def _rollout_of(
        self, asked: InspectAsked | GetAsked | CheckpointsAsked | NextAsked | AwaitAsked
    ) -> Rollout:
        rollout = self.contents.rollouts.get(asked.local)
        if rollout is None or rollout.begun.project != asked.project:
            raise rollout_unknown(self._id(asked.local))
        return rollout

    def _values(self, asked: GetAsked) -> Message:
        kept = self._rollout_of(asked).kept
        values, version = kept.values, kept.version
        if asked.checkpoint:
            checkpoint = kept.checkpoints.get(asked.checkpoint)
            if checkpoint is None:
                steps = ", ".join(str(it.begun.step) for it in kept.checkpoints.values())
                raise no_checkpoint(self._id(asked.local), -1, steps)
            values, version = checkpoint.values, checkpoint.version
        names = asked.names or tuple(values)
        found = {name: unpack(values[name]) for name in names if name in values}
        return RolloutStateValues(version=version, values=found)

    def _stages(self, asked: NextAsked) -> Message | None:
        rollout = self._rollout_of(asked)
        if not rollout.has_after(max(asked.after_seq, 0)) and not rollout.closed_at:
            return None
        return rollout.batch(asked.after_seq, asked.limit, self._id(asked.local))

    def _feedback(self, asked: AwaitAsked) -> Message | None:
        rollout, rollout_id = self._rollout_of(asked), self._id(asked.local)
        if asked.seq < 1:
            raise bad_seq(asked.seq)
        if asked.seq <= rollout.forgotten_seq:
            forgotten, last_seq = rollout.forgotten_seq, rollout.last_seq
            raise history_forgotten(rollout_id, asked.seq, forgotten, last_seq)
        if rollout.is_void(asked.seq):
            raise rolled_back(rollout_id, asked.seq, rollout.kept.back_to, rollout.last_seq)
        if rollout.kept.holds_feedback:
            return None
        if asked.seq in rollout.feedback:
            if asked.of_step:
                rollout.stepped_seq = max(rollout.stepped_seq, asked.seq)
            return rollout.feedback_to(asked.seq)
        if rollout.closed_at:
            raise rollout_closed(rollout_id)
        return None

    def _group_of(self, asked: StepsAsked) -> Group:
        group = self.contents.groups.get((asked.project, asked.group))
        if group is None:
            raise group_unknown(asked.group, self.shard)
        need_fence(asked.group, asked.fence, group.fence, self.shard)
        return group

    def _after(self, asked: StepsAsked) -> int:
        return asked.after if asked.epoch == self.epoch else 0

    def _steps(self, asked: StepsAsked) -> StepBatch | None:
        group, after = self._group_of(asked), self._after(asked)
        group.used_at = max(group.used_at, asked.at.unix_s)
        if group.open and not group.has_after(after):
            return None
        return group.batch(self.epoch, after, asked.limit)
