"""What a shard's journal holds: frames of records, each a fact about one rollout.

A snapshot is written in the same records, so that one way of applying them serves both.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any, Final, TypeAlias

import msgspec

from dsec_chronus.errors import too_large
from dsec_common.errors import invalid
from dsec_common.wire.base import Message

PAYLOAD_BYTES_MAX: Final = 256 * 1024
"""The largest payload of a report or of feedback, as JSON."""

PAYLOAD_DEPTH_MAX: Final = 100
"""How deep arrays and objects may lie in one another: what every reader can take apart."""

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_BRACKET: Final = re.compile(rb"[\[\]{}]")

_RECORD_BYTES: Final = 256
"""What a record costs besides its texts; an estimate for limits."""


class RolloutBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A rollout is open from now on. Of a group, it is the rollout of task ``index``, in JSON."""

    local: str
    at: float
    project: str
    labels: dict[str, str]
    group: str = ""
    index: int = 0
    task: bytes = b""


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


Record: TypeAlias = (
    RolloutBegun | StageReported | FeedbackGiven | RolloutEnded | HistoryForgotten | GroupTaken
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
            labels = sum(len(name) + len(value) for name, value in record.labels.items())
            return _RECORD_BYTES + labels + len(record.group) + len(record.task)
        case StageReported():
            return _RECORD_BYTES + len(record.payload) + len(record.stage)
        case FeedbackGiven():
            return _RECORD_BYTES + len(record.payload)
        case RolloutEnded() | HistoryForgotten() | GroupTaken():
            return _RECORD_BYTES


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
