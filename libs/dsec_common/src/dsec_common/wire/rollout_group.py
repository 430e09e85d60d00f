"""Groups of rollouts: one trainer, many tasks, steps and answers by the batch."""

from __future__ import annotations

from typing import Any

import msgspec

from dsec_common.wire.base import ErrorReply, Message


class TakeGroup(Message, frozen=True, kw_only=True):
    """Trainer: become the trainer of a group. Whoever was it before is fenced off."""

    group: str


class GroupLease(Message, frozen=True, kw_only=True):
    """``fence`` is larger than that of any trainer before; it goes into every request."""

    fence: int


class GroupTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task: any JSON value, and its place in the list."""

    index: int
    task: Any = None


class OpenGroup(Message, frozen=True, kw_only=True):
    """Trainer: open the rollouts of some tasks. The same group and index is the same rollout.

    ``fence`` 0 opens or finds them for whoever is, or will be, the group's trainer. Checkpoints are
    made as :class:`~dsec_common.wire.rollout.OpenRollout` says.
    """

    group: str
    fence: int
    tasks: tuple[GroupTask, ...]
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    checkpoint_every: int = 0
    durable_checkpoints: bool = False


class GroupOpened(Message, frozen=True, kw_only=True):
    """The rollouts' ids, in the order of the tasks."""

    rollouts: tuple[str, ...]


class NextSteps(Message, frozen=True, kw_only=True):
    """Trainer: the steps of a group in one shard after a position, waiting for the first.

    ``epoch`` and ``after`` are those of the last batch; at first, and wherever the shard has a new
    owner, all that is not answered comes.
    """

    group: str
    fence: int
    epoch: str = ""
    after: int = 0
    wait_s: float = 1.0
    limit: int = 256


class GroupStep(msgspec.Struct, frozen=True, kw_only=True):
    """One report of a rollout, ``<shard>.<local>``, that waits for its answer."""

    local: str
    index: int
    seq: int
    stage: str
    payload: Any = None
    sandbox_id: str = ""
    reported_at: float = 0.0


class StepBatch(Message, frozen=True, kw_only=True):
    """Steps in order, and how many of the group's rollouts in the shard are still open."""

    epoch: str
    after: int
    steps: tuple[GroupStep, ...] = ()
    open_rollouts: int = 0


class StepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one step. ``done`` tells the agent to stop and closes its rollout."""

    local: str
    seq: int
    payload: Any = None
    reward: float | None = None
    done: bool = False


class AnswerSteps(Message, frozen=True, kw_only=True):
    """Trainer: answer steps of a group in one shard; each is durable or refused by itself."""

    group: str
    fence: int
    answers: tuple[StepAnswer, ...]


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one answer: durable, there before (``duplicate``), or refused."""

    duplicate: bool = False
    error: ErrorReply | None = None


class StepsAnswered(Message, frozen=True, kw_only=True):
    """One outcome for each answer, in their order."""

    outcomes: tuple[StepOutcome, ...]


class ShardTaken(Message, frozen=True, kw_only=True):
    """Event: a shard has a new owner. Whoever waits for an answer of the last one asks again."""

    shard: str
