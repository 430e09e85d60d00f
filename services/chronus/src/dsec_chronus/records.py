"""What a shard's journal holds: frames of records, each a fact about one rollout.

A snapshot is written in the same records, so that one way of applying them serves both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, TypeAlias

import msgspec

from dsec_chronus.errors import too_large
from dsec_common.errors import invalid
from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.sandbox import CreateSandbox

PAYLOAD_BYTES_MAX: Final = 256 * 1024
"""The largest payload of a report or of feedback, as JSON."""

PAYLOAD_DEPTH_MAX: Final = 100
"""How deep arrays and objects may lie in one another: what every reader can take apart."""

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_BRACKET: Final = re.compile(rb"[\[\]{}]")

_VALUE_BYTES: Final = 64
#: Of JSON: ``5.0,`` is nine bytes in an answer, and nothing grows by more.
_SURELY_FITS_BYTES: Final = 400 * 1024
_RECORD_BYTES: Final = 256
"""What a record costs besides its texts; an estimate for limits."""


class RolloutBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A rollout is open from now on. Of a group, it is the rollout of task ``index``, in JSON.

    A checkpoint is made every ``checkpoint_every`` reports, unless that is 0. A branch says of
    which rollout (``parent``) and step.
    """

    local: str
    at: float
    project: str
    labels: dict[str, str]
    group: str = ""
    index: int = 0
    task: bytes = b""
    checkpoint_every: int = 0
    durable: bool = False
    parent: str = ""
    parent_step: int = 0


