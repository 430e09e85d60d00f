"""What a shard's core wants done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dsec_chronus.events import AwaitAsked
from dsec_chronus.records import Record
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message


class WriteFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Append a frame; one is outstanding at most.

    Exactly one of ``FrameWritten``, ``FrameFailed`` and ``ShardLost`` must follow.
    """

    records: tuple[Record, ...]
    snapshot_part: int = 0
    snapshot_complete: bool = False


class PurgeJournal(msgspec.Struct, frozen=True, kw_only=True):
    """Drop the frames before ``sequence``: a complete snapshot begins there."""

    sequence: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request."""

    request_id: int
    reply: Message


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer a request with an error."""

    request_id: int
    error: DsecError


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a step: what it reported is durable, and now its feedback is waited for."""

    asked: AwaitAsked

    @property
    def request_id(self) -> int:
        """The request that waits."""
        return self.asked.request_id


Outcome: TypeAlias = Answer | Refuse
Decided: TypeAlias = Outcome | Wait
"""What becomes of a change once its frame is durable."""

Effect: TypeAlias = WriteFrame | PurgeJournal | Outcome
"""What the shell is to do."""
