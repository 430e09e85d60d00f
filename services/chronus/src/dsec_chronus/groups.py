"""One group of rollouts in a shard: who its trainer is, and the steps that wait for an answer.

Steps have positions in the order in which they became durable. A trainer says up to which position
it has them, so a batch whose answer got lost is sent once more. Positions mean something to one
owner of the shard only, which its epoch says; to a new one the trainer has nothing yet, and gets
again what it has not answered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dsec_chronus.records import (
    PAYLOAD_BYTES_MAX,
    GroupTaken,
    StageReported,
    size_of,
    unpack,
)
from dsec_chronus.rollout import Rollout
from dsec_common.wire.rollout_group import GroupStep, StepBatch

STEPS_MAX: Final = 1024
"""Steps in one answer to a trainer."""


@dataclass(slots=True)
class Group:
    """What one shard knows of a group.

    Attributes:
        local: stands for its name among those who wait.
        project: whose it is.
        name: unique in the project.
        fence: the newest trainer's number.
        touched_at: when something of it changed.
        used_at: when its trainer last asked, as this owner knows it.
        members: its rollouts here.
        open: how many of them are open.
    """

    local: str
    project: str
    name: str
    fence: int = 0
    touched_at: float = 0.0
    used_at: float = 0.0
    members: set[str] = field(default_factory=set)
    open: int = 0
    _position: int = 0
    # Ordered, with those that were answered left in until they are half of it.
    _positions: list[int] = field(default_factory=list)
    _steps: dict[int, tuple[Rollout, StageReported]] = field(default_factory=dict)
    _at: dict[str, dict[int, int]] = field(default_factory=dict)

    def record(self) -> GroupTaken:
        """Return the fact that makes a group like this one, without its rollouts."""
        return GroupTaken(
            local=self.local,
            at=self.touched_at,
            project=self.project,
            group=self.name,
            fence=self.fence,
        )

    # --- What became durable ------------------------------------------------------------------

    def opened(self, rollout: Rollout) -> None:
        """Take in a rollout that was opened."""
        self.members.add(rollout.begun.local)
        self.open += 1

    def reported(self, rollout: Rollout, report: StageReported) -> None:
        """Take in a step that waits from now on."""
        self._position += 1
        self._positions.append(self._position)
        self._steps[self._position] = (rollout, report)
        self._at.setdefault(rollout.begun.local, {})[report.seq] = self._position

    def answered(self, rollout: Rollout, seq: int) -> None:
        """Drop a step that waits no more."""
        steps = self._at.get(rollout.begun.local, {})
        position = steps.pop(seq, None)
        if position is None:
            return
        if not steps:
            del self._at[rollout.begun.local]
        self._drop(position)

    def ended(self, rollout: Rollout) -> None:
        """Drop the steps of a rollout that is closed: they cannot be answered any more."""
        self.open -= 1
        for position in self._at.pop(rollout.begun.local, {}).values():
            self._drop(position)

    def forgot(self, rollout: Rollout) -> None:
        """Drop a rollout."""
        if not rollout.closed_at:
            self.ended(rollout)
        self.members.discard(rollout.begun.local)

    def _drop(self, position: int) -> None:
        del self._steps[position]
        if len(self._positions) > 2 * len(self._steps) + STEPS_MAX:
            self._positions = list(self._steps)

    # --- What a trainer gets ------------------------------------------------------------------

    def _after(self, position: int) -> Iterator[int]:
        positions = self._positions
        for at in range(bisect_right(positions, position), len(positions)):
            if positions[at] in self._steps:
                yield positions[at]

    def has_after(self, position: int) -> bool:
        """Return whether a step waits after ``position``."""
        return next(self._after(position), None) is not None

    def batch(self, epoch: str, after: int, limit: int) -> StepBatch:
        """Return the steps after a position: as many as fit one message, one at least if any."""
        steps: list[GroupStep] = []
        size = 0
        for position in self._after(after):
            rollout, report = self._steps[position]
            size += size_of(report)
            if steps and (size > PAYLOAD_BYTES_MAX or len(steps) >= min(limit, STEPS_MAX)):
                break
            steps.append(_as_sent(rollout, report))
            after = position
        return StepBatch(epoch=epoch, after=after, steps=tuple(steps), open_rollouts=self.open)

    def waiting(self) -> set[tuple[str, int]]:
        """Return the steps that wait: rollouts and numbers."""
        return {(rollout.begun.local, report.seq) for rollout, report in self._steps.values()}


def _as_sent(rollout: Rollout, report: StageReported) -> GroupStep:
    return GroupStep(
        local=report.local,
        index=rollout.begun.index,
        seq=report.seq,
        stage=report.stage,
        payload=unpack(report.payload),
        sandbox_id=report.sandbox_id,
        reported_at=report.at,
    )