class StageReported(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The sandbox reached a stage. ``payload`` is JSON."""

    local: str
    at: float
    seq: int
    stage: str
    payload: bytes
    sandbox_id: str


class FeedbackGiven(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The trainer answered a report. ``payload`` is JSON."""

    local: str
    at: float
    seq: int
    payload: bytes
    reward: float | None
    done: bool


class RolloutEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A rollout takes nothing more."""

    local: str
    at: float


class HistoryForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Reports up to ``seq`` and their feedback are dropped; ``reward`` is the sum of theirs."""

    local: str
    at: float
    seq: int
    reward: float


class GroupTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Whoever holds ``fence`` is the group's trainer from now on. ``local`` stands for its name."""

    local: str
    at: float
    project: str
    group: str
    fence: int


class StateWritten(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """What is kept with a rollout changed; each value is JSON."""

    local: str
    at: float
    version: int
    puts: dict[str, bytes] = {}
    deletes: tuple[str, ...] = ()


class StateTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A branch begins with the state of its parent's checkpoint; both are in this shard."""

    local: str
    at: float
    parent: str
    checkpoint: int


class ActionKind(StrEnum):
    """What is done to a rollout together with its sandbox."""

    CHECKPOINT = "checkpoint"
    ROLLBACK = "rollback"
    BRANCH = "branch"


class ActionBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The intent: from here on it is carried to its end, by whoever owns the shard.

    Attributes:
        number: counts the rollout's actions; a checkpoint's is its own.
        key: the caller's.
        step: the newest report then; of the checkpoint that is gone back to.
        checkpoint: which is gone back to or branched.
        sandbox_id: which sandbox it is about.
        count: of branches.
        durable: a checkpoint's snapshot is made a layer, too.
        reward: the sum of the rewards of the reports up to ``step``.
        lost: the sandbox's node is gone, so the sandbox is made again elsewhere.
        asked_step: the caller's; None in records of before it was kept.
        room_bytes: what its branches are going to take; counted with the rollout until they do.
    """

    local: str
    at: float
    number: int
    kind: ActionKind
    key: str
    step: int
    checkpoint: int = 0
    sandbox_id: str = ""
    count: int = 0
    durable: bool = False
    reward: float = 0.0
    lost: bool = False
    asked_step: int | None = None
    room_bytes: int = 0


class Taken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a node kept of a sandbox, and how to make one of it.

    Attributes:
        snapshot_id: on the node.
        layers: those below it, lowest first.
        layer: made of it; empty when it is on its node alone.
        template: how to make one like it.
        at: Unix time at which the template was told: from then its ``deadline_s`` counts.
    """

    snapshot_id: str
    layers: tuple[str, ...]
    template: CreateSandbox
    layer: str = ""
    at: float = 0.0


class Child(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What became of one branch; ``model_local`` is the rollout of its model calls, if any."""

    local: str
    sandbox_id: str = ""
    error: ErrorReply | None = None
    model_local: str = ""


class ActionEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The result of the rollout's action ``number``; with it the action takes effect, whole.

    Attributes:
        error: why nothing came of it.
        taken: a checkpoint's.
        sandbox_id: where a rollout that was put back goes on.
        last_seq: no report up to it is taken again.
        version: of the state that was put back.
        children: a branch's.
        told: it took effect before; kept to be told again, in snapshots of the journal.
    """

    local: str
    at: float
    number: int
    error: ErrorReply | None = None
    taken: Taken | None = None
    sandbox_id: str = ""
    last_seq: int = 0
    version: int = 0
    children: tuple[Child, ...] = ()
    told: bool = False


class RolloutKept(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Of snapshots of the journal: what else is known of a rollout that was put back or reported.

    Attributes:
        last_seq: no report up to it is taken again.
        number: of the newest action.
        sandbox_id: the one that last reported, or took its place.
        replaced: sandboxes whose place others took; the newest last.
        back_to: the step that it was last put back to; -1 when it never was.
        back_at: when.
        lost: it was put back because its sandbox was gone.
    """

    local: str
    at: float
    last_seq: int
    number: int
    sandbox_id: str
    replaced: tuple[str, ...] = ()
    back_to: int = -1
    back_at: float = 0.0
    lost: bool = False


KeptRecord: TypeAlias = StateWritten | ActionBegun | ActionEnded | RolloutKept
"""Of a rollout's state and what is done to it together with its sandbox."""

Record: TypeAlias = (
    RolloutBegun
    | StageReported
    | FeedbackGiven
    | RolloutEnded
    | HistoryForgotten
    | GroupTaken
    | StateTaken
    | KeptRecord
)


class Frame(Message, frozen=True, kw_only=True):
    """One message of the journal: all of it is durable, or nothing.

    Attributes:
        epoch: which ownership of the shard wrote it; fresh each time the shard is taken.
        number: counts the frames of an epoch. With the epoch it tells whose frame is the last
            one when an acknowledgement got lost.
        records: what happened, in order; none in the frame that begins an epoch.
        snapshot_part: 0 for what happened; from 1 the parts of a snapshot, one right after another.
        snapshot_complete: this part is the last, and frames before part 1 are not needed any more.
    """

    epoch: str
    number: int
    records: tuple[Record, ...] = ()
    snapshot_part: int = 0
    snapshot_complete: bool = False


def size_of(record: Record) -> int:
    """Return about how many bytes a record takes in the journal and in memory."""
    match record:
        case RolloutBegun():
            labels = sum(
                len(name.encode()) + len(value.encode()) for name, value in record.labels.items()
            )
            return _RECORD_BYTES + labels + len(record.group) + len(record.task)
        case StageReported():
            return _RECORD_BYTES + len(record.payload) + len(record.stage)
        case FeedbackGiven():
            return _RECORD_BYTES + len(record.payload)
        case StateWritten():
            return _RECORD_BYTES + values_size(record.puts) + sum(map(len, record.deletes))
        case ActionEnded():
            return _RECORD_BYTES * (1 + len(record.children)) + _taken_size(record.taken)
        case (
            RolloutEnded()
            | HistoryForgotten()
            | GroupTaken()
            | StateTaken()
            | ActionBegun()
            | RolloutKept()
        ):
            return _RECORD_BYTES


def values_size(values: Mapping[str, bytes]) -> int:
    """Return about how many bytes values take, with their names."""
    return sum(len(name.encode()) + len(value) + _VALUE_BYTES for name, value in values.items())


def answer_size(values: Mapping[str, bytes]) -> int:
    """Return how many bytes values take in an answer; as JSON when they surely fit as either."""
    size = values_size(values)
    if size <= _SURELY_FITS_BYTES:
        return size
    whole = {name: unpack(value) for name, value in values.items()}
    return len(msgspec.msgpack.encode(whole))


def _taken_size(taken: Taken | None) -> int:
    return 0 if taken is None else len(msgspec.msgpack.encode(taken))


def pack(payload: Any) -> bytes:
    """Return a payload as JSON.

    Raises:
        DsecError: ``invalid`` when it is no JSON value that every reader understands, or larger
            than :data:`PAYLOAD_BYTES_MAX`.
    """
    try:
        body = msgspec.json.encode(payload)
        # What is accepted here is sent to readers of either encoding; not every JSON number fits.
        msgspec.msgpack.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise invalid(f"the payload is not a JSON value: {error}") from error
    if len(body) > PAYLOAD_BYTES_MAX:
        raise too_large("the payload", len(body), PAYLOAD_BYTES_MAX)
    if (depth := _depth(body)) > PAYLOAD_DEPTH_MAX:
        raise too_large("the payload", depth, PAYLOAD_DEPTH_MAX, "levels")
    return body


def _depth(body: bytes) -> int:
    """Return how deep a JSON value is, or no more than the limit when it cannot be deeper."""
    opening = body.count(b"[") + body.count(b"{")
    if opening <= PAYLOAD_DEPTH_MAX:
        return opening
    levels = (1 if bracket in b"[{" else -1 for bracket in _BRACKET.findall(_STRING.sub(b"", body)))
    return max(accumulate(levels), default=0)


def unpack(body: bytes) -> Any:
    """Return the payload that :func:`pack` made ``body`` of."""
    return msgspec.json.decode(body)


def same_payload(one: bytes, other: bytes) -> bool:
    """Return whether two payloads say the same: the order of an object's names means nothing."""
    return one == other or bool(unpack(one) == unpack(other))
