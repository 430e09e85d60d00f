"""What a shard's core wants done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

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


Outcome: TypeAlias = Answer | Refuse
Effect: TypeAlias = WriteFrame | PurgeJournal | Outcome
