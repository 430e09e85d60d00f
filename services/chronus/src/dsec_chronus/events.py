"""What can happen to a shard."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_chronus.records import ActionKind, Child, Frame, Taken
from dsec_common.errors import DsecError


class Moment(msgspec.Struct, frozen=True):
    """When something happened: Unix time for records, monotonic time for deadlines."""

    unix_s: float
    monotonic_s: float


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request about one rollout. ``project`` is the caller's, as the subject guarantees it."""

    request_id: int
    project: str
    local: str
    at: Moment


class OpenAsked(Asked, frozen=True, kw_only=True):
    """Someone opens a rollout under an id that is made of the idempotency key."""

    labels: dict[str, str]
    checkpoint_every: int = 0
    durable: bool = False


class ReportAsked(Asked, frozen=True, kw_only=True):
    """A sandbox reports; ``payload`` is JSON."""

    seq: int
    stage: str
    payload: bytes
    sandbox_id: str


class StepAsked(ReportAsked, frozen=True, kw_only=True):
    """A sandbox reports and waits for the feedback to it."""

    wait_s: float


class FeedbackAsked(Asked, frozen=True, kw_only=True):
    """A trainer answers a report; ``payload`` is JSON."""

    seq: int
    payload: bytes
    reward: float | None
    done: bool


class CloseAsked(Asked, frozen=True, kw_only=True):
    """A trainer closes a rollout; ``fence`` 0 is anybody."""

    fence: int = 0


class InspectAsked(Asked, frozen=True, kw_only=True):
    """A trainer looks at a rollout."""


class NextAsked(Asked, frozen=True, kw_only=True):
    """A trainer wants the reports after ``after_seq``."""

    after_seq: int
    wait_s: float
    limit: int


class AwaitAsked(Asked, frozen=True, kw_only=True):
    """A sandbox wants the feedback to report ``seq``, maybe as the second half of a step."""

    seq: int
    wait_s: float
    of_step: bool = False


class GroupTakeAsked(Asked, frozen=True, kw_only=True):
    """A trainer takes a group over; ``local`` stands for the group in this and what follows."""

    group: str


class TaskGiven(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a group, as JSON, and the id of its rollout."""

    local: str
    index: int
    task: bytes


class GroupOpenAsked(Asked, frozen=True, kw_only=True):
    """A trainer opens the rollouts of a group that are in this shard."""

    group: str
    fence: int
    labels: dict[str, str]
    tasks: tuple[TaskGiven, ...]
    checkpoint_every: int = 0
    durable: bool = False


class AnswerGiven(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one step of a group; ``payload`` is JSON. ``done`` ends the rollout.

    One with a ``refusal`` cannot be given, whatever the state of its rollout.
    """

    local: str
    seq: int
    payload: bytes
    reward: float | None
    done: bool
    refusal: DsecError | None = None


class AnswersAsked(Asked, frozen=True, kw_only=True):
    """A trainer answers steps of its group."""

    group: str
    fence: int
    answers: tuple[AnswerGiven, ...]


class StepsAsked(Asked, frozen=True, kw_only=True):
    """A trainer wants the steps of its group after a position that ``epoch`` gives a meaning."""

    group: str
    fence: int
    epoch: str
    after: int
    wait_s: float
    limit: int


class PutAsked(Asked, frozen=True, kw_only=True):
    """A trainer keeps values with a rollout; each is JSON."""

    values: dict[str, bytes]
    deletes: tuple[str, ...]
    fence: int = 0


class GetAsked(Asked, frozen=True, kw_only=True):
    """A trainer reads what is kept with a rollout, now or at a checkpoint."""

    names: tuple[str, ...]
    checkpoint: int


class CheckpointsAsked(Asked, frozen=True, kw_only=True):
    """A trainer wants to know the checkpoints of a rollout."""


class ActionAsked(Asked, frozen=True, kw_only=True):
    """Something is to be done to a rollout together with its sandbox.

    ``lost`` asks for it where the sandbox's node is gone: another node goes on.
    """

    kind: ActionKind
    key: str
    step: int = -1
    sandbox_id: str = ""
    durable: bool = False
    count: int = 0
    lost: bool = False
    fence: int = 0


class ActionDone(Asked, frozen=True, kw_only=True):
    """A rollout's action came to this; nobody asks, so ``request_id`` is 0."""

    number: int
    error: DsecError | None = None
    taken: Taken | None = None
    sandbox_id: str = ""
    children: tuple[Child, ...] = ()


class JournalRead(msgspec.Struct, frozen=True, kw_only=True):
    """The shard is ours, and all that is durable of it has been read."""

    at: Moment


class FrameRead(msgspec.Struct, frozen=True, kw_only=True):
    """The journal held this frame when the shard was taken."""

    frame: Frame
    sequence: int


class FrameWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The outstanding frame is durable as number ``sequence`` of the journal."""

    sequence: int
    at: Moment


class FrameFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The outstanding frame is certainly not in the journal."""

    error: DsecError
    at: Moment


class ClockTicked(msgspec.Struct, frozen=True, kw_only=True):
    """A deadline may have passed."""

    at: Moment


class SweepDue(msgspec.Struct, frozen=True, kw_only=True):
    """Time to look for rollouts that are over."""

    at: Moment


class ShardLost(msgspec.Struct, frozen=True, kw_only=True):
    """The shard is another's, or nobody's: whoever waits must ask again."""

    error: DsecError


RolloutChange: TypeAlias = OpenAsked | ReportAsked | StepAsked | FeedbackAsked | CloseAsked
GroupChange: TypeAlias = GroupTakeAsked | GroupOpenAsked | AnswersAsked
KeptChange: TypeAlias = PutAsked | ActionAsked | ActionDone
Change: TypeAlias = RolloutChange | GroupChange | KeptChange
"""What is written to the journal before it is answered."""

Waiting: TypeAlias = NextAsked | AwaitAsked | StepsAsked
"""What may wait until there is something."""

Look: TypeAlias = InspectAsked | GetAsked | CheckpointsAsked | Waiting
"""What is answered from what the journal already holds."""

Event: TypeAlias = (
    Change
    | Look
    | FrameRead
    | JournalRead
    | FrameWritten
    | FrameFailed
    | ClockTicked
    | SweepDue
    | ShardLost
)
