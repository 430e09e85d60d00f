"""What can happen to a shard."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_chronus.records import Frame
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


class ReportAsked(Asked, frozen=True, kw_only=True):
    """A sandbox reports; ``payload`` is JSON."""

    seq: int
    stage: str
    payload: bytes
    sandbox_id: str


class FeedbackAsked(Asked, frozen=True, kw_only=True):
    """A trainer answers a report; ``payload`` is JSON."""

    seq: int
    payload: bytes
    reward: float | None
    done: bool


class CloseAsked(Asked, frozen=True, kw_only=True):
    """A trainer closes a rollout."""


class InspectAsked(Asked, frozen=True, kw_only=True):
    """A trainer looks at a rollout."""


class NextAsked(Asked, frozen=True, kw_only=True):
    """A trainer wants the reports after ``after_seq``."""

    after_seq: int
    wait_s: float
    limit: int


class AwaitAsked(Asked, frozen=True, kw_only=True):
    """A sandbox wants the feedback to report ``seq``."""

    seq: int
    wait_s: float


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


Change: TypeAlias = OpenAsked | ReportAsked | FeedbackAsked | CloseAsked
"""What is written to the journal before it is answered."""

Look: TypeAlias = InspectAsked | NextAsked | AwaitAsked
"""What is answered from what the journal already holds."""

Event: TypeAlias = (
    Change | Look | FrameRead | FrameWritten | FrameFailed | ClockTicked | SweepDue | ShardLost
)
